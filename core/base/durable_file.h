#pragma once
// Files and folders that must survive a crash; every return value is checked.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string_view>

namespace moesaic {

enum class Sync : std::uint8_t { yes, no };  ///< whether the disk has it when a call returns

/// A file that is written from front to back. Counts and checksums what it writes. Throws
/// ResourceError (path, cause) from every call that fails; such a file must be given up, not
/// written again. Destroyed without finish(), it is just closed.
class DurableFile {
 public:
  enum class Mode : std::uint8_t {
    create,   ///< the file must not exist yet
    replace,  ///< an existing file is emptied
    append,   ///< what is there stays
  };
  DurableFile(std::filesystem::path path, Mode mode);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// fsync, if asked for, and close; both can be the first to report a full or broken disk.
  void finish(Sync sync = Sync::yes);

  std::uint64_t bytes() const noexcept { return bytes_; }  ///< written through this object
  std::uint32_t crc() const noexcept { return crc_; }      ///< CRC-32C of them
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  std::uint32_t crc_ = 0;
};

/// Puts `text` in the place of a file at once: a reader, or a run after a crash, finds the old text or
/// the new one. The text is written beside it, to PATH.tmp, which is removed when that fails. Throws
/// ResourceError.
void replace_file(const std::filesystem::path& path, std::string_view text, Sync sync = Sync::yes);

/// fsync of a folder: the names in it are on the disk afterwards.
void sync_folder(const std::filesystem::path& folder);
/// Creates the folder and missing parents, and makes their names durable.
void create_folder(const std::filesystem::path& folder);
/// Gives the folder `from` the name `to` and makes that durable. A folder that has the name already
/// takes the name `from` in the same instant; returns whether there was one. Throws ResourceError.
bool rename_or_exchange(const std::filesystem::path& from, const std::filesystem::path& to);

/// A whole file, mapped read-only; regular files only. Throws InputError (path, cause).
class MappedFile {
 public:
  enum class Links : std::uint8_t {
    follow,
    refuse
  };  ///< a symbolic link as the last part of the path
  MappedFile(const std::filesystem::path& path, Links links);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  std::string_view text() const noexcept { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace moesaic
