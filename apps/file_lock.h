#pragma once
#include <filesystem>
#include <memory>

namespace moesaic::apps {

/// Holds an exclusive lock (flock) on a file for as long as it lives; process, machine and Slurm job are written into the
/// file. Throws UsageError naming who holds it, ResourceError when the file cannot be made. The system releases the lock
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

/// Makes the folder of a run and locks it: two runs in one folder would destroy each other's files. Throws as FileLock.
std::unique_ptr<FileLock> lock_run_dir(const std::filesystem::path& run_dir);

}  // namespace moesaic::apps
