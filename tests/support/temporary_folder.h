#pragma once
#include <filesystem>
#include <string>
#include <system_error>

#include <unistd.h>

namespace moesaic::test {

/// A path of this process for a test's files, named after the test; whatever is there is removed at the end.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              ("moesaic_" + name + "_" + std::to_string(::getpid()))) {}
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace moesaic::test
