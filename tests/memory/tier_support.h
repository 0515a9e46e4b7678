#pragma once
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "core/base/error.h"
#include "core/base/random.h"
#include "memory/tiers/file_tier.h"
#include "tests/memory/faulty_queue.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace moesaic::test {

/// Aligned memory of a record, or of several.
class Image {
 public:
  explicit Image(std::size_t bytes)
      : bytes_(bytes),
        data_(static_cast<std::byte*>(std::aligned_alloc(tiers::kBlockAlignment, bytes))) {
    std::memset(data_.get(), 0xff, bytes);
  }
  std::byte* data() const { return data_.get(); }
  std::size_t bytes() const { return bytes_; }
  void fill(std::uint64_t key) const {
    for (std::size_t i = 0; i < bytes_; ++i)
      data_.get()[i] = static_cast<std::byte>(mix64(key * 1000003 + i / 8) >> (i % 8 * 8));
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

inline bool same_sections(const tiers::RecordLayout& layout,
                          tiers::SectionRange range,
                          const std::byte* a,
                          const std::byte* b) {
  for (int s = range.first; s < range.end(); ++s) {
    const auto& section = layout.section(s);
    if (std::memcmp(a + section.offset, b + section.offset, section.bytes) != 0) return false;
  }
  return true;
}

/// io_uring where this build and kernel have it.
inline std::vector<tiers::IoKind> queue_kinds() {
  std::vector<tiers::IoKind> kinds{tiers::IoKind::threads};
  if (tiers::try_uring_queue(2, {}).queue) kinds.push_back(tiers::IoKind::uring);
  return kinds;
}

inline tiers::OpenedQueue faulty_queue(tiers::IoKind kind, int depth, Faults faults) {
  tiers::OpenedQueue opened = tiers::open_io_queue(kind, depth);
  opened.queue = std::make_unique<FaultyQueue>(std::move(opened.queue), std::move(faults));
  return opened;
}

/// The text of the exception of type E that `f` throws.
template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    FAIL("another exception: " << e.what());
  }
  FAIL("nothing was thrown");
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace moesaic::test
