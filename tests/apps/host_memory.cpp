#include "apps/host_memory.h"

#include <fstream>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;

TEST_CASE("host memory: what the system has, or what is left of a control group's limit") {
  const test::TemporaryFolder folder("host_memory");
  const fs::path& root = folder.path();
  const auto write = [&](const char* path, const std::string& text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  CHECK_FALSE(available_host_memory(root));
  write("proc/meminfo", "MemTotal:       8000 kB\nMemFree:  10 kB\nMemAvailable:    4000 kB\n");
  CHECK(available_host_memory(root) == std::uint64_t{4000} << 10);
  write("proc/self/cgroup", "1:name=systemd:/x\n0::/job/step\n");
  write("sys/fs/cgroup/job/step/memory.max", "max\n");
  write("sys/fs/cgroup/job/step/memory.current", "4096\n");
  CHECK(available_host_memory(root) == std::uint64_t{4000} << 10);
  // The group above has a limit; cached files count as free.
  write("sys/fs/cgroup/job/memory.max", "1000000\n");
  write("sys/fs/cgroup/job/memory.current", "900000\n");
  write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 300000\nactive_file 5\n");
  CHECK(available_host_memory(root) == 400000);
  write("sys/fs/cgroup/job/memory.current", "2000000\n");
  CHECK(available_host_memory(root) == 0);
  // In a container the own group is the root of what is seen.
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "3000\n");
  write("sys/fs/cgroup/memory.current", "1000\n");
  CHECK(available_host_memory(root) == 2000);
}

TEST_CASE("host memory: of this machine") {
  const auto bytes = available_host_memory();
  REQUIRE(bytes);
  CHECK(*bytes > 0);
}

}  // namespace
}  // namespace moesaic::apps
