#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace moesaic::apps::report {

/// A point of a line. A y that is not finite is a gap.
struct Point {
  double x = 0, y = 0;
};
/// Points in the order of x.
using Series = std::vector<Point>;

/// At most `most` (>= 5) points that look the same: of every bucket its least and greatest y, in their order, and a gap
/// where it has one; the first and the last point stay.
Series decimate(const Series& series, std::size_t most);

/// Exponential moving average over about `span` points, free of the bias to its first point. A gap stays a gap and counts
/// for nothing.
Series smoothed(const Series& series, double span);

/// Smallest and largest finite value; `any` is false when there is none.
struct Range {
  double low = 0, high = 0;
  bool any = false;
  void add(double value);
};

/// The range as an axis can show it: never empty, wide enough that labels of six digits differ.
Range widened(Range range);

/// Multiples of 1, 2 or 5 times a power of ten inside [low, high], about `count` of them (between 2 and 2 x count).
std::vector<double> ticks(double low, double high, int count);
/// Powers of ten inside [low, high] (> 0), with 2 and 5 times them where those are few; ticks() where that leaves one.
std::vector<double> log_ticks(double low, double high);

/// "0.0015", "1.4", "25k", "3.2M": six digits at most. "-" for a value that is not finite.
std::string short_number(double value);

/// Middle value of the finite ones; NaN without any.
double median(std::vector<double> values);

}  // namespace moesaic::apps::report
