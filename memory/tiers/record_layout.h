#pragma once
// What is kept of one block (an expert of a layer): sections one after the other, each from a multiple of 4096 bytes on, so
// that direct I/O moves any contiguous range of them at once. The same image lies in host memory and in the file.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::tiers {

/// Alignment of sections in a record and of records in the file and in host memory: what O_DIRECT asks for.
constexpr std::size_t kBlockAlignment = 4096;
constexpr int kMaxSections = 8;

struct Section {
  std::string name;          ///< "W", at most 15 bytes
  std::uint64_t bytes = 0;   ///< at least 1
  std::uint64_t offset = 0;  ///< in the record
  std::uint64_t extent = 0;  ///< bytes, rounded up to the alignment
};

/// Sections [first, first + count) of a record.
struct SectionRange {
  int first = 0;
  int count = 0;
  bool operator==(const SectionRange&) const = default;
  int end() const noexcept { return first + count; }
  bool overlaps(const SectionRange& other) const noexcept {
    return first < other.end() && other.first < end();
  }
};

class RecordLayout {
 public:
  struct Part {
    std::string name;
    std::uint64_t bytes = 0;
  };
  /// One to kMaxSections parts, in the order of the record.
  explicit RecordLayout(const std::vector<Part>& parts);

  const std::vector<Section>& sections() const noexcept { return sections_; }
  const Section& section(int index) const { return sections_.at(static_cast<std::size_t>(index)); }
  int count() const noexcept { return static_cast<int>(sections_.size()); }
  SectionRange all() const noexcept { return {0, count()}; }
  /// Bytes from one record to the next; a multiple of the alignment.
  std::uint64_t stride() const noexcept { return stride_; }
  /// Where a range begins in the record, and how long it is with its padding.
  std::uint64_t offset(SectionRange range) const;
  std::uint64_t extent(SectionRange range) const;
  /// Bytes of the sections themselves.
  std::uint64_t bytes(SectionRange range) const;
  /// "W", "R to V".
  std::string text(SectionRange range) const;
  /// Throws InternalError unless the range lies in the record and is not empty.
  void check(SectionRange range) const;

 private:
  std::vector<Section> sections_;
  std::uint64_t stride_ = 0;
};

}  // namespace moesaic::tiers
