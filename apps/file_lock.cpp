#include "apps/file_lock.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic::apps {
namespace {

std::string this_process() {
  char host[256] = {};
  if (::gethostname(host, sizeof host - 1) != 0) host[0] = '?';
  const char* job = std::getenv("SLURM_JOB_ID");
  return fmt::format("process {} on {}{}",
                     ::getpid(),
                     host,
                     job == nullptr ? "" : fmt::format(", Slurm job {:.40}", job));
}

bool write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(descriptor, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ENOSPC;
    if (n <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

}  // namespace

FileLock::FileLock(const std::filesystem::path& path) {
  descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor_ < 0)
    throw ResourceError(fmt::format("{}: cannot open: {}", path.string(), std::strerror(errno)));
  if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    char holder[400] = {};
    const auto n = ::read(descriptor_, holder, sizeof holder - 1);
    ::close(descriptor_);
    throw UsageError(fmt::format(
        "{} is in use by another run ({}); wait for it, stop it, or choose another run.dir",
        path.parent_path().string(),
        n > 0 ? holder : "who is unknown"));
  }
  const std::string id = this_process();
  if (::ftruncate(descriptor_, 0) != 0 || !write_all(descriptor_, id)) {
    const std::string cause = std::strerror(errno);
    ::close(descriptor_);
    throw ResourceError(fmt::format("{}: write failed: {}", path.string(), cause));
  }
}

FileLock::~FileLock() {
  ::close(descriptor_);
}

std::unique_ptr<FileLock> lock_run_dir(const std::filesystem::path& run_dir) {
  std::error_code error;
  if (std::filesystem::exists(run_dir, error) && !std::filesystem::is_directory(run_dir, error))
    throw UsageError(fmt::format("run.dir: {} is not a folder", run_dir.string()));
  try {
    create_folder(run_dir);
  } catch (const ResourceError& e) {
    throw ResourceError(fmt::format("run.dir: {}", e.what()));
  }
  return std::make_unique<FileLock>(run_dir / ".lock");
}

}  // namespace moesaic::apps
