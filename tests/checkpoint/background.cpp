// Saving in the background, and before a full disk.
#include <atomic>

#include "core/checkpoint/background_save.h"
#include "tests/checkpoint/support.h"

namespace moesaic {
namespace {

using namespace test;

SaveRequest request_of(const fs::path& folder, std::int64_t step) {
  return {
      .checkpoints = folder, .step = step, .values = small_values(), .config_yaml = kConfigText};
}

}  // namespace

TEST_CASE("a checkpoint from the background has the bytes of a synchronous one") {
  const TemporaryFolder direct, background;
  const fs::path a = save_small(direct.path(), 100);
  Stream stream(kCpu, "test", Stream::Mode::worker);
  BackgroundSave save;
  CHECK_FALSE(save.is_pending());
  for (const std::int64_t step : {50, 100}) {
    State state = small_state(static_cast<unsigned>(step));
    save.start(request_of(background.path(), step), state.tensors(), stream);
    // What training does meanwhile is not in the checkpoint.
    for (const auto& t : state.tensors())
      fill_bytes(t.view, 0x55, stream);
    stream.synchronize();
    CHECK(save.is_pending());
    const auto result = save.take_result();
    CHECK(result.step == step);
    CHECK(result.error == nullptr);
    CHECK_FALSE(save.is_pending());
  }
  for (const auto& entry : fs::directory_iterator(a))
    CHECK(read_file(entry.path()) ==
          read_file(step_folder(background.path(), 100) / entry.path().filename()));
  CHECK(list_checkpoints(background.path()).size() == 2);
}

TEST_CASE("saving and loading count their bytes, and say before how many there will be") {
  const TemporaryFolder folder;
  Stream stream(kCpu, "test", Stream::Mode::worker);
  struct Counted {
    std::atomic<std::uint64_t> total{0}, done{0}, early{0};
    ByteProgress progress() {
      return {.total = [this](std::uint64_t n) { total = n; },
              .more =
                  [this](std::uint64_t n) {
                    if (total == 0) ++early;
                    done += n;
                  }};
    }
  };
  State state = small_state(1);
  std::uint64_t bytes = 0;
  for (const auto& t : state.tensors())
    bytes += t.bytes();
  Counted saved, loaded, weights;
  SaveRequest request = request_of(folder.path(), 5);
  request.progress = saved.progress();
  BackgroundSave save;
  save.start(request, state.tensors(), stream);
  REQUIRE(save.take_result().error == nullptr);
  CHECK(saved.total == bytes);
  CHECK(saved.done == bytes);
  const fs::path checkpoint = step_folder(folder.path(), 5);
  std::uint64_t all_files = 0;
  for (const auto& entry : fs::directory_iterator(checkpoint))
    if (entry.path().extension() == ".safetensors") all_files += fs::file_size(entry.path());
  load_checkpoint(checkpoint, state.tensors(), true, stream, loaded.progress());
  CHECK(loaded.total == all_files);
  CHECK(loaded.done == all_files);
  std::vector<StateTensor> some;
  for (const auto& t : state.tensors())
    if (!t.name.starts_with("optimizer/") && !t.name.starts_with("ema/") &&
        !t.name.starts_with("buffer/"))
      some.push_back(t);
  REQUIRE(some.size() < state.tensors().size());
  load_checkpoint(checkpoint, some, false, stream, weights.progress());
  CHECK(weights.total == fs::file_size(checkpoint / "model.safetensors"));
  CHECK(weights.done == weights.total);
  CHECK(saved.early + loaded.early + weights.early == 0);
}

TEST_CASE("split masters pass through the background unchanged") {
  std::vector<std::uint16_t> weight{0x3f80, 0xbf81, 0x0001, 0x7f80},
      remainder{0x8000, 0x1234, 0xffff, 0};
  std::vector<StateTensor> tensors{
      {"model.w",
       TensorView(reinterpret_cast<std::byte*>(weight.data()), DType::bf16, Shape{2, 2}),
       TensorView(reinterpret_cast<std::byte*>(remainder.data()), DType::u16, Shape{2, 2})}};
  const TemporaryFolder dir;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  save_checkpoint(dir.path() / "direct", 1, tensors, {}, "", 0, 0, stream);
  BackgroundSave save;
  save.start({.checkpoints = dir.path() / "background", .step = 1}, tensors, stream);
  CHECK(save.take_result().error == nullptr);
  for (const char* file : {"model.safetensors", "manifest.json"})
    CHECK(read_file(step_folder(dir.path() / "direct", 1) / file) ==
          read_file(step_folder(dir.path() / "background", 1) / file));
}

TEST_CASE("what went wrong in the background is in the result, and the next save works") {
  const TemporaryFolder dir;
  write_file(dir.path() / "file", "in the way");
  const State state = small_state(1);
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  BackgroundSave save;
  save.start(request_of(dir.path() / "file", 1), state.tensors(), stream);
  const auto result = save.take_result();
  REQUIRE(result.error != nullptr);
  CHECK_THROWS_AS(std::rethrow_exception(result.error), ResourceError);
  save.start(request_of(dir.path() / "folder", 1), state.tensors(), stream);
  CHECK(save.take_result().error == nullptr);
}

TEST_CASE("the destructor waits for the writer; two saves at once are refused") {
  const TemporaryFolder dir;
  const State state = small_state(1);
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  {
    BackgroundSave save;
    save.start(request_of(dir.path(), 1), state.tensors(), stream);
    CHECK_THROWS_AS(save.start(request_of(dir.path(), 2), state.tensors(), stream), InternalError);
  }
  CHECK(list_checkpoints(dir.path()).size() == 1);
}

TEST_CASE("a disk without room is found before anything is written, with the size that is needed") {
  const TemporaryFolder dir;
  save_small(dir.path(), 1);
  std::byte one{};
  // Nothing of it may be read: there is only one byte.
  const std::vector<StateTensor> huge{
      {"model.w", TensorView(&one, DType::u8, Shape{std::int64_t{1} << 60})}};
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  std::string text;
  try {
    save_checkpoint(dir.path(), 2, huge, {}, "", 1, 0, stream);
  } catch (const ResourceError& e) {
    text = e.what();
  }
  CHECK(mentions(text, "1099511627776.1 MiB"));
  CHECK(mentions(text, dir.path().string()));
  REQUIRE(list_checkpoints(dir.path()).size() == 1);
  CHECK(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) == 1);
}

}  // namespace moesaic
