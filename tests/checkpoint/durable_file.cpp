#include "core/base/durable_file.h"

#include <csignal>
#include <functional>
#include <string>

#include <sys/resource.h>

#include "core/base/error.h"
#include "tests/checkpoint/support.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;

// Files of this process cannot grow beyond `bytes` while this lives: the disk is full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit limit{bytes, before_.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int);
};

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const ResourceError& e) {
    return e.what();
  }
  return "no error";
}

TEST_CASE("a file is replaced as a whole or not at all, and nothing is left beside it") {
  const test::TemporaryFolder dir;
  const auto path = dir.path() / "config.yaml";
  for (const Sync sync : {Sync::yes, Sync::no}) {
    replace_file(path, "first", sync);
    REQUIRE(test::read_file(path) == "first");
    test::write_file(dir.path() / "config.yaml.tmp",
                     "left by a crash, and longer than the next text");
    replace_file(path, "second", sync);
    REQUIRE(test::read_file(path) == "second");
    {
      const FullDisk full(100);
      REQUIRE(error_of([&] {
                replace_file(path, std::string(1000, 'x'), sync);
              }).find("config.yaml.tmp: write failed") != std::string::npos);
    }
    REQUIRE(test::read_file(path) == "second");
    REQUIRE(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) == 1);
  }
  fs::create_directory(dir.path() / "folder");
  REQUIRE_THROWS_AS(replace_file(dir.path() / "folder", "text"), ResourceError);
  REQUIRE_THROWS_AS(replace_file(dir.path() / "none" / "file", "text"), ResourceError);
  REQUIRE(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) == 2);
}

TEST_CASE("a save that finds the disk full names file and tensor, and leaves no trace") {
  const test::TemporaryFolder dir;
  test::save_small(dir.path(), 100);
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  const auto state = test::small_state(1);
  const auto file = dir.path() / "step-00000100" / "model.safetensors";
  std::string message;
  {
    const FullDisk full(fs::file_size(file) - 1);
    message =
        error_of([&] { save_checkpoint(dir.path(), 200, state.tensors(), {}, "", 0, 0, stream); });
  }
  INFO(message);
  REQUIRE(message.find("model.safetensors: write failed") != std::string::npos);
  REQUIRE(message.find("(in tensor '") != std::string::npos);
  REQUIRE(latest_checkpoint(dir.path())->step == 100);
  REQUIRE(std::distance(fs::directory_iterator(dir.path()), fs::directory_iterator()) == 1);
}

}  // namespace
}  // namespace moesaic
