#pragma once
// The file of the file tier: made, locked and filled up at the start, removed at the end.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "memory/tiers/record_layout.h"

namespace moesaic::tiers {

/// One file per rank, of a fixed size, for this process alone. It is scratch: what an earlier process left is never read.
/// Format: docs/memory.md.
class ScratchFile {
 public:
  struct Options {
    std::filesystem::path folder;  ///< made if missing
    std::int64_t rank = 0;
    std::string name;  ///< part of the file's name, where a rank has several; may be empty
    std::int64_t records = 0;
    bool direct = true;       ///< past the page cache (O_DIRECT), where the file system takes that
    double lock_wait_s = 10;  ///< how long another process may still hold the file
  };
  /// Throws UsageError when another process uses the file or it is somebody else's, ResourceError (path, bytes needed and
  /// free) when the disk has no room for it.
  ScratchFile(const Options& options, const RecordLayout& layout);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  /// Removes the files that killed runs left in `folder` for this rank, under any name: a run may need others than the one
  /// before, or none. What another process uses, and what is not ours, stays; so does all where the file system knows no locks.
  static void remove_leftovers(const std::filesystem::path& folder,
                               std::int64_t rank,
                               double lock_wait_s = 2);

  static std::uint64_t bytes_for(const RecordLayout& layout, std::int64_t records);
  std::uint64_t record_offset(std::int64_t record) const noexcept;
  std::uint64_t bytes() const noexcept { return bytes_; }
  const std::filesystem::path& path() const noexcept { return path_; }
  int fd() const noexcept { return fd_; }
  bool is_direct() const noexcept { return is_direct_; }
  /// The file system takes no direct requests after all.
  void give_up_direct(const char* why);
  /// What could not be had; a sentence each.
  const std::vector<std::string>& notes() const noexcept { return notes_; }

 private:
  void open_and_lock(double wait_s);
  void reserve();
  void write_header(std::int64_t rank, std::int64_t records, const RecordLayout& layout) const;

  std::filesystem::path path_;
  std::uint64_t bytes_ = 0, stride_ = 0;
  int fd_ = -1;
  bool is_direct_ = false;
  std::vector<std::string> notes_;
};

/// Bytes that an ordinary user can still write where `path` lies; 0 when that is not known.
std::uint64_t free_bytes(const std::filesystem::path& path) noexcept;

}  // namespace moesaic::tiers
