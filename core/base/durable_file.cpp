#include "core/base/durable_file.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/base/crc32c.h"
#include "core/base/error.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void failed(const fs::path& path, const char* what) {
  throw ResourceError(fmt::format("{}: {} failed: {}", path.string(), what, std::strerror(errno)));
}

int flags_of(DurableFile::Mode mode) {
  switch (mode) {
    case DurableFile::Mode::create:
      return O_CREAT | O_EXCL;
    case DurableFile::Mode::replace:
      return O_CREAT | O_TRUNC;
    case DurableFile::Mode::append:
      return O_CREAT | O_APPEND;
  }
  return 0;
}

// Closes a descriptor that nothing was written through.
class ReadDescriptor {
 public:
  ReadDescriptor(const fs::path& path, int flags)
      : fd_(::open(path.c_str(), flags | O_RDONLY | O_CLOEXEC)) {}
  ~ReadDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  ReadDescriptor(const ReadDescriptor&) = delete;
  ReadDescriptor& operator=(const ReadDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

DurableFile::DurableFile(fs::path path, Mode mode) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC | flags_of(mode), 0644);
  if (fd_ < 0) failed(path_, "open");
}

DurableFile::~DurableFile() {
  if (fd_ >= 0) ::close(fd_);
}

void DurableFile::write(const void* data, std::size_t bytes) {
  const auto* p = static_cast<const char*>(data);
  crc_ = crc32c(data, bytes, crc_);
  bytes_ += bytes;
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, p, std::min<std::size_t>(bytes, std::size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ENOSPC;
    if (n <= 0) failed(path_, "write");
    p += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void DurableFile::finish(Sync sync) {
  if (sync == Sync::yes && ::fsync(fd_) != 0) failed(path_, "fsync");
  if (::close(std::exchange(fd_, -1)) != 0) failed(path_, "close");
}

void replace_file(const fs::path& path, std::string_view text, Sync sync) {
  fs::path beside = path;
  beside += ".tmp";
  try {
    DurableFile file(beside, DurableFile::Mode::replace);
    file.write(text);
    file.finish(sync);
    if (::rename(beside.c_str(), path.c_str()) != 0) failed(path, "rename");
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    fs::remove(beside, ignored);
    throw;
  }
  if (sync == Sync::yes) sync_folder(path.parent_path());
}

void sync_folder(const fs::path& folder) {
  const ReadDescriptor f(folder.empty() ? "." : folder, O_DIRECTORY);
  if (f.get() < 0) failed(folder, "open");
  if (::fsync(f.get()) != 0) failed(folder, "fsync");
}

void create_folder(const fs::path& folder) {
  if (folder.empty()) return;
  if (::mkdir(folder.c_str(), 0755) == 0) return sync_folder(folder.parent_path());
  if (errno == ENOENT) {
    create_folder(folder.parent_path());
    if (::mkdir(folder.c_str(), 0755) == 0) return sync_folder(folder.parent_path());
  }
  const int cause = errno;
  std::error_code error;
  if (cause == EEXIST && fs::is_directory(folder, error)) return;
  errno = cause == EEXIST ? ENOTDIR : cause;
  failed(folder, "mkdir");
}

bool rename_or_exchange(const fs::path& from, const fs::path& to) {
  bool exchanged = false;
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    exchanged = true;
  } else if (errno != ENOENT && errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) {
    failed(to, "rename");
  } else if (::rename(from.c_str(), to.c_str()) != 0) {
    // Some file systems cannot exchange. Two renames would leave a moment without either folder, so
    // that is refused.
    if (errno == ENOTEMPTY || errno == EEXIST) {
      throw ResourceError(fmt::format(
          "{}: exists, and this file system cannot replace a folder at once; move it away",
          to.string()));
    }
    failed(to, "rename");
  }
  sync_folder(to.parent_path());
  return exchanged;
}

MappedFile::MappedFile(const fs::path& path, Links links) {
  const std::string file = path.string();
  const auto refuse = [&](const char* what) {
    throw InputError(fmt::format("{}: {}: {}", file, what, std::strerror(errno)));
  };
  // O_NONBLOCK: opening a pipe must not wait for its other end.
  const ReadDescriptor f(path, (links == Links::refuse ? O_NOFOLLOW : 0) | O_NONBLOCK);
  if (f.get() < 0) {
    if (errno == ELOOP) throw InputError(fmt::format("{}: is a symbolic link, not a file", file));
    refuse("cannot open");
  }
  struct stat info {};
  if (::fstat(f.get(), &info) != 0) refuse("cannot stat");
  if (!S_ISREG(info.st_mode)) throw InputError(fmt::format("{}: not a regular file", file));
  size_ = static_cast<std::size_t>(info.st_size);
  if (size_ == 0) return;  // nothing to map
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, f.get(), 0);
  if (mapped == MAP_FAILED) {
    throw ResourceError(
        fmt::format("{}: cannot map {} bytes: {}", file, size_, std::strerror(errno)));
  }
  data_ = static_cast<const std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace moesaic
