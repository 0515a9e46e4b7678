// Tensors that no view shows: read and filled through calls.
#include <array>
#include <cstring>
#include <memory>

#include "core/checkpoint/background_save.h"
#include "core/checkpoint/manifest.h"
#include "tests/checkpoint/support.h"

namespace moesaic {
namespace {

using namespace test;

// Where a tensor's bytes come from and go to, and what was asked of it.
struct Home {
  TensorView memory;
  std::size_t piece = 7;  // bytes given at once
  int reads = 0, writes = 0;
  bool is_broken = false;
};

// The tensor without its view: what it holds is in `home`.
StateTensor hidden(const StateTensor& t, Home& home) {
  home.memory = t.view;
  const auto access = std::make_shared<StateAccess>();
  access->dtype = t.view.dtype();
  access->shape = t.view.shape();
  access->read = [&home](const StateAccess::Sink& sink, Stream&) {
    ++home.reads;
    for (std::size_t at = 0; at < home.memory.bytes(); at += home.piece) {
      if (home.is_broken && at > 0) throw ResourceError("the record is damaged");
      sink(home.memory.data() + at, std::min(home.piece, home.memory.bytes() - at));
    }
  };
  access->write = [&home](const std::byte* from, Stream&) {
    ++home.writes;
    std::memcpy(home.memory.data(), from, home.memory.bytes());
  };
  return {t.name, {}, {}, t.place, access};
}

// Every second tensor of a state.
struct HalfHidden {
  explicit HalfHidden(const State& state) : homes(state.tensors().size()) {
    for (std::size_t i = 0; i < homes.size(); ++i)
      tensors.push_back(i % 2 == 1 ? hidden(state.tensors()[i], homes[i]) : state.tensors()[i]);
  }
  std::vector<Home> homes;
  std::vector<StateTensor> tensors;
};

SaveRequest request_of(const fs::path& folder, std::int64_t step) {
  return {
      .checkpoints = folder, .step = step, .values = small_values(), .config_yaml = kConfigText};
}

std::vector<fs::path> files_of(const fs::path& folder) {
  std::vector<fs::path> names;
  for (const auto& entry : fs::directory_iterator(folder))
    names.push_back(entry.path().filename());
  return names;
}

void check_loaded(const fs::path& checkpoint, const State& expected) {
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  State state = small_state(1234);
  load_checkpoint(checkpoint, state.tensors(), true, stream);
  CHECK(state.bytes() == expected.bytes());
}

}  // namespace

TEST_CASE("tensors behind calls are saved and loaded like tensors in views") {
  const TemporaryFolder dir;
  const fs::path expected = save_small(dir.path() / "views", 100);
  Stream stream(kCpu, "test", Stream::Mode::worker);
  const State state = small_state(100);
  HalfHidden half(state);
  save_checkpoint(
      dir.path() / "calls", 100, half.tensors, small_values(), kConfigText, 0, 0, stream);
  const fs::path found = step_folder(dir.path() / "calls", 100);
  CHECK(files_of(found).size() == files_of(expected).size());
  for (const fs::path& file : files_of(expected))
    CHECK(read_file(found / file) == read_file(expected / file));

  const State other = small_state(7);
  HalfHidden into(other);
  load_checkpoint(found, into.tensors, true, stream);
  CHECK(other.bytes() == state.bytes());
  for (std::size_t i = 1; i < into.homes.size(); i += 2) {
    CHECK(into.homes[i].writes == 1);
    CHECK(half.homes[i].reads == 1);
    CHECK(bytes_of_state(into.tensors[i], stream) == state.bytes()[i]);
  }
  const State third = small_state(8);
  HalfHidden filled(third);
  for (std::size_t i = 0; i < filled.tensors.size(); ++i)
    fill_state(filled.tensors[i], state.bytes()[i].data(), stream);
  CHECK(third.bytes() == state.bytes());
}

TEST_CASE("pieces of tensors come together behind calls") {
  const TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  std::array<float, 6> all{0, 1, 2, 3, 4, 5}, loaded{};
  const auto view = [](float* at, const Shape& shape) {
    return TensorView(reinterpret_cast<std::byte*>(at), DType::f32, shape);
  };
  std::array<Home, 2> homes;
  const Shape whole{3, 2};
  const std::vector<StateTensor> saved{
      hidden({"model.w", view(all.data(), {1, 2}), {}, StateTensor::Place{whole, {0, 0}}},
             homes[0]),
      {"model.w", view(all.data() + 2, {2, 2}), {}, StateTensor::Place{whole, {1, 0}}}};
  save_checkpoint(dir.path(), 1, saved, {}, "", 0, 0, stream);
  const StateTensor wanted = hidden({"model.w", view(loaded.data(), whole)}, homes[1]);
  load_checkpoint(step_folder(dir.path(), 1), {&wanted, 1}, true, stream);
  CHECK(loaded == all);
  const StateTensor end = hidden(
      {"model.w", view(loaded.data(), {1, 2}), {}, StateTensor::Place{whole, {2, 0}}}, homes[1]);
  load_checkpoint(step_folder(dir.path(), 1), {&end, 1}, true, stream);
  CHECK(loaded == (std::array<float, 6>{4, 5, 2, 3, 4, 5}));
}

TEST_CASE("a save in the background reads what is behind calls before training goes on") {
  const TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::worker);
  const State expected = small_state(3), state = small_state(3);
  HalfHidden half(state);
  CHECK(StateSnapshot::bytes_for(half.tensors) < StateSnapshot::bytes_for(state.tensors()));
  std::uint64_t total = 0, done = 0;
  SaveRequest request = request_of(dir.path(), 9);
  request.progress = {.total = [&](std::uint64_t n) { total += n; },
                      .more = [&](std::uint64_t n) { done += n; }};
  BackgroundSave save;
  save.start(request, half.tensors, stream);
  for (std::size_t i = 1; i < half.homes.size(); i += 2)
    CHECK(half.homes[i].reads == 1);
  // What training does meanwhile is not in the checkpoint.
  for (const auto& t : state.tensors())
    fill_bytes(t.view, 0x55, stream);
  stream.synchronize();
  const auto result = save.take_result();
  CHECK(result.error == nullptr);
  for (std::size_t i = 1; i < half.homes.size(); i += 2)
    CHECK(half.homes[i].reads == 1);
  std::uint64_t bytes = 0;
  for (const StateTensor& t : half.tensors)
    bytes += t.bytes();
  CHECK(total == bytes);
  CHECK(done == bytes);
  const fs::path checkpoint = step_folder(dir.path(), 9);
  verify_checkpoint(checkpoint);
  check_loaded(checkpoint, expected);
  CHECK(fs::exists(checkpoint / "model-offloaded.safetensors"));
}

