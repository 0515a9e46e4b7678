#include "apps/report/plots.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include "apps/report/facts.h"

namespace moesaic::apps::report {
namespace {

// Turns the steps of a run into another x: tokens, hours.
using XOf = std::function<double(std::int64_t)>;

double same_step(std::int64_t step) {
  return static_cast<double>(step);
}

Series moved(Series series, const XOf& x) {
  for (Point& point : series)
    point.x = x(static_cast<std::int64_t>(point.x));
  series.erase(
      std::remove_if(
          series.begin(), series.end(), [](const Point& point) { return !std::isfinite(point.x); }),
      series.end());
  return series;
}

// Checkpoints, starts and skipped steps; of each at most kMostMarks, evenly chosen.
void add_marks(const std::vector<RunData>& runs, Plot& plot) {
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const auto add =
        [&](Mark::Kind kind, const std::vector<std::int64_t>& steps, const char* what) {
          const std::size_t count = std::min(steps.size(), kMostMarks);
          for (std::size_t i = 0; i < count; ++i) {
            const std::int64_t step = steps[i * steps.size() / count];
            plot.marks.push_back({static_cast<double>(step),
                                  kind,
                                  r,
                                  fmt::format("{}: {} step {}", runs[r].name, what, step)});
          }
        };
    std::vector<std::int64_t> saves, starts, skips;
    for (const auto& [step, bytes] : runs[r].saves)
      saves.push_back(step);
    for (const Life& life : runs[r].lives)
      if (life.start_step > 0) starts.push_back(life.start_step);
    for (const auto& [step, line] : runs[r].steps)
      if (line.skipped) skips.push_back(step);
    add(Mark::Kind::checkpoint, saves, "checkpoint of");
    add(Mark::Kind::resume, starts, "continued from");
    add(Mark::Kind::skip, skips, "not finite, skipped:");
  }
}

void keep(std::vector<Plot>& plots, Plot plot) {
  if (has_values(plot)) plots.push_back(std::move(plot));
}

// The values as a thin line, their moving average as a thick one.
void add_smoothed(const RunData& run,
                  std::size_t r,
                  double StepLine::*value,
                  bool without_warm_up,
                  const XOf& x,
                  Plot& plot) {
  const Series raw = column(run, value, without_warm_up);
  plot.lines.push_back({moved(raw, x), r, Line::Style::raw, run.name});
  plot.lines.push_back(
      {moved(smoothed(raw, smoothing_span(run)), x), r, Line::Style::smooth, run.name});
}

using MakeX = std::function<XOf(const RunData&)>;

XOf tokens_of(const RunData& run) {
  return [&run](std::int64_t step) {
    const auto it = run.steps.find(step);
    return it == run.steps.end() ? kAbsent : it->second.total_tokens;
  };
}

// Hours of training: seconds of all steps up to this one.
XOf hours_of(const RunData& run) {
  std::map<std::int64_t, double> hours;
  double seconds = 0;
  for (const auto& [step, line] : run.steps) {
    if (line.seconds > 0) seconds += line.seconds;
    hours[step] = seconds / 3600;
  }
  return [hours = std::move(hours)](std::int64_t step) {
    const auto it = hours.find(step);
    return it == hours.end() ? kAbsent : it->second;
  };
}

Plot loss_plot(const std::vector<RunData>& runs,
               const char* title,
               const char* x_label,
               const MakeX& make_x) {
  Plot plot;
  plot.title = title;
  plot.x_label = x_label;
  bool has_evals = false;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    const XOf x = make_x(runs[r]);
    add_smoothed(runs[r], r, &StepLine::loss, false, x, plot);
    Series evals;
    for (const auto& [step, loss] : runs[r].evals)
      evals.push_back({static_cast<double>(step), loss});
    has_evals = has_evals || !evals.empty();
    plot.lines.push_back({moved(evals, x), r, Line::Style::dots, runs[r].name + ", held-out"});
  }
  plot.note = "nats per token. Thin: every step; thick: moving average";
  if (has_evals) plot.note += "; dots: held-out data";
  return plot;
}

Plot step_plot(const std::vector<RunData>& runs,
               std::string title,
               std::string note,
               double StepLine::*value,
               bool smooth,
               bool without_warm_up) {
  Plot plot;
  plot.title = std::move(title);
  plot.note = std::move(note);
  plot.x_label = "step";
  for (std::size_t r = 0; r < runs.size(); ++r) {
    if (smooth) {
      add_smoothed(runs[r], r, value, without_warm_up, same_step, plot);
    } else {
      plot.lines.push_back(
          {column(runs[r], value, without_warm_up), r, Line::Style::smooth, runs[r].name});
    }
  }
  return plot;
}

// A line for every limit that a run clips at; the same limit is drawn once.
void add_clip_levels(const std::vector<RunData>& runs, Plot& plot) {
  std::vector<std::string> seen;
  for (const RunData& run : runs) {
    const auto clip = config_value(run, "optimizer.clip_grad_norm");
    if (!clip || std::find(seen.begin(), seen.end(), *clip) != seen.end()) continue;
    seen.push_back(*clip);
    const double value = std::strtod(clip->c_str(), nullptr);
    if (value > 0) plot.levels.push_back({value, "clipped at " + *clip});
  }
}

// Host memory is measured in some steps only, which a line joins.
Series measured(const RunData& run, double StepLine::*value) {
  Series series = column(run, value);
  series.erase(
      std::remove_if(
          series.begin(), series.end(), [](const Point& point) { return !std::isfinite(point.y); }),
      series.end());
  for (Point& point : series)
    point.y /= 1 << 30;
  return series;
}

