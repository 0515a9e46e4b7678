#include "apps/report/series.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

namespace moesaic::apps::report {
namespace {

// The least and the greatest y of [begin, end) in their order, then a gap where there is one.
void add_bucket(const Series& series, std::size_t begin, std::size_t end, Series& result) {
  std::size_t least = end, greatest = end, gap = end;
  for (std::size_t i = begin; i < end; ++i) {
    if (!std::isfinite(series[i].y)) {
      gap = i;
      continue;
    }
    if (least == end || series[i].y < series[least].y) least = i;
    if (greatest == end || series[i].y > series[greatest].y) greatest = i;
  }
  std::vector<std::size_t> kept;
  for (const std::size_t i : {least, greatest, gap})
    if (i != end) kept.push_back(i);
  std::sort(kept.begin(), kept.end());
  kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
  for (const std::size_t i : kept)
    result.push_back(series[i]);
}

}  // namespace

Series decimate(const Series& series, std::size_t most) {
  if (series.size() <= most) return series;
  const std::size_t inner = series.size() - 2;
  const std::size_t buckets = std::max<std::size_t>(1, (std::max<std::size_t>(most, 5) - 2) / 3);
  Series result{series.front()};
  for (std::size_t b = 0; b < buckets; ++b)
    add_bucket(series, 1 + inner * b / buckets, 1 + inner * (b + 1) / buckets, result);
  result.push_back(series.back());
  return result;
}

Series smoothed(const Series& series, double span) {
  const double keep = 1 - 2 / (std::max(span, 1.0) + 1);
  double sum = 0, weight = 0;
  Series result;
  result.reserve(series.size());
  for (const Point& point : series) {
    if (!std::isfinite(point.y)) {
      result.push_back({point.x, std::numeric_limits<double>::quiet_NaN()});
      continue;
    }
    sum = keep * sum + (1 - keep) * point.y;
    weight = keep * weight + (1 - keep);
    result.push_back({point.x, sum / weight});
  }
  return result;
}

void Range::add(double value) {
  if (!std::isfinite(value)) return;
  low = any ? std::min(low, value) : value;
  high = any ? std::max(high, value) : value;
  any = true;
}

Range widened(Range range) {
  if (!range.any) return {0, 1, true};
  const double size = std::max(std::abs(range.low), std::abs(range.high));
  if (range.high - range.low > 1e-4 * size) return range;
  const double room = size > 0 ? 0.1 * size : 1;
  return {range.low - room, range.high + room, true};
}

std::vector<double> ticks(double low, double high, int count) {
  if (!(high > low)) return {low};
  const double rough = (high - low) / std::max(count, 1);
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power < rough * 0.999) continue;
    step = factor * power;
    break;
  }
  std::vector<double> result;
  const double slack = 1e-9 * step;
  for (double i = std::ceil((low - slack) / step); i * step <= high + slack; ++i)
    result.push_back(i * step + 0.0);  // no -0
  return result;
}

std::vector<double> log_ticks(double low, double high) {
  const int first = static_cast<int>(std::floor(std::log10(low)));
  const int last = static_cast<int>(std::ceil(std::log10(high)));
  const int stride = std::max(1, (last - first) / 8);
  std::vector<double> result;
  for (int e = first; e <= last; e += stride) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double value = factor * std::pow(10, e);
      if (factor != 1 && high / low > 1000) continue;
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) result.push_back(value);
    }
  }
  return result.size() < 2 ? ticks(low, high, 4) : result;
}

std::string short_number(double value) {
  if (!std::isfinite(value)) return "-";
  for (const auto& [size, letter] : {std::pair{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e4, "k"}}) {
    if (std::abs(value) < size) continue;
    return fmt::format("{:.4g}{}", value / (size == 1e4 ? 1e3 : size), letter);
  }
  return fmt::format("{:.6g}", value);
}

double median(std::vector<double> values) {
  values.erase(
      std::remove_if(values.begin(), values.end(), [](double v) { return !std::isfinite(v); }),
      values.end());
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

}  // namespace moesaic::apps::report
