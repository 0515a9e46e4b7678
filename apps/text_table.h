#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::apps {

/// 2779484478208 -> "2,779,484,478,208".
std::string grouped(std::int64_t n);
/// Bytes in powers of 1024: "1.50 GiB".
std::string binary(std::int64_t bytes);
/// "2.30 GFLOP".
std::string operations(std::int64_t flops);

/// Rows of cells under a heading; columns are as wide as their widest cell.
class TextTable {
 public:
  /// 'l' or 'r' in `alignment` per column.
  TextTable(std::string alignment, std::vector<std::string> heading);
  void row(std::vector<std::string> cells);
  /// A line per row, and an empty one.
  std::string text() const;

 private:
  std::string alignment_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace moesaic::apps
