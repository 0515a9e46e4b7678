#include "apps/text_table.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

namespace moesaic::apps {

std::string grouped(std::int64_t n) {
  std::string digits = std::to_string(n);
  const std::size_t sign = n < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > sign + 3;)
    digits.insert(at -= 3, 1, ',');
  return digits;
}

std::string binary(std::int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit)
    value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string operations(std::int64_t flops) {
  constexpr std::array<const char*, 5> kUnits{"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"};
  double value = static_cast<double>(flops);
  std::size_t unit = 0;
  for (; value >= 1000 && unit + 1 < kUnits.size(); ++unit)
    value /= 1000;
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

TextTable::TextTable(std::string alignment, std::vector<std::string> heading)
    : alignment_(std::move(alignment)) {
  row(std::move(heading));
}

void TextTable::row(std::vector<std::string> cells) {
  rows_.push_back(std::move(cells));
}

std::string TextTable::text() const {
  std::vector<std::size_t> widths(alignment_.size(), 0);
  for (const auto& cells : rows_) {
    for (std::size_t i = 0; i < cells.size(); ++i)
      widths[i] = std::max(widths[i], cells[i].size());
  }
  std::string all;
  for (const auto& cells : rows_) {
    std::string line;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      line += alignment_[i] == 'r' ? fmt::format("  {:>{}}", cells[i], widths[i])
                                   : fmt::format("  {:<{}}", cells[i], widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    all += line + "\n";
  }
  return all + "\n";
}

}  // namespace moesaic::apps
