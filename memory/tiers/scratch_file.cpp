#include "memory/tiers/scratch_file.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "core/base/crc32c.h"
#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic::tiers {
namespace {

constexpr std::array<char, 8> kMagic{'M', 'O', 'E', 'S', 'T', 'I', 'E', 'R'};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kHeaderBytes = kBlockAlignment;
constexpr std::size_t kChecked = 240;  // bytes of the header under its checksum

[[noreturn]] void failed(const std::filesystem::path& path, const char* what) {
  throw ResourceError(
      fmt::format("{}: {} failed: {}; memory.file_path names the folder of the file tier",
                  path.string(),
                  what,
                  std::strerror(errno)));
}

// Waits for the lock of a file. Of a process that was killed with requests in io_uring the kernel ends these after it, and
// then gives up the lock. 0, or why there is none: EWOULDBLOCK when another process still has it.
int lock(int fd, double wait_s) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(wait_s);
  while (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) return errno;
    if (std::chrono::steady_clock::now() > end) return EWOULDBLOCK;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return 0;
}

bool has_magic(int fd) {
  std::array<char, 8> magic{};
  return ::pread(fd, magic.data(), magic.size(), 0) == static_cast<ssize_t>(magic.size()) &&
         magic == kMagic;
}

std::string name_of_rank(std::int64_t rank) {
  return fmt::format("moesaic-tier-rank-{:05}", rank);
}

template <class T>
void put(std::array<std::byte, kHeaderBytes>& header, std::size_t at, T value) {
  std::memcpy(header.data() + at, &value, sizeof value);
}

}  // namespace

std::uint64_t free_bytes(const std::filesystem::path& path) noexcept {
  struct statvfs info {};
  if (::statvfs(path.c_str(), &info) != 0) return 0;
  return static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

std::uint64_t ScratchFile::bytes_for(const RecordLayout& layout, std::int64_t records) {
  MOESAIC_CHECK(records >= 0 && static_cast<std::uint64_t>(records) <=
                                    ((std::uint64_t{1} << 62) - kHeaderBytes) / layout.stride(),
                fmt::format("{} records of {} bytes", records, layout.stride()));
  return kHeaderBytes + static_cast<std::uint64_t>(records) * layout.stride();
}

std::uint64_t ScratchFile::record_offset(std::int64_t record) const noexcept {
  return kHeaderBytes + static_cast<std::uint64_t>(record) * stride_;
}

ScratchFile::ScratchFile(const Options& o, const RecordLayout& layout)
    : path_(o.folder /
            fmt::format("{}{}{}.bin", name_of_rank(o.rank), o.name.empty() ? "" : "-", o.name)),
      bytes_(bytes_for(layout, o.records)),
      stride_(layout.stride()) {
  try {
    create_folder(o.folder);
  } catch (const std::exception& e) {
    throw ResourceError(
        fmt::format("{}; memory.file_path must be a folder that this user can write to", e.what()));
  }
  open_and_lock(o.lock_wait_s);
  try {
    reserve();
    write_header(o.rank, o.records, layout);
  } catch (...) {
    ::unlink(path_.c_str());  // gives the space back
    ::close(fd_);
    throw;
  }
  if (!o.direct) return;
  const int flags = ::fcntl(fd_, F_GETFL);
  is_direct_ = flags >= 0 && ::fcntl(fd_, F_SETFL, flags | O_DIRECT) == 0;
  if (!is_direct_) give_up_direct(std::strerror(errno));
}

ScratchFile::~ScratchFile() {
  ::unlink(path_.c_str());  // while it is locked: the next process makes its own
  ::close(fd_);
}

void ScratchFile::open_and_lock(double wait_s) {
  for (;;) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd_ < 0) failed(path_, "open");
    const auto refuse = [&](const char* why) {
      ::close(std::exchange(fd_, -1));
      throw UsageError(path_.string() + ": " + why);
    };
    // Some file systems know no locks; the file is used without one there.
    if (lock(fd_, wait_s) == EWOULDBLOCK)
      refuse("another run uses this file; give each run a memory.file_path of its own");
    struct stat info {};
    if (::fstat(fd_, &info) != 0) {
      const int cause = errno;
      ::close(std::exchange(fd_, -1));
      errno = cause;
      failed(path_, "stat");
    }
    if (!S_ISREG(info.st_mode)) refuse("is not a regular file; move it away");
    if (info.st_size > 0 && !has_magic(fd_))
      refuse("is not a file of the file tier, and would be overwritten; move it away");
    if (info.st_nlink > 0) return;
    ::close(std::exchange(fd_, -1));  // its last user removed it between open and lock
  }
}

