// Torn writes, changed bytes and folders that only look like checkpoints.
#include <sys/stat.h>

#include "core/checkpoint/manifest.h"
#include "tests/checkpoint/support.h"

namespace moesaic {
namespace {

using test::input_error;
using test::load_error;
using test::mentions;
namespace fs = std::filesystem;

std::vector<std::string> files_of(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  REQUIRE(names.size() == 5);
  return names;
}

void flip(const fs::path& path, std::size_t at, unsigned mask = 1) {
  std::string text = test::read_file(path);
  text.at(at) = static_cast<char>(static_cast<unsigned char>(text[at]) ^ mask);
  test::write_file(path, text);
}

TEST_CASE("a file cut anywhere, or longer, is found and named") {
  const test::TemporaryFolder dir;
  const auto older = test::save_small(dir.path(), 50);
  const auto folder = test::save_small(dir.path(), 100);
  for (const auto& name : files_of(folder)) {
    const std::string whole = test::read_file(folder / name);
    const std::size_t n = whole.size();
    for (const std::size_t keep : {std::size_t{0},
                                   std::size_t{1},
                                   std::size_t{7},
                                   std::size_t{8},
                                   std::size_t{100},
                                   n / 2,
                                   n - 8,
                                   n - 1}) {
      INFO(name << " cut to " << keep << " of " << n);
      test::write_file(folder / name, whole.substr(0, keep));
      REQUIRE(mentions(load_error(folder), name));
      REQUIRE(list_checkpoints(dir.path()).size() == 1);
      REQUIRE(mentions(input_error([&] { latest_checkpoint(dir.path()); }), "move"));
      REQUIRE_THROWS_AS(verify_checkpoint(folder), InputError);
    }
    test::write_file(folder / name, whole + "x");
    REQUIRE(mentions(load_error(folder), name));
    test::write_file(folder / name, whole);
    verify_checkpoint(folder);
  }
  REQUIRE(latest_checkpoint(dir.path())->step == 100);
}

TEST_CASE("every single changed byte of every file is found") {
  const test::TemporaryFolder dir;
  const auto folder = test::save_small(dir.path(), 100);
  for (const auto& name : files_of(folder)) {
    const std::string whole = test::read_file(folder / name);
    for (std::size_t at = 0; at < whole.size(); ++at) {
      INFO(name << " byte " << at);
      flip(folder / name, at, 1U << (at % 8));
      REQUIRE(mentions(input_error([&] { verify_checkpoint(folder); }), name));
      test::write_file(folder / name, whole);
    }
    flip(folder / name, whole.size() / 2);
    REQUIRE(mentions(load_error(folder), name));
    test::write_file(folder / name, whole);
  }
}

TEST_CASE("the damaged tensor is named") {
  const test::TemporaryFolder dir;
  const auto folder = test::save_small(dir.path(), 100);
  const auto manifest = read_manifest(folder);
  for (const auto& t : manifest.tensors) {
    if (t.bytes == 0) continue;
    const auto& file = manifest.files[t.file].name;
    const std::string whole = test::read_file(folder / file);
    flip(folder / file, t.offset + t.bytes - 1);
    const auto text = load_error(folder);
    INFO(text);
    REQUIRE(mentions(text, file + ": damaged"));
    REQUIRE(mentions(text, "in tensor '" + t.name + "'"));
    test::write_file(folder / file, whole);
  }
  flip(folder / "model.safetensors", 20);
  REQUIRE(mentions(load_error(folder), "in the header"));
}

TEST_CASE("files that are missing, from another step, swapped or links are refused") {
  const test::TemporaryFolder dir;
  const auto other = test::save_small(dir.path(), 50);
  const auto folder = test::save_small(dir.path(), 100);
  const auto model = folder / "model.safetensors";

  SECTION("missing") {
    fs::remove(model);
    REQUIRE(mentions(load_error(folder), "model.safetensors: missing"));
  }
  SECTION("same size, another step") {
    fs::copy_file(other / "model.safetensors", model, fs::copy_options::overwrite_existing);
    REQUIRE(mentions(load_error(folder), "in tensor 'model.embed_tokens.weight'"));
  }
  SECTION("a link") {
    fs::rename(model, dir.path() / "elsewhere");
    fs::create_symlink(dir.path() / "elsewhere", model);
    REQUIRE(mentions(load_error(folder), "not a regular file"));
  }
  SECTION("a folder") {
    fs::remove(model);
    fs::create_directory(model);
    REQUIRE(mentions(load_error(folder), "not a regular file"));
  }
  SECTION("a pipe as manifest does not hang") {
    fs::remove(folder / kManifestName);
    REQUIRE(::mkfifo((folder / kManifestName).c_str(), 0600) == 0);
    REQUIRE(mentions(load_error(folder), "not a regular file"));
  }
  SECTION("the manifest of another step") {
    fs::copy_file(
        folder / kManifestName, other / kManifestName, fs::copy_options::overwrite_existing);
    const auto text = load_error(other);
    REQUIRE(mentions(text, "manifest of step 100"));
    REQUIRE(mentions(text, "step-00000050"));
  }
  SECTION("a folder renamed to another step") {
    fs::rename(folder, dir.path() / "step-00000200");
    REQUIRE(mentions(load_error(dir.path() / "step-00000200"), "manifest of step 100"));
    REQUIRE(list_checkpoints(dir.path()).size() == 1);
    REQUIRE_THROWS_AS(latest_checkpoint(dir.path()), InputError);
  }
}

TEST_CASE("what is no checkpoint is passed over") {
  const test::TemporaryFolder dir;
  const auto root = dir.path();
  REQUIRE_FALSE(latest_checkpoint(root / "nowhere"));
  REQUIRE(list_checkpoints(root).empty());
  const auto folder = test::save_small(root, 100);
  fs::create_directory(root / "step-00000300");                      // empty
  fs::copy(folder, root / "step-200", fs::copy_options::recursive);  // not our spelling
  fs::copy(folder, root / "backup", fs::copy_options::recursive);
  test::write_file(root / "step-00000400", "a file");
  test::write_file(folder / "stray.txt", "not in the manifest");
  fs::copy(folder, root / "step-00000500");
  fs::remove(root / "step-00000500" / kManifestName);
  const auto list = list_checkpoints(root);
  REQUIRE(list.size() == 1);
  REQUIRE(list[0].step == 100);
  REQUIRE(latest_checkpoint(root)->step == 100);
  REQUIRE(
      mentions(load_error(root / "step-00000500"), "not a checkpoint: it has no manifest.json"));
  REQUIRE(mentions(load_error(root / "step-00000600"), "not a checkpoint: no such folder"));
  REQUIRE(mentions(load_error(root / "step-00000400"), "not a checkpoint"));
  REQUIRE(checkpoint_config(root / "backup") ==
          test::kConfigText);  // a copy under a free name can be read
}

TEST_CASE("the next save removes what an interrupted one left") {
  const test::TemporaryFolder dir;
  const auto folder = test::save_small(dir.path(), 100);
  fs::copy(folder, dir.path() / ".tmp-step-00000200-1");
  fs::remove(dir.path() / ".tmp-step-00000200-1" / kManifestName);
  fs::copy(folder, dir.path() / ".tmp-step-00000050-deleted");
  REQUIRE(latest_checkpoint(dir.path())->step == 100);
  test::save_small(dir.path(), 200);
  REQUIRE(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) == 2);
}

TEST_CASE("a failed save leaves the previous checkpoint and no trace") {
  const test::TemporaryFolder dir;
  test::save_small(dir.path(), 100);
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  const auto state = test::small_state(1);
  // A file stands where the folder of checkpoints should be made.
  test::write_file(dir.path() / "file", "");
  REQUIRE_THROWS_AS(save_checkpoint(dir.path() / "file", 1, state.tensors(), {}, "", 0, 0, stream),
                    ResourceError);
  REQUIRE_THROWS_AS(save_checkpoint(dir.path(), 200, state.tensors(), {}, "\xc3", 1, 0, stream),
                    InputError);
  fs::remove(dir.path() / "file");
  test::write_file(dir.path() / "step-00000300", "mine");
  REQUIRE_THROWS_AS(save_checkpoint(dir.path(), 300, state.tensors(), {}, "", 1, 0, stream),
                    ResourceError);
  REQUIRE(test::read_file(dir.path() / "step-00000300") == "mine");
  fs::remove(dir.path() / "step-00000300");
  REQUIRE(latest_checkpoint(dir.path())->step == 100);
  REQUIRE(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) == 1);
}

}  // namespace
}  // namespace moesaic
