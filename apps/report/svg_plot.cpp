#include "apps/report/svg_plot.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include <fmt/format.h>

namespace moesaic::apps::report {
namespace {

constexpr double kWidth = 640, kHeight = 280;
constexpr double kLeft = 58, kRight = 626, kTop = 14, kBottom = 236;

// Maps values to the picture.
class Axes {
 public:
  explicit Axes(const Plot& plot) : log_y_(plot.log_y) {
    for (const Line& line : plot.lines) {
      for (const Point& point : line.points) {
        if (!shows(point.y)) continue;
        x_.add(point.x);
        y_.add(point.y);
      }
    }
    for (const Level& level : plot.levels)
      if (shows(level.y)) y_.add(level.y);
    if (plot.from_zero) y_.add(0);
    x_ = widened(x_);
    make_room();
  }
  bool shows(double y) const { return std::isfinite(y) && (!log_y_ || y > 0); }
  const Range& x_range() const { return x_; }
  double x(double value) const {
    return kLeft + (kRight - kLeft) * (value - x_.low) / (x_.high - x_.low);
  }
  double y(double value) const {
    return kBottom - (kBottom - kTop) * (scaled(value) - low_) / (high_ - low_);
  }
  std::vector<double> y_ticks() const {
    return log_y_ ? log_ticks(std::pow(10, low_), std::pow(10, high_)) : ticks(low_, high_, 5);
  }

 private:
  double scaled(double value) const { return log_y_ ? std::log10(value) : value; }
  void make_room() {
    if (log_y_ && !y_.any) y_ = {1, 10, true};
    y_ = widened(y_);
    low_ = scaled(y_.low), high_ = scaled(y_.high);
    const double room = 0.06 * (high_ - low_);
    high_ += room;
    if (y_.low != 0) low_ -= room;  // an axis that begins at 0 begins there
  }

