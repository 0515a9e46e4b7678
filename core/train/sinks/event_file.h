#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace moesaic {

/// A `Summary` message of TensorBoard: what one event shows. Made of bytes; no protobuf library.
class EventSummary {
 public:
  void scalar(std::string_view tag, double value);  ///< kept as f32, as TensorBoard does
  /// Bars of equal width from the least to the largest value.
  void histogram(std::string_view tag, std::span<const std::int64_t> values);
  void image(std::string_view tag, int width, int height, std::string_view png);
  void text(std::string_view tag, std::string_view markdown);
  bool empty() const noexcept { return bytes_.empty(); }
  const std::string& bytes() const noexcept { return bytes_; }

 private:
  void value(std::string_view tag, std::string_view content);
  std::string bytes_;
};

/// One event file: records of {u64 length, u32 masked CRC-32C of it, event, u32 masked CRC-32C of the event}. Every record
/// goes to the file in one write, so that a kill tears at most the last one, which readers drop.
class EventFile {
 public:
  /// Opens a new file in `folder` (made if missing). Readers take the files of a folder in the order of their names,
  /// events.out.tfevents.SECONDS.HOST.PID.0: SECONDS is the time, or one more than that of the last file there.
  /// Throws ResourceError (path, cause).
  explicit EventFile(const std::filesystem::path& folder);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  /// Readers drop what earlier files hold of this step and later ones.
  void session_start(std::int64_t first_step);
  void write(std::int64_t step, const EventSummary& summary);
  /// fsync and close; throws ResourceError (path, cause). Nothing may be written afterwards.
  void finish();
  const std::filesystem::path& path() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
