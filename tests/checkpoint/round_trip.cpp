#include <cmath>
#include <limits>

#include "core/base/split_float.h"
#include "core/checkpoint/data_files.h"
#include "core/checkpoint/safetensors.h"
#include "tests/checkpoint/support.h"

namespace moesaic {
namespace {

using test::State;
namespace fs = std::filesystem;

TEST_CASE("what is saved is loaded, bit by bit") {
  const test::TemporaryFolder dir;
  for (const auto mode : {Stream::Mode::immediate, Stream::Mode::worker}) {
    Stream stream(kCpu, "test", mode);
    const State saved = test::small_state(3);
    StateValues values = test::small_values();
    values.reals["nan"] = std::numeric_limits<double>::quiet_NaN();
    values.reals["inf"] = std::numeric_limits<double>::infinity();
    values.reals["minus_inf"] = -std::numeric_limits<double>::infinity();
    const auto root = dir.path() / "a" / "run" / "checkpoints";  // parents do not exist yet
    save_checkpoint(root, 100, saved.tensors(), values, test::kConfigText, 3, 0, stream);

    const auto latest = latest_checkpoint(root);
    REQUIRE(latest);
    REQUIRE(latest->step == 100);
    REQUIRE(latest->path == root / "step-00000100");
    State loaded = test::small_state(4);
    REQUIRE(loaded.bytes() != saved.bytes());
    const StateValues found = load_checkpoint(latest->path, loaded.tensors(), true, stream);
    REQUIRE(loaded.bytes() == saved.bytes());
    REQUIRE(found.integers == values.integers);
    REQUIRE(found.texts == values.texts);
    REQUIRE(found.reals.size() == values.reals.size());
    for (const auto& [name, value] : values.reals) {
      INFO(name);
      const double x = found.reals.at(name);
      if (std::isnan(value)) {
        REQUIRE(std::isnan(x));
      } else {
        REQUIRE(std::memcmp(&x, &value, sizeof(x)) == 0);
      }
    }
    REQUIRE(checkpoint_config(latest->path) == test::kConfigText);
    verify_checkpoint(latest->path);
    fs::remove_all(dir.path() / "a");
  }
}

TEST_CASE("a save waits for earlier work of the stream") {
  const test::TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::worker);
  std::vector<float> value(4, 1.0F);
  const std::vector<StateTensor> tensors{
      {"w", {reinterpret_cast<std::byte*>(value.data()), DType::f32, {4}}}};
  stream.enqueue([&] {
    ::usleep(20000);
    value[2] = 7.0F;
  });
  save_checkpoint(dir.path(), 1, tensors, {}, "", 0, 0, stream);
  value[2] = 0.0F;
  load_checkpoint(dir.path() / "step-00000001", tensors, true, stream);
  REQUIRE(value[2] == 7.0F);
}

TEST_CASE("a split tensor is an f32 tensor in files, whatever the pieces it goes through in") {
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  constexpr std::int64_t kNumElements = 37;
  State whole, split, loaded;
  whole.add("w", DType::f32, {kNumElements}, 3);
  for (State* s : {&split, &loaded}) {
    s->add("w", DType::bf16, {kNumElements}, 5);
    s->add("remainder", DType::u16, {kNumElements}, 6);
    s->tensors()[0].remainder = s->tensors()[1].view;
    s->tensors().pop_back();
  }
  float* numbers = whole.tensors()[0].view.as<float>();
  for (std::int64_t i = 0; i < kNumElements; ++i) {
    if (std::isnan(numbers[i])) numbers[i] = 1.0F;  // its payload would be lost
    split_float(numbers[i],
                split.tensors()[0].view.as<bf16>()[i],
                split.tensors()[0].remainder.as<std::uint16_t>()[i]);
  }
  REQUIRE(split.tensors()[0].dtype() == DType::f32);
  REQUIRE(split.tensors()[0].bytes() == whole.bytes()[0].size());
  for (const std::size_t piece : {1, 8, 24, 25, 148, 1000}) {
    INFO("pieces of " << piece << " bytes");
    Staging staging(stream, piece);
    std::vector<std::byte> bytes;
    staging.read(split.tensors()[0], [&](const std::byte* data, std::size_t n) {
      bytes.insert(bytes.end(), data, data + n);
    });
    CHECK(bytes == whole.bytes()[0]);
    staging.write(loaded.tensors()[0], bytes.data());
    CHECK(loaded.bytes() == split.bytes());
    for (std::int64_t i = 0; i < kNumElements; ++i)
      loaded.tensors()[0].view.as<bf16>()[i] = bf16(0.0F);
  }

  const test::TemporaryFolder dir;
  save_checkpoint(dir.path(), 1, split.tensors(), {}, "", 0, 0, stream);
  const fs::path folder = dir.path() / "step-00000001";
  const SafetensorsFile file(folder / "model.safetensors");
  CHECK(file.view("w").dtype() == DType::f32);
  CHECK(std::memcmp(file.view("w").data(), numbers, kNumElements * sizeof(float)) == 0);
  State other;
  other.add("w", DType::f32, {kNumElements}, 9);
  load_checkpoint(folder, other.tensors(), true, stream);
  CHECK(other.bytes() == whole.bytes());
  load_checkpoint(folder, loaded.tensors(), true, stream);
  CHECK(loaded.bytes() == split.bytes());
}

TEST_CASE("the files are safetensors files with the logical names") {
  const test::TemporaryFolder dir;
  const auto folder = test::save_small(dir.path(), 5);
  const SafetensorsFile model(folder / "model.safetensors");
  REQUIRE(model.tensors().size() == 3);
  REQUIRE(model.metadata().at("format") == "pt");
  const auto view = model.view("model.layers.1.experts.1.w1.weight");
  REQUIRE(view.shape() == Shape{3, 5});
  const State state = test::small_state(5);
  REQUIRE(std::memcmp(view.data(), state.bytes()[2].data(), view.bytes()) == 0);
  REQUIRE(SafetensorsFile(folder / "optimizer.safetensors").contains("optimizer/step"));
  REQUIRE(SafetensorsFile(folder / "ema.safetensors").tensors().size() == 1);
  REQUIRE(SafetensorsFile(folder / "buffers.safetensors").tensors().size() == 3);
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(folder))
    files += entry.is_regular_file() ? 1 : 100;
  REQUIRE(files == 5);  // with the manifest
}

