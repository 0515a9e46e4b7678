#pragma once
// A folder of its own for each test, and a small training state.
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "core/checkpoint/checkpoint.h"
#include "memory/stream.h"
#include "tests/support/catch.h"

namespace moesaic::test {

namespace fs = std::filesystem;

/// An empty folder that vanishes with the object.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static int count = 0;
    path_ = fs::temp_directory_path() /
            ("moesaic test " + std::to_string(::getpid()) + " " + std::to_string(count++));
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

inline std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  REQUIRE(file);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}
inline void write_file(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  REQUIRE(file);
}

/// Host tensors that own their bytes.
class State {
 public:
  /// Every byte is a function of `seed`, the tensor and its place.
  void add(const std::string& name, DType dtype, const Shape& shape, unsigned seed) {
    std::vector<std::byte> bytes(byte_size(dtype) * static_cast<std::size_t>(shape.numel()));
    std::uint32_t x = seed * 2654435761U + static_cast<std::uint32_t>(tensors_.size()) * 97U + 1U;
    for (auto& b : bytes) {
      x = x * 1664525U + 1013904223U;
      b = static_cast<std::byte>(x >> 24);
    }
    memory_.push_back(std::move(bytes));
    tensors_.push_back({name, {memory_.back().data(), dtype, shape}});
  }
  const std::vector<StateTensor>& tensors() const { return tensors_; }
  std::vector<StateTensor>& tensors() { return tensors_; }
  const std::vector<std::vector<std::byte>>& bytes() const { return memory_; }

 private:
  std::vector<std::vector<std::byte>> memory_;
  std::vector<StateTensor> tensors_;
};

inline State small_state(unsigned seed) {
  State s;
  s.add("model.embed_tokens.weight", DType::bf16, {7, 5}, seed);
  s.add("model.layers.1.experts.0.w1.weight", DType::f32, {3, 5}, seed);
  s.add("model.layers.1.experts.1.w1.weight", DType::f32, {3, 5}, seed);
  s.add("optimizer/m/model.embed_tokens.weight", DType::f32, {7, 5}, seed);
  s.add("optimizer/step", DType::i64, {}, seed);
  s.add("ema/model.embed_tokens.weight", DType::f64, {7, 5}, seed);
  s.add("buffer/model.layers.1.histogram", DType::i32, {2, 1, 3, 1, 2}, seed);
  s.add("buffer/flags", DType::u8, {3}, seed);
  s.add("buffer/nothing", DType::f32, {0, 4}, seed);
  return s;
}

inline StateValues small_values() {
  StateValues v;
  v.integers = {{"step", 100}, {"tokens", INT64_C(9223372036854775807)}, {"least", INT64_MIN}};
  v.reals = {{"third", 1.0 / 3.0}, {"tiny", 5e-324}, {"minus_zero", -0.0}, {"large", 1e308}};
  v.texts = {{"note", "line\n\"quoted\" \xc3\xa4"}, {"empty", ""}};
  return v;
}

constexpr const char* kConfigText = "model:\n  hidden_size: 5  # a comment\ntrain: {steps: 100}\n";

inline fs::path step_folder(const fs::path& checkpoints, std::int64_t step) {
  std::string digits = std::to_string(step);
  return checkpoints / ("step-" + std::string(8 - digits.size(), '0') + digits);
}

/// Saves `small_state(step)` with all checkpoints kept.
inline fs::path save_small(const fs::path& checkpoints,
                           std::int64_t step,
                           std::int64_t keep_last = 0,
                           std::int64_t keep_every = 0) {
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  const State state = small_state(static_cast<unsigned>(step));
  save_checkpoint(checkpoints,
                  step,
                  state.tensors(),
                  small_values(),
                  kConfigText,
                  keep_last,
                  keep_every,
                  stream);
  return step_folder(checkpoints, step);
}

/// The text of the InputError that `action` throws; fails when there is none.
template <class Action>
std::string input_error(Action&& action) {
  try {
    action();
  } catch (const InputError& e) {
    return e.what();
  }
  FAIL("no InputError");
  return {};
}

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline std::string load_error(const fs::path& checkpoint) {
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  State state = small_state(0);
  return input_error([&] { load_checkpoint(checkpoint, state.tensors(), true, stream); });
}

}  // namespace moesaic::test
