#pragma once
#include <filesystem>

namespace moesaic::apps {

/// Holds an exclusive lock (flock) on a file for as long as it lives; the process id is written into the file. Throws
/// UsageError naming the process that holds it, ResourceError when the file cannot be made. The system releases the lock
/// when the process ends, however it ends.
class FileLock {
 public:
  explicit FileLock(const std::filesystem::path& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace moesaic::apps
