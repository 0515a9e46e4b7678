#pragma once
#include <cstdint>
#include <functional>

namespace moesaic {

/// Told how far the reading or writing of a checkpoint's files has come, from the thread that does it. Functions may be
/// empty.
struct ByteProgress {
  std::function<void(std::uint64_t)> total;  ///< bytes in all, before the first
  std::function<void(std::uint64_t)> more;   ///< bytes done since the last call

  void begin(std::uint64_t bytes) const {
    if (total) total(bytes);
  }
  void add(std::uint64_t bytes) const {
    if (more) more(bytes);
  }
};

}  // namespace moesaic