TEST_CASE("headers of any length are read, whatever its digits and bits") {
  for (const std::size_t length : {99'994,
                                   99'995,
                                   99'999,
                                   100'000,
                                   100'001,
                                   65'535,
                                   65'536,
                                   1'048'575,
                                   1'048'576,
                                   9'999'999,
                                   10'000'000}) {
    const std::string start = R"({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},)"
                              R"( "__metadata__": {"long": ")";
    const std::string text = start + std::string(length - start.size() - 3, 'x') + "\"}}";
    REQUIRE(text.size() == length);
    const test::TemporaryFolder dir;
    const std::uint64_t bytes = length;
    std::ofstream(dir.path() / "h.safetensors", std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&bytes), 8) << text << "abc";
    const SafetensorsFile file(dir.path() / "h.safetensors");
    REQUIRE(std::memcmp(file.view("a").data(), "abc", 3) == 0);
    REQUIRE(file.metadata().at("long").size() == length - start.size() - 3);
  }
}

TEST_CASE("a kind of tensors is cut into files between tensors") {
  const State state = test::small_state(1);
  const auto files =
      plan_files(state.tensors(), 130);  // model: 70 + 60 | 60 bytes; optimizer: 140 | 8
  std::vector<std::string> names;
  for (const auto& f : files)
    names.push_back(f.name);
  REQUIRE(names == std::vector<std::string>{"model-00001-of-00002.safetensors",
                                            "model-00002-of-00002.safetensors",
                                            "optimizer-00001-of-00002.safetensors",
                                            "optimizer-00002-of-00002.safetensors",
                                            "ema.safetensors",
                                            "buffers.safetensors"});
  REQUIRE(files[0].tensors.size() == 2);
  REQUIRE(files[0].tensors[0]->view.dtype() == DType::f32);  // larger elements first

  const test::TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  save_checkpoint(dir.path(), 7, state.tensors(), {}, "", 0, 0, stream, 130);
  State loaded = test::small_state(2);
  load_checkpoint(dir.path() / "step-00000007", loaded.tensors(), true, stream);
  REQUIRE(loaded.bytes() == state.bytes());
}