void ScratchFile::remove_leftovers(const std::filesystem::path& folder,
                                   std::int64_t rank,
                                   double lock_wait_s) {
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(folder, none)) {
    const std::string name = entry.path().filename().string();
    const std::string start = name_of_rank(rank);
    if (name.rfind(start + ".", 0) != 0 && name.rfind(start + "-", 0) != 0) continue;
    const int fd = ::open(entry.path().c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) continue;
    struct stat info {};
    // Only under the lock is it certain that nobody uses it. Empty is what was killed before it wrote the magic.
    if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && lock(fd, lock_wait_s) == 0 &&
        (info.st_size == 0 || has_magic(fd)))
      ::unlink(entry.path().c_str());
    ::close(fd);
  }
}

void ScratchFile::reserve() {
  // The magic first: whatever happens from here on, the next process knows the file as one of ours.
  if (::ftruncate(fd_, 0) != 0) failed(path_, "truncate");
  if (::pwrite(fd_, kMagic.data(), kMagic.size(), 0) != static_cast<ssize_t>(kMagic.size()))
    failed(path_, "write");
  const auto full = [&] {
    throw ResourceError(
        fmt::format("{}: the file tier needs {} bytes ({:.2f} GiB), {} bytes ({:.2f} GiB) are free "
                    "there. Free space, lower memory.file_budget, or name another memory.file_path",
                    path_.string(),
                    bytes_,
                    static_cast<double>(bytes_) / 1073741824.0,
                    free_bytes(path_),
                    static_cast<double>(free_bytes(path_)) / 1073741824.0));
  };
  // Reserving beyond what is there would fill the disk for a moment.
  if (const std::uint64_t there = free_bytes(path_); there > 0 && there < bytes_) full();
  int status = 0;
  while ((status = ::fallocate(fd_, 0, 0, static_cast<off_t>(bytes_))) != 0 && errno == EINTR) {
  }
  if (status == 0) return;
  if (errno == ENOSPC || errno == EFBIG || errno == EDQUOT) {
    // What was reserved so far would hide the number that is free.
    if (::ftruncate(fd_, 0) != 0) failed(path_, "truncate");
    full();
  }
  if (errno != EOPNOTSUPP && errno != EINVAL && errno != ENOSYS) failed(path_, "fallocate");
  if (::ftruncate(fd_, static_cast<off_t>(bytes_)) != 0) failed(path_, "truncate");
  notes_.push_back(
      "its file system cannot reserve space: should others fill the disk, the run ends there");
}

void ScratchFile::write_header(std::int64_t rank,
                               std::int64_t records,
                               const RecordLayout& layout) const {
  std::array<std::byte, kHeaderBytes> header{};
  std::memcpy(header.data(), kMagic.data(), kMagic.size());
  put(header, 8, kVersion);
  put(header, 12, static_cast<std::uint32_t>(kHeaderBytes));
  put(header, 16, rank);
  put(header, 24, records);
  put(header, 32, layout.stride());
  put(header, 40, static_cast<std::uint32_t>(layout.count()));
  for (std::size_t i = 0; i < layout.sections().size(); ++i) {
    const Section& s = layout.sections()[i];
    put(header, 48 + 8 * i, s.bytes);
    std::memcpy(header.data() + 112 + 16 * i, s.name.data(), s.name.size());
  }
  put(header, kChecked, crc32c(header.data(), kChecked));
  if (::pwrite(fd_, header.data(), header.size(), 0) != static_cast<ssize_t>(header.size()))
    failed(path_, "write");
}

void ScratchFile::give_up_direct(const char* why) {
  if (is_direct_) {
    const int flags = ::fcntl(fd_, F_GETFL);
    if (flags < 0 || ::fcntl(fd_, F_SETFL, flags & ~O_DIRECT) != 0) failed(path_, "fcntl");
    is_direct_ = false;
  }
  notes_.push_back(
      fmt::format("its file system takes no direct requests (O_DIRECT: {}): reads and writes go "
                  "through the page cache, which takes host memory and time",
                  why));
}

}  // namespace moesaic::tiers
