#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "apps/doctor/read_facts.h"

namespace moesaic::apps::doctor {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct Kind {
  unsigned long magic;  // statfs(2)
  const char* name;
  bool is_network, is_memory;
};
constexpr Kind kKinds[] = {
    {0xEF53, "ext4", false, false},
    {0x58465342, "xfs", false, false},
    {0x9123683E, "btrfs", false, false},
    {0x2FC12FC1, "zfs", false, false},
    {0x794C7630, "overlay", false, false},
    {0x01021994, "tmpfs", false, true},
    {0x858458F6, "ramfs", false, true},
    {0x6969, "nfs", true, false},
    {0xFF534D42, "cifs", true, false},
    {0xFE534D42, "smb2", true, false},
    {0x0BD00BD0, "lustre", true, false},
    {0x47504653, "gpfs", true, false},
    {0x00C36400, "ceph", true, false},
    {0x65735546, "fuse", true, false},
    {0x01021997, "9p", true, false},
    {0x19830326, "beegfs", true, false},
};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A file that vanishes by itself, whatever happens.
class ScratchFile {
 public:
  explicit ScratchFile(const fs::path& folder) {
    std::string name = (folder / ".moesaic-doctor-XXXXXX").string();
    descriptor_ = ::mkostemp(name.data(), O_CLOEXEC);
    if (descriptor_ >= 0) ::unlink(name.c_str());
  }
  ~ScratchFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
  bool is_open() const { return descriptor_ >= 0; }
  bool append(const std::vector<char>& data) {
    std::size_t done = 0;
    while (done < data.size()) {
      const auto n = ::write(descriptor_, data.data() + done, data.size() - done);
      if (n < 0 && errno != EINTR) return false;
      if (n > 0) done += static_cast<std::size_t>(n);
    }
    return ::fsync(descriptor_) == 0;
  }

 private:
  int descriptor_ = -1;
};

// Speed of writing, as a checkpoint does it; returns what went wrong.
std::string measure(const fs::path& folder, DiskFacts& facts) {
  constexpr std::size_t kSmall = 4096, kLarge = std::size_t{8} << 20;
  const auto problem = [] { return std::string(std::strerror(errno)); };
  ScratchFile file(folder);
  if (!file.is_open()) return problem();
  std::vector<double> times;
  const std::vector<char> small(kSmall, 'm');
  for (int i = 0; i < 5; ++i) {
    const auto start = Clock::now();
    if (!file.append(small)) return problem();
    times.push_back(seconds_since(start));
  }
  std::nth_element(times.begin(), times.begin() + 2, times.end());
  facts.fsync_seconds = times[2];
  const auto start = Clock::now();
  if (!file.append(std::vector<char>(kLarge, 'm'))) return problem();
  facts.bytes_per_second = static_cast<double>(kLarge) / seconds_since(start);
  return "";
}

}  // namespace

DiskFacts read_disk(const fs::path& wanted) {
  DiskFacts facts;
  facts.wanted = wanted.string();
  std::error_code error;
  fs::path folder = fs::absolute(wanted, error).lexically_normal();
  if (folder.filename().empty()) folder = folder.parent_path();  // after "."
  while (folder.has_relative_path() && !fs::exists(folder, error))
    folder = folder.parent_path();
  facts.folder = folder.string();
  if (!fs::is_directory(folder, error)) {
    facts.problem = "not a folder";
    return facts;
  }
  struct statfs info {};
  if (::statfs(folder.c_str(), &info) != 0) {
    facts.problem = std::strerror(errno);
    return facts;
  }
  const auto magic = static_cast<unsigned long>(info.f_type) & 0xFFFFFFFFUL;
  facts.kind = fmt::format("a file system of type 0x{:x}", magic);
  for (const Kind& kind : kKinds) {
    if (kind.magic != magic) continue;
    facts.kind = kind.name;
    facts.is_network = kind.is_network;
    facts.is_memory = kind.is_memory;
  }
  facts.free = static_cast<std::uint64_t>(info.f_bavail) * static_cast<std::uint64_t>(info.f_bsize);
  facts.problem = measure(folder, facts);
  return facts;
}

SharedMemoryFacts read_shared_memory(const fs::path& folder) {
  SharedMemoryFacts facts;
  struct statvfs info {};
  if (::statvfs(folder.c_str(), &info) != 0) return facts;
  facts.is_there = true;
  facts.is_writable = ::access(folder.c_str(), W_OK | X_OK) == 0;
  facts.bytes = static_cast<std::uint64_t>(info.f_blocks) * info.f_frsize;
  facts.free = static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
  return facts;
}

}  // namespace moesaic::apps::doctor
