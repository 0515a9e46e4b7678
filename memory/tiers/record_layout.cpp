#include "memory/tiers/record_layout.h"

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::tiers {

RecordLayout::RecordLayout(const std::vector<Part>& parts) {
  MOESAIC_CHECK(!parts.empty() && parts.size() <= kMaxSections,
                fmt::format("a record of {} sections; 1 to {}", parts.size(), kMaxSections));
  for (const Part& p : parts) {
    MOESAIC_CHECK(p.bytes > 0 && p.bytes < std::uint64_t{1} << 48,
                  fmt::format("section '{}' of {} bytes", p.name, p.bytes));
    MOESAIC_CHECK(!p.name.empty() && p.name.size() < 16, "section names have 1 to 15 bytes");
    const std::uint64_t extent =
        (p.bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment;
    sections_.push_back({p.name, p.bytes, stride_, extent});
    stride_ += extent;
  }
}

void RecordLayout::check(SectionRange range) const {
  MOESAIC_CHECK(range.first >= 0 && range.count > 0 && range.end() <= count(),
                fmt::format("sections {} to {} of {}", range.first, range.end(), count()));
}

std::uint64_t RecordLayout::offset(SectionRange range) const {
  check(range);
  return section(range.first).offset;
}

std::uint64_t RecordLayout::extent(SectionRange range) const {
  check(range);
  const Section& last = section(range.end() - 1);
  return last.offset + last.extent - section(range.first).offset;
}

std::uint64_t RecordLayout::bytes(SectionRange range) const {
  check(range);
  std::uint64_t sum = 0;
  for (int i = range.first; i < range.end(); ++i)
    sum += section(i).bytes;
  return sum;
}

std::string RecordLayout::text(SectionRange range) const {
  check(range);
  const std::string& first = section(range.first).name;
  return range.count == 1 ? first : fmt::format("{} to {}", first, section(range.end() - 1).name);
}

}  // namespace moesaic::tiers
