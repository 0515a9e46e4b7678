#include "apps/report/heat_map.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>

#include <fmt/format.h>

#include "apps/report/svg_plot.h"

namespace moesaic::apps::report {
namespace {

constexpr double kWidth = 1280, kLeft = 44;
constexpr std::size_t kMostBars = 200;  // of a layer's sorted loads

// For every class the cells of it, one stroke per run of neighbours; in units of cells.
std::array<std::string, kHeatClasses + 1> cell_paths(const ExpertTable& table) {
  std::array<std::string, kHeatClasses + 1> paths;
  for (std::size_t l = 0; l < table.ratio.size(); ++l) {
    const auto& row = table.ratio[l];
    for (std::size_t e = 0; e < row.size();) {
      const int kind = heat_class(row[e]);
      std::size_t end = e + 1;
      while (end < row.size() && heat_class(row[end]) == kind)
        ++end;
      fmt::format_to(std::back_inserter(paths[static_cast<std::size_t>(kind + 1)]),
                     "M{} {}.5h{}",
                     e,
                     l,
                     end - e);
      e = end;
    }
  }
  return paths;
}

std::string class_name(int kind) {
  return kind == kDead ? "dead" : fmt::format("h{}", kind);
}

// The colours with what they mean, below the map.
std::string colour_key(double top) {
  constexpr double kBox = 26;
  std::string out;
  double x = kLeft;
  for (int kind = 0; kind < kHeatClasses; ++kind, x += kBox) {
    out += fmt::format(
        "<rect class=\"f{}\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"12\"/>", kind, x, top, kBox);
  }
  for (const auto& [kind, label] :
       {std::pair{0, "≤ ¼"}, {3, "½"}, {6, "mean"}, {9, "2×"}, {12, "≥ 4×"}}) {
    out += fmt::format("<text class=\"tick\" text-anchor=\"middle\" x=\"{}\" y=\"{}\">{}</text>",
                       kLeft + kBox * (kind + 0.5),
                       top + 27,
                       label);
  }
  out += fmt::format(
      "<rect class=\"fdead\" x=\"{}\" y=\"{}\" width=\"{}\" height=\"12\"/>"
      "<text class=\"tick\" x=\"{}\" y=\"{}\">no token</text>",
      x + 30,
      top,
      kBox,
      x + 62,
      top + 11);
  return out;
}

std::size_t most_experts(const ExpertTable& table) {
  std::size_t most = 1;
  for (const auto& row : table.ratio)
    most = std::max(most, row.size());
  return most;
}

std::string layer_labels(const ExpertTable& table, double top, double cell) {
  std::string out;
  const auto stride =
      static_cast<std::size_t>(std::max(1.0, std::ceil(14.0 / cell)));  // text takes 14 px
  for (std::size_t l = 0; l < table.layers.size(); l += stride) {
    out += fmt::format("<text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"{:.1f}\">{}</text>",
                       kLeft - 6,
                       top + cell * (static_cast<double>(l) + 0.5) + 4,
                       table.layers[l]);
  }
  return out;
}

std::string expert_labels(std::size_t experts, double bottom) {
  std::string out;
  const double cell = (kWidth - kLeft - 8) / static_cast<double>(experts);
  double last = -1;
  for (const double tick : ticks(0, static_cast<double>(experts - 1), 16)) {
    if (tick != std::floor(tick) || tick == last) continue;
    last = tick;
    out += fmt::format(
        "<text class=\"tick\" text-anchor=\"middle\" x=\"{:.1f}\" y=\"{:.1f}\">{}</text>",
        kLeft + cell * (tick + 0.5),
        bottom + 16,
        tick);
  }
  return out;
}

// One small picture: the sorted loads of a layer as a filled curve, with a line at the mean.
std::string sorted_load(std::vector<double> ratio, double most, std::int64_t layer) {
  constexpr double kW = 150, kH = 64;
  std::sort(ratio.begin(), ratio.end(), std::greater<>());
  const std::size_t bars = std::min(ratio.size(), kMostBars);
  const auto y = [&](double value) { return kH - kH * value / most; };
  std::string path = fmt::format("M0 {}", kH);
  for (std::size_t i = 0; i < bars; ++i) {
    // The first expert of each bar, so that the busiest is in the picture; the last bar shows the least busy one.
    const double value = i + 1 == bars ? ratio.back() : ratio[i * ratio.size() / bars];
    fmt::format_to(std::back_inserter(path),
                   "V{:.1f}H{:.1f}",
                   y(value),
                   kW * static_cast<double>(i + 1) / static_cast<double>(bars));
  }
  path += fmt::format("V{}z", kH);
  return fmt::format(
      "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"layer {}\"><title>layer {}: busiest "
      "{:.2f}, least busy {:.2f} "
      "times the mean</title><path class=\"area\" d=\"{}\"/><path class=\"level\" d=\"M0 "
      "{:.1f}H{}\"/>"
      "<path class=\"axis\" d=\"M0 {}H{}\"/>"
      "<text class=\"tick\" text-anchor=\"end\" x=\"{}\" y=\"11\">layer {}: {:.2f}×</text></svg>\n",
      kW,
      kH + 1,
      layer,
      layer,
      ratio.front(),
      ratio.back(),
      path,
      y(1),
      kW,
      kH,
      kW,
      kW - 2,
      layer,
      ratio.front());
}

}  // namespace

int heat_class(double ratio) {
  if (!(ratio > 0)) return kDead;
  const double steps = std::round(3 * std::log2(ratio));
  return static_cast<int>(std::clamp(steps, -6.0, 6.0)) + 6;
}

std::string heat_map_figure(const ExpertTable& table, const std::string& title) {
  const std::size_t experts = most_experts(table);
  const double rows = static_cast<double>(table.layers.size());
  const double cell = std::clamp(260 / std::max(rows, 1.0), 7.0, 26.0);
  const double top = 4, bottom = top + cell * rows, height = bottom + 76;
  std::string out = fmt::format(
      "<figure class=\"wide\"><figcaption>{}</figcaption>\n<svg viewBox=\"0 0 {} {:.1f}\" "
      "role=\"img\" aria-label=\"{}\">\n",
      escaped(title),
      kWidth,
      height,
      escaped(title));
  out += fmt::format("<g class=\"heat\" transform=\"translate({} {}) scale({:.6f} {:.4f})\">\n",
                     kLeft,
                     top,
                     (kWidth - kLeft - 8) / static_cast<double>(experts),
                     cell);
  const auto paths = cell_paths(table);
  for (int kind = kDead; kind < kHeatClasses; ++kind) {
    const std::string& path = paths[static_cast<std::size_t>(kind + 1)];
    if (!path.empty())
      out += fmt::format("<path class=\"{}\" d=\"{}\"/>\n", class_name(kind), path);
  }
  out += "</g>\n" + layer_labels(table, top, cell) + expert_labels(experts, bottom);
  out +=
      fmt::format("<text class=\"label\" text-anchor=\"end\" x=\"{}\" y=\"{:.1f}\">expert →</text>",
                  kWidth - 8,
                  bottom + 36);
  out += colour_key(bottom + 32);
  return out +
         "\n</svg>\n<p class=\"note\">Tokens of each expert against the mean of its layer; layers "
         "from top to bottom.</p></figure>\n";
}

std::string sorted_load_figure(const ExpertTable& table,
                               const std::string& title,
                               std::size_t run) {
  double most = 2;
  for (const auto& row : table.ratio)
    for (const double ratio : row)
      most = std::max(most, ratio);
  std::string out =
      fmt::format("<figure class=\"wide\"><figcaption>{}</figcaption>\n<div class=\"small r{}\">\n",
                  escaped(title),
                  run % kRunColours);
  for (std::size_t l = 0; l < table.layers.size(); ++l)
    out += sorted_load(table.ratio[l], most * 1.25, table.layers[l]);
  return out +
         "</div>\n<p class=\"note\">Experts from the busiest to the least busy, all layers on one "
         "scale; the dashed line is the mean, the number the busiest expert.</p></figure>\n";
}

}  // namespace moesaic::apps::report