TEST_CASE("tensors larger than the staging buffer go in pieces") {
  Stream stream(kCpu, "test", Stream::Mode::worker);
  State state;
  state.add("a", DType::u8, {1000}, 1);
  Staging staging(stream, 64);
  std::vector<std::byte> copy;
  int pieces = 0;
  staging.read(state.tensors()[0], [&](const std::byte* data, std::size_t bytes) {
    copy.insert(copy.end(), data, data + bytes);
    ++pieces;
  });
  REQUIRE(pieces == 16);
  REQUIRE(copy == state.bytes()[0]);
  State other;
  other.add("a", DType::u8, {1000}, 2);
  staging.write(other.tensors()[0], copy.data());
  REQUIRE(other.bytes() == state.bytes());
  REQUIRE_THROWS_AS(Staging(*std::make_unique<Stream>(kCpu, "dry", Stream::Mode::dry), 64),
                    InternalError);
}

TEST_CASE("the same state gives the same bytes") {
  const test::TemporaryFolder a, b;
  const auto first = test::save_small(a.path(), 12), second = test::save_small(b.path(), 12);
  for (const auto& entry : fs::directory_iterator(first)) {
    REQUIRE(test::read_file(entry.path()) == test::read_file(second / entry.path().filename()));
  }
}

TEST_CASE("a step that was saved before is replaced") {
  const test::TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  test::save_small(dir.path(), 9);
  const State other = test::small_state(77);
  save_checkpoint(dir.path(), 9, other.tensors(), {}, "new", 0, 0, stream);
  State loaded = test::small_state(0);
  load_checkpoint(dir.path() / "step-00000009", loaded.tensors(), true, stream);
  REQUIRE(loaded.bytes() == other.bytes());
  REQUIRE(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) == 1);
}

TEST_CASE("differences from the run's tensors are listed together") {
  const test::TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  const auto folder = test::save_small(dir.path(), 5);
  State wanted;
  wanted.add("model.embed_tokens.weight", DType::bf16, {7, 6}, 0);
  wanted.add("model.layers.1.experts.0.w1.weight", DType::bf16, {3, 5}, 0);
  wanted.add("model.new.weight", DType::f32, {2}, 0);
  const auto before = wanted.bytes();

  const std::string strict =
      test::input_error([&] { load_checkpoint(folder, wanted.tensors(), true, stream); });
  INFO(strict);
  REQUIRE(
      test::mentions(strict, "'model.embed_tokens.weight' is bf16 [7, 5], expected bf16 [7, 6]"));
  REQUIRE(test::mentions(
      strict, "'model.layers.1.experts.0.w1.weight' is f32 [3, 5], expected bf16 [3, 5]"));
  REQUIRE(test::mentions(strict, "missing: 'model.new.weight', expected f32 [2]"));
  REQUIRE(test::mentions(strict, "unexpected: 'optimizer/step' i64 []"));
  REQUIRE(test::mentions(strict, "10 tensor(s)"));  // 2 different, 1 missing, 7 unexpected

  const std::string loose =
      test::input_error([&] { load_checkpoint(folder, wanted.tensors(), false, stream); });
  REQUIRE(test::mentions(loose, "3 tensor(s)"));
  REQUIRE_FALSE(test::mentions(loose, "unexpected"));
  REQUIRE(wanted.bytes() == before);  // nothing was read
}

TEST_CASE("weights alone are read without the other files") {
  const test::TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  const auto folder = test::save_small(dir.path(), 5);
  const State all = test::small_state(5);
  State weights;
  weights.add("model.embed_tokens.weight", DType::bf16, {7, 5}, 0);
  // Damage elsewhere is not looked at, since it is not used.
  std::string text = test::read_file(folder / "optimizer.safetensors");
  text.back() = static_cast<char>(text.back() ^ 1);
  test::write_file(folder / "optimizer.safetensors", text);
  const auto values = load_checkpoint(folder, weights.tensors(), false, stream);
  REQUIRE(weights.bytes()[0] == all.bytes()[0]);
  REQUIRE(values.integers.at("step") == 100);
  REQUIRE_THROWS_AS(verify_checkpoint(folder), InputError);
}

TEST_CASE("our own mistakes are found") {
  const test::TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  State twice;
  twice.add("a", DType::f32, {1}, 0);
  twice.add("a", DType::f32, {1}, 0);
  REQUIRE_THROWS_AS(save_checkpoint(dir.path(), 1, twice.tensors(), {}, "", 0, 0, stream),
                    InternalError);
  REQUIRE_THROWS_AS(save_checkpoint(dir.path(), -1, {}, {}, "", 0, 0, stream), InternalError);
  REQUIRE_THROWS_AS(save_checkpoint(dir.path(), 1, {}, {}, "\xff", 0, 0, stream), InputError);
  REQUIRE(fs::is_empty(dir.path()));  // failed saves leave nothing
}

}  // namespace
}  // namespace moesaic