Plot memory_plot(const std::vector<RunData>& runs) {
  Plot plot;
  plot.title = "Memory";
  plot.x_label = "step";
  plot.from_zero = true;
  plot.note = "GiB, the rank with most. Solid: device; dashed: resident host memory";
  for (std::size_t r = 0; r < runs.size(); ++r) {
    plot.lines.push_back({measured(runs[r], &StepLine::memory_bytes),
                          r,
                          Line::Style::smooth,
                          runs[r].name + ", device"});
    plot.lines.push_back({measured(runs[r], &StepLine::host_bytes),
                          r,
                          Line::Style::dashed,
                          runs[r].name + ", host"});
  }
  return plot;
}

// Stacked, the moving average of every part; a run of older records has none.
Plot time_plot(const RunData& run) {
  Plot plot;
  plot.title = "Time by part: " + run.name;
  plot.x_label = "step";
  plot.from_zero = plot.has_key = true;
  plot.note =
      "Seconds of a step on rank 0, stacked; moving average. Communication: what the step waited "
      "for, not what ran beside backward. Checkpoint: training waited for a save since the step "
      "before";
  std::vector<Series> parts(kParts.size());
  for (const auto& [step, line] : run.steps) {
    for (std::size_t p = 0; p < kParts.size(); ++p)
      parts[p].push_back({static_cast<double>(step), line.warm_up ? kAbsent : line.parts[p]});
  }
  Series sum;
  for (std::size_t p = 0; p < kParts.size(); ++p) {
    const Series part = smoothed(parts[p], smoothing_span(run));
    sum.resize(part.size(), {0, 0});
    for (std::size_t i = 0; i < part.size(); ++i)
      sum[i] = {part[i].x, sum[i].y + part[i].y};
    plot.lines.push_back({sum, p, Line::Style::area, kParts[p]});
  }
  // The highest lies at the back.
  std::reverse(plot.lines.begin(), plot.lines.end());
  return plot;
}

Plot bias_plot(const std::vector<RunData>& runs) {
  Plot plot;
  plot.title = "Router bias";
  plot.x_label = "step";
  plot.note = "Solid: largest, dashed: smallest of all layers and experts";
  for (std::size_t r = 0; r < runs.size(); ++r) {
    Series low, high;
    for (const auto& [step, range] : runs[r].bias) {
      low.push_back({static_cast<double>(step), range.low});
      high.push_back({static_cast<double>(step), range.high});
    }
    plot.lines.push_back({high, r, Line::Style::smooth, runs[r].name + ", largest"});
    plot.lines.push_back({low, r, Line::Style::dashed, runs[r].name + ", smallest"});
  }
  return plot;
}

}  // namespace

std::vector<Plot> training_plots(const std::vector<RunData>& runs) {
  std::vector<Plot> plots;
  Plot loss = loss_plot(runs, "Loss", "step", [](const RunData&) { return XOf(same_step); });
  add_marks(runs, loss);
  loss.note += "; triangle: checkpoint, dotted upright: continued, cross: skipped";
  keep(plots, std::move(loss));
  keep(plots, loss_plot(runs, "Loss by tokens", "tokens", tokens_of));
  keep(plots, loss_plot(runs, "Loss by time", "hours in steps", hours_of));
  Plot norm = step_plot(runs,
                        "Gradient norm",
                        "Before clipping, logarithmic. Cross: not finite, skipped",
                        &StepLine::grad_norm,
                        true,
                        false);
  norm.log_y = true;
  add_clip_levels(runs, norm);
  add_marks(runs, norm);
  keep(plots, std::move(norm));
  Plot rate = step_plot(runs, "Learning rate", "", &StepLine::lr, false, false);
  rate.from_zero = true;
  keep(plots, std::move(rate));
  return plots;
}

std::vector<Plot> speed_plots(const std::vector<RunData>& runs) {
  const std::string no_first = "The first step of each start is left out";
  std::vector<Plot> plots;
  const auto add = [&](const char* title, const std::string& note, double StepLine::*value) {
    Plot plot = step_plot(runs, title, note, value, true, true);
    plot.from_zero = true;
    keep(plots, std::move(plot));
  };
  add("Tokens per second", no_first, &StepLine::tokens_per_second);
  add("Seconds per step", no_first, &StepLine::seconds);
  add("TFLOP/s per device", "Model FLOPs by the formula of the header", &StepLine::tflops);
  add("Model FLOPs utilisation",
      "Share of the peak that the header names, 1 = all",
      &StepLine::mfu);
  keep(plots, memory_plot(runs));
  for (const RunData& run : runs)
    keep(plots, time_plot(run));
  return plots;
}

std::vector<Plot> expert_plots(const std::vector<RunData>& runs) {
  std::vector<Plot> plots;
  Plot load = step_plot(runs,
                        "Busiest expert against the mean",
                        "Worst layer of each step; 1 is even",
                        &StepLine::max_over_mean,
                        true,
                        false);
  load.levels.push_back({1, "even"});
  keep(plots, std::move(load));
  Plot dead = step_plot(
      runs, "Experts without a token", "All layers together", &StepLine::dead, false, false);
  dead.from_zero = true;
  keep(plots, std::move(dead));
  keep(plots,
       step_plot(runs,
                 "Entropy of the expert load",
                 "Worst layer, as a share of its largest value; 1 is even",
                 &StepLine::entropy,
                 true,
                 false));
  keep(plots, bias_plot(runs));
  return plots;
}

}  // namespace moesaic::apps::report
