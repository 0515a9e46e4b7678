#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "apps/report/series.h"

namespace moesaic::apps::report {

constexpr std::size_t kMostPoints = 2000;  ///< of a line; more are decimated
constexpr std::size_t kMostMarks = 200;    ///< of one kind and run
constexpr int kRunColours = 8;

/// Text for the inside of an element or an attribute; what XML cannot hold becomes U+FFFD.
std::string escaped(std::string_view text);

struct Line {
  enum class Style { raw, smooth, dashed, dots, area };  ///< area: filled down to 0
  Series points;
  std::size_t run = 0;  ///< chooses the colour
  Style style = Style::smooth;
  std::string label;  ///< shown when the pointer rests on it
};

struct Mark {
  enum class Kind { checkpoint, resume, skip };
  double x = 0;
  Kind kind = Kind::checkpoint;
  std::size_t run = 0;
  std::string label;
};

/// A value that lines are compared with, drawn across.
struct Level {
  double y = 0;
  std::string label;
};

struct Plot {
  std::string title, note;  ///< above and below the picture
  std::string x_label;
  std::vector<Line> lines;
  std::vector<Mark> marks;
  std::vector<Level> levels;
  bool has_key = false;    ///< names the lines' colours below the picture
  bool log_y = false;      ///< values that are not positive are gaps
  bool from_zero = false;  ///< the y axis begins at 0
};

/// Whether any line has a value.
bool has_values(const Plot& plot);

/// <figure> with title, inline SVG and note; colours are CSS classes of the page.
std::string plot_figure(const Plot& plot);

}  // namespace moesaic::apps::report
