#include "apps/file_lock.h"

#include <cerrno>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include "core/base/error.h"

namespace moesaic::apps {

FileLock::FileLock(const std::filesystem::path& path) {
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor_ < 0)
    throw ResourceError(fmt::format("{}: cannot open: {}", path.string(), std::strerror(errno)));
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    char holder[32] = {};
    const auto n = ::read(descriptor_, holder, sizeof holder - 1);
    ::close(descriptor_);
    throw UsageError(fmt::format(
        "{} is in use by another run (process {}); wait for it, stop it, or choose another run.dir",
        path.parent_path().string(),
        n > 0 ? holder : "unknown"));
  }
  const std::string id = std::to_string(::getpid());
  if (::ftruncate(descriptor_, 0) != 0 ||
      ::write(descriptor_, id.data(), id.size()) != static_cast<ssize_t>(id.size())) {
    const std::string cause = std::strerror(errno);
    ::close(descriptor_);
    throw ResourceError(fmt::format("{}: cannot write: {}", path.string(), cause));
  }
}

FileLock::~FileLock() {
  ::close(descriptor_);
}

}  // namespace moesaic::apps