TEST_CASE("parts of several writers with tensors behind calls make one checkpoint") {
  const TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::worker);
  const State expected = small_state(4), state = small_state(4);
  HalfHidden half(state);
  const fs::path folder = begin_checkpoint(dir.path(), 2, checkpoint_part_bytes(half.tensors));
  const std::size_t middle = half.tensors.size() / 2;
  const std::array<std::span<const StateTensor>, 2> of_writer{
      std::span(half.tensors).first(middle), std::span(half.tensors).subspan(middle)};
  std::vector<std::string> parts;
  for (std::size_t w = 0; w < of_writer.size(); ++w) {
    BackgroundSave save;
    save.start_part(
        folder, "rank" + std::to_string(w), request_of(dir.path(), 2), of_writer[w], stream);
    const auto result = save.take_result();
    CHECK(result.error == nullptr);
    parts.push_back(result.part);
  }
  CHECK(list_checkpoints(dir.path()).empty());
  // A part is not complete without what was behind the calls.
  CHECK(parse_manifest_part(parts[0]).tensors.size() == middle);
  commit_checkpoint(folder, 2, small_values(), kConfigText, parts, 0, 0);
  check_loaded(step_folder(dir.path(), 2), expected);
}

TEST_CASE("an error behind a call is the save's result, and leaves nothing") {
  const TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  const State state = small_state(5);
  HalfHidden half(state);
  half.homes[1].is_broken = true;
  BackgroundSave save;
  const auto text = [&] {
    CHECK(save.is_done());
    const auto result = save.take_result();
    CHECK(result.step == 1);
    REQUIRE(result.error != nullptr);
    try {
      std::rethrow_exception(result.error);
    } catch (const ResourceError& e) {
      return std::string(e.what());
    }
  };
  save.start(request_of(dir.path() / "c", 1), half.tensors, stream);
  CHECK(mentions(text(), "the record is damaged"));
  CHECK(files_of(dir.path() / "c").empty());
  const fs::path folder = begin_checkpoint(dir.path() / "p", 1, 0);
  save.start_part(folder, "rank0", request_of(dir.path() / "p", 1), half.tensors, stream);
  CHECK(mentions(text(), "the record is damaged"));
  half.homes[1].is_broken = false;
  save.start(request_of(dir.path() / "c", 1), half.tensors, stream);
  CHECK(save.take_result().error == nullptr);
  check_loaded(step_folder(dir.path() / "c", 1), small_state(5));
}

}  // namespace moesaic