  bool log_y_;
  Range x_, y_;
  double low_ = 0, high_ = 1;
};

std::string run_class(std::size_t run) {
  return fmt::format("r{}{}", run % kRunColours, run >= kRunColours ? " again" : "");
}

std::string grid(const Plot& plot, const Axes& axes) {
  std::string out;
  for (const double value : axes.y_ticks()) {
    const double y = axes.y(value);
    out += fmt::format(
        "<path class=\"grid\" d=\"M{} {:.1f}H{}\"/>"
        "<text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1f}\">{}</text>",
        kLeft,
        y,
        kRight,
        kLeft - 6,
        y + 4,
        short_number(value));
  }
  for (const double value : ticks(axes.x_range().low, axes.x_range().high, 7)) {
    const double x = axes.x(value);
    out += fmt::format(
        "<path class=\"axis\" d=\"M{:.1f} {}v4\"/>"
        "<text class=\"tick\" text-anchor=\"{}\" x=\"{:.1f}\" y=\"{}\">{}</text>",
        x,
        kBottom,
        x > kRight - 12 ? "end" : "middle",
        std::min(x, kRight + 8),
        kBottom + 18,
        short_number(value));
  }
  out += fmt::format("<path class=\"axis\" d=\"M{} {}H{}\"/>", kLeft, kBottom, kRight);
  out += fmt::format("<text class=\"label\" text-anchor=\"middle\" x=\"{}\" y=\"{}\">{}</text>\n",
                     (kLeft + kRight) / 2,
                     kHeight - 6,
                     escaped(plot.x_label));
  return out;
}

// The path of a line; gaps lift the pen. A point between gaps is a stroke of no length, which a round cap makes a dot.
std::string path_of(const Series& points, const Axes& axes) {
  std::string out;
  bool pen_is_down = false, alone = false;
  for (const Point& point : points) {
    if (!axes.shows(point.y)) {
      if (alone) out += "h0";
      pen_is_down = alone = false;
      continue;
    }
    fmt::format_to(std::back_inserter(out),
                   "{}{:.1f} {:.1f}",
                   pen_is_down ? "L" : "M",
                   axes.x(point.x),
                   axes.y(point.y));
    alone = !pen_is_down;
    pen_is_down = true;
  }
  return alone ? out + "h0" : out;
}

// Closed along the axis, one piece between gaps each.
std::string area_of(const Series& points, const Axes& axes) {
  std::string out;
  const Point* begin = nullptr;
  const Point* last = nullptr;
  const auto close = [&] {
    if (begin != nullptr)
      fmt::format_to(std::back_inserter(out),
                     "L{0:.1f} {2:.1f}L{1:.1f} {2:.1f}Z",
                     axes.x(last->x),
                     axes.x(begin->x),
                     axes.y(0));
    begin = nullptr;
  };
  for (const Point& point : points) {
    if (!axes.shows(point.y)) {
      close();
      continue;
    }
    fmt::format_to(std::back_inserter(out),
                   "{}{:.1f} {:.1f}",
                   begin != nullptr ? "L" : "M",
                   axes.x(point.x),
                   axes.y(point.y));
    if (begin == nullptr) begin = &point;
    last = &point;
  }
  close();
  return out;
}

std::string line_of(const Line& line, const Axes& axes) {
  const Series points = decimate(line.points, kMostPoints);
  if (line.style == Line::Style::area)
    return fmt::format("<g class=\"{}\"><title>{}</title><path class=\"part\" d=\"{}\"/></g>\n",
                       run_class(line.run),
                       escaped(line.label),
                       area_of(points, axes));
  const std::string path = path_of(points, axes);
  if (path.empty()) return "";
  static constexpr const char* kNames[] = {"raw", "smooth", "dashed", "dots"};
  const char* style = kNames[static_cast<int>(line.style)];
  std::string out = fmt::format("<g class=\"{}\"><title>{}</title><path class=\"{}\" d=\"{}\"/>",
                                run_class(line.run),
                                escaped(line.label),
                                style,
                                path);
  if (line.style == Line::Style::dots && points.size() <= kMostMarks) {
    for (const Point& point : points) {
      if (!axes.shows(point.y)) continue;
      out += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"><title>{}: {} at {}</title></circle>",
          axes.x(point.x),
          axes.y(point.y),
          escaped(line.label),
          short_number(point.y),
          short_number(point.x));
    }
  }
  return out + "</g>\n";
}

std::string level_of(const Level& level, const Axes& axes) {
  if (!axes.shows(level.y)) return "";
  const double y = axes.y(level.y);
  return fmt::format(
      "<path class=\"level\" d=\"M{} {:.1f}H{}\"/>"
      "<text class=\"halo\" text-anchor=\"end\" x=\"{}\" y=\"{:.1f}\">{}</text>\n",
      kLeft,
      y,
      kRight,
      kRight - 4,
      y < kTop + 16 ? y + 14 : y - 5,
      escaped(level.label));
}

std::string mark_of(const Mark& mark, const Axes& axes) {
  if (mark.x < axes.x_range().low || mark.x > axes.x_range().high) return "";
  const double x = axes.x(mark.x);
  std::string shape;
  switch (mark.kind) {
    case Mark::Kind::checkpoint:
      shape = fmt::format("<path class=\"save\" d=\"M{:.1f} {}l-4 7h8z\"/>", x, kBottom - 7);
      break;
    case Mark::Kind::resume:
      shape = fmt::format("<path class=\"resume\" d=\"M{:.1f} {}V{}\"/>", x, kTop, kBottom);
      break;
    case Mark::Kind::skip:
      shape = fmt::format("<path class=\"skip\" d=\"M{:.1f} {}l8 8m0 -8l-8 8\"/>", x - 4, kTop);
      break;
  }
  return fmt::format(
      "<g class=\"{}\"><title>{}</title>{}</g>", run_class(mark.run), escaped(mark.label), shape);
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') {
          out += "\xEF\xBF\xBD";
        } else {
          out += c;
        }
    }
  }
  return out;
}

bool has_values(const Plot& plot) {
  for (const Line& line : plot.lines)
    for (const Point& point : line.points)
      if (std::isfinite(point.y) && (!plot.log_y || point.y > 0)) return true;
  return false;
}

std::string plot_figure(const Plot& plot) {
  const Axes axes(plot);
  std::string out = fmt::format(
      "<figure><figcaption>{}</figcaption>\n<svg viewBox=\"0 0 {} {}\" role=\"img\" "
      "aria-label=\"{}\">\n",
      escaped(plot.title),
      kWidth,
      kHeight,
      escaped(plot.title));
  out += grid(plot, axes);
  if (!has_values(plot)) {
    out += fmt::format(
        "<text class=\"label\" text-anchor=\"middle\" x=\"{}\" y=\"{}\">no values</text>",
        kWidth / 2,
        kHeight / 2);
  }
  for (const Mark& mark : plot.marks)
    if (mark.kind == Mark::Kind::resume) out += mark_of(mark, axes);
  for (const Line& line : plot.lines)
    out += line_of(line, axes);
  for (const Level& level : plot.levels)
    out += level_of(level, axes);
  for (const Mark& mark : plot.marks)
    if (mark.kind != Mark::Kind::resume) out += mark_of(mark, axes);
  out += "\n</svg>\n";
  if (plot.has_key) {
    out += "<p class=\"key\">";
    for (const Line& line : plot.lines)
      out += fmt::format(
          "<span class=\"{}\"><i></i>{}</span> ", run_class(line.run), escaped(line.label));
    out += "</p>\n";
  }
  if (!plot.note.empty()) out += fmt::format("<p class=\"note\">{}</p>\n", escaped(plot.note));
  return out + "</figure>\n";
}

}  // namespace moesaic::apps::report
