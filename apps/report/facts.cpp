#include "apps/report/facts.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "apps/config_changes.h"

namespace moesaic::apps::report {
namespace {

constexpr const char* kNothing = "–";

std::string show(double value, const char* format) {
  return std::isfinite(value) ? fmt::format(fmt::runtime(format), value) : kNothing;
}
std::string show_bytes(double bytes) {
  return std::isfinite(bytes) ? fmt::format("{:.2f} GiB", bytes / (1 << 30)) : kNothing;
}
std::string show_ratio(double value, double first) {
  return std::isfinite(value) && first > 0 ? fmt::format(" ({:.2f}×)", value / first) : "";
}
std::string show_duration(double seconds) {
  if (!std::isfinite(seconds)) return kNothing;
  if (seconds < 120) return fmt::format("{:.1f} s", seconds);
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}
std::string show_time(double unix_time) {
  if (!(unix_time > 0 && unix_time < 1e11)) return kNothing;
  return fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", fmt::gmtime(static_cast<std::time_t>(unix_time)));
}

std::string last_fact(const RunData& run, const std::string& key) {
  if (run.lives.empty()) return kNothing;
  const auto& facts = run.lives.back().facts;
  const auto it = facts.find(key);
  return it == facts.end() ? kNothing : it->second;
}

std::string how_it_ended(const Life& life) {
  if (life.end.empty()) return "no word: killed, or still running";
  return life.exit_code ? fmt::format("{} (exit code {})", life.end, *life.exit_code) : life.end;
}

double greatest(const RunData& run, double StepLine::*value) {
  double most = kAbsent;
  for (const auto& [step, line] : run.steps)
    most = std::fmax(most, line.*value);
  return most;
}

double last_value(const Series& series) {
  for (auto it = series.rbegin(); it != series.rend(); ++it)
    if (std::isfinite(it->y)) return it->y;
  return kAbsent;
}

double median_of(const RunData& run, double StepLine::*value) {
  std::vector<double> values;
  for (const Point& point : column(run, value, true))
    values.push_back(point.y);
  return median(std::move(values));
}

void add_evals(const RunData& run, RunNumbers& n) {
  for (const auto& [step, loss] : run.evals) {
    if (!std::isfinite(loss)) continue;
    n.last_eval = loss;
    if (loss < n.best_eval || std::isnan(n.best_eval)) n.best_eval = loss, n.best_eval_step = step;
  }
}

// What a row says of a run, given the numbers of this and of the first one.
using Cell = std::function<std::string(const RunData&, const RunNumbers&, const RunNumbers&)>;
struct Row {
  const char* name;
  Cell cell;
};

std::string show_steps(const RunNumbers& n) {
  std::string text = fmt::format("{}", n.last_step);
  if (std::isfinite(n.target_steps)) text += fmt::format(" of {}", n.target_steps);
  if (n.skipped > 0) text += fmt::format(", {} skipped", n.skipped);
  return text;
}

std::string show_best(const RunNumbers& n) {
  if (std::isnan(n.best_eval)) return kNothing;
  return fmt::format("{:.4f} (best {:.4f}, step {})", n.last_eval, n.best_eval, n.best_eval_step);
}

std::string show_times(const RunNumbers& n) {
  if (!(n.wall_seconds > 0)) return kNothing;
  const double rest = std::max(0.0, n.wall_seconds - n.in_steps - n.in_saves);
  return fmt::format(
      "{:.0f}% steps, {:.1f}% waiting for saves, {:.0f}% start, evaluation, the rest",
      100 * n.in_steps / n.wall_seconds,
      100 * n.in_saves / n.wall_seconds,
      100 * rest / n.wall_seconds);
}

std::string show_experts(const RunNumbers& n) {
  if (std::isnan(n.max_over_mean)) return kNothing;
  return fmt::format("{:.2f} max/mean, {} dead, least entropy {}",
                     n.max_over_mean,
                     show(n.dead, "{:.0f}"),
                     show(n.entropy, "{:.3f}"));
}

const std::vector<Row>& fact_rows() {
  using R = const RunData&;
  using N = const RunNumbers&;
  static const std::vector<Row> rows{
      {"steps", [](R, N n, N) { return show_steps(n); }},
      {"tokens",
       [](R, N n, N) { return std::isfinite(n.tokens) ? short_number(n.tokens) : kNothing; }},
      {"final loss", [](R, N n, N) { return show(n.final_loss, "{:.4f}"); }},
      {"final loss, smoothed",
       [](R, N n, N f) {
         return show(n.smooth_loss, "{:.4f}") +
                (&n == &f || std::isnan(n.smooth_loss - f.smooth_loss)
                     ? ""
                     : fmt::format(" ({:+.4f})", n.smooth_loss - f.smooth_loss));
       }},
      {"held-out loss", [](R, N n, N) { return show_best(n); }},
      {"tokens/s, median",
       [](R, N n, N f) {
         return std::isfinite(n.tokens_per_second)
                    ? short_number(std::round(n.tokens_per_second)) +
                          (&n == &f ? "" : show_ratio(n.tokens_per_second, f.tokens_per_second))
                    : kNothing;
       }},
      {"seconds per step, median", [](R, N n, N) { return show(n.step_seconds, "{:.4g}"); }},
      {"TFLOP/s per device, median", [](R, N n, N) { return show(n.tflops, "{:.4g}"); }},
      {"MFU, median", [](R, N n, N) { return show(100 * n.mfu, "{:.1f}%"); }},
      {"device memory, most", [](R, N n, N) { return show_bytes(n.memory_bytes); }},
      {"host memory, most", [](R, N n, N) { return show_bytes(n.host_bytes); }},
      {"experts, last step", [](R, N n, N) { return show_experts(n); }},
      {"time, all lives",
       [](R, N n, N) { return n.wall_seconds > 0 ? show_duration(n.wall_seconds) : kNothing; }},
      {"of it", [](R, N n, N) { return show_times(n); }},
      {"checkpoints written", [](R r, N, N) { return fmt::format("{}", r.saves.size()); }},
      {"starts", [](R r, N, N) { return fmt::format("{}", r.lives.size()); }},
      {"end", [](R r, N, N) { return r.lives.empty() ? kNothing : how_it_ended(r.lives.back()); }},
      {"last record",
       [](R r, N, N) { return r.lives.empty() ? kNothing : show_time(r.lives.back().last); }},
      {"version", [](R r, N, N) { return last_fact(r, "version"); }},
      {"device", [](R r, N, N) { return last_fact(r, "device"); }},
      {"precision", [](R r, N, N) { return last_fact(r, "precision"); }},
      {"ranks", [](R r, N, N) { return last_fact(r, "ranks"); }},
      {"configuration", [](R r, N, N) { return last_fact(r, "config_hash"); }},
      {"lines torn by a kill",
       [](R r, N, N) {
         return r.torn_lines > 0
                    ? fmt::format("{}, first at line {}", r.torn_lines, r.first_torn_line)
                    : kNothing;
       }},
      {"folder", [](R r, N, N) { return r.path.string(); }},
  };
  return rows;
}

std::vector<RunNumbers> all_numbers(const std::vector<RunData>& runs) {
  std::vector<RunNumbers> all;
  for (const RunData& run : runs)
    all.push_back(numbers_of(run));
  return all;
}

}  // namespace

Series column(const RunData& run, double StepLine::*value, bool without_warm_up) {
  Series series;
  for (const auto& [step, line] : run.steps)
    if (!without_warm_up || !line.warm_up)
      series.push_back({static_cast<double>(step), line.*value});
  return series;
}

double smoothing_span(const RunData& run) {
  return std::round(std::clamp(static_cast<double>(run.steps.size()) / 50, 5.0, 200.0));
}

RunNumbers numbers_of(const RunData& run) {
  RunNumbers n;
  if (const auto target = config_value(run, "train.steps")) {
    try {
      n.target_steps = std::stod(*target);
    } catch (const std::exception&) {  // an edited file: no target is known
    }
  }
  for (const Life& life : run.lives) {
    if (life.last > life.begin) n.wall_seconds += life.last - life.begin;
    n.in_steps += life.step_seconds;
    n.in_saves += life.stall_seconds;
  }
  add_evals(run, n);
  if (run.steps.empty()) return n;
  const StepLine& last = run.steps.rbegin()->second;
  n.first_step = run.steps.begin()->first;
  n.last_step = last.step;
  n.steps = static_cast<std::int64_t>(run.steps.size());
  n.skipped = std::count_if(
      run.steps.begin(), run.steps.end(), [](const auto& s) { return s.second.skipped; });
  n.tokens = last_value(column(run, &StepLine::total_tokens));
  n.first_loss = run.steps.begin()->second.loss;
  n.final_loss = last.loss;
  n.smooth_loss = last_value(smoothed(column(run, &StepLine::loss), smoothing_span(run)));
  n.tokens_per_second = median_of(run, &StepLine::tokens_per_second);
  n.step_seconds = median_of(run, &StepLine::seconds);
  n.tflops = median_of(run, &StepLine::tflops);
  n.mfu = median_of(run, &StepLine::mfu);
  n.memory_bytes = greatest(run, &StepLine::memory_bytes);
  n.host_bytes = greatest(run, &StepLine::host_bytes);
  n.max_over_mean = last.max_over_mean;
  n.dead = last.dead;
  n.entropy = last.entropy;
  return n;
}

Table facts_table(const std::vector<RunData>& runs) {
  Table table;
  table.head.emplace_back("");
  for (const RunData& run : runs)
    table.head.push_back(run.name);
  const auto numbers = all_numbers(runs);
  for (const Row& row : fact_rows()) {
    std::vector<std::string> cells{row.name};
    bool any = false;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      cells.push_back(row.cell(runs[i], numbers[i], numbers[0]));
      any = any || cells.back() != kNothing;
    }
    if (any) table.rows.push_back(std::move(cells));
  }
  return table;
}

namespace {

constexpr const char* kNoKey = "absent";

// An absent key and one that is null have the same value.
bool differ(const std::string& a, const std::string& b) {
  const auto value = [](const std::string& cell) { return cell == kNoKey ? "null" : cell; };
  return value(a) != value(b);
}

}  // namespace

Table config_table(const std::vector<RunData>& runs) {
  Table table;
  table.head.emplace_back("key");
  std::vector<std::string> keys;
  std::vector<std::map<std::string, std::string>> values;
  for (const RunData& run : runs) {
    table.head.push_back(run.name);
    auto& own = values.emplace_back();
    for (const auto& [key, value] : config_values(run.config)) {
      own[key] = value;
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
    }
  }
  for (const std::string& key : keys) {
    if (key == "run.dir") continue;
    std::vector<std::string> cells{key};
    for (const auto& own : values) {
      const auto it = own.find(key);
      cells.push_back(it == own.end() ? kNoKey : it->second);
    }
    if (std::adjacent_find(cells.begin() + 1, cells.end(), differ) != cells.end())
      table.rows.push_back(std::move(cells));
  }
  return table;
}

Table lives_table(const std::vector<RunData>& runs) {
  Table table;
  table.head = {"run", "start", "after step", "began", "lasted", "end"};
  for (const RunData& run : runs) {
    for (std::size_t i = 0; i < run.lives.size(); ++i) {
      const Life& life = run.lives[i];
      table.rows.push_back({run.name,
                            std::to_string(i + 1),
                            std::to_string(life.start_step),
                            show_time(life.begin),
                            show_duration(life.last - life.begin),
                            how_it_ended(life)});
    }
  }
  return table;
}

std::string text_summary(const std::vector<RunData>& runs) {
  const auto numbers = all_numbers(runs);
  std::string text;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const RunNumbers& n = numbers[i];
    text += fmt::format("{}: ", runs[i].name);
    if (n.steps == 0) {
      text += "no step was recorded\n";
      continue;
    }
    text += fmt::format("step {} | loss {} (smoothed {})",
                        show_steps(n),
                        show(n.final_loss, "{:.4f}"),
                        show(n.smooth_loss, "{:.4f}"));
    if (!std::isnan(n.last_eval)) text += " | eval " + show_best(n);
    if (std::isfinite(n.tokens_per_second)) {
      text += fmt::format(" | {} tok/s", short_number(std::round(n.tokens_per_second)));
      if (i > 0) text += show_ratio(n.tokens_per_second, numbers[0].tokens_per_second);
    }
    if (!std::isnan(n.max_over_mean))
      text +=
          fmt::format(" | moe max/mean {:.2f}, dead {}", n.max_over_mean, show(n.dead, "{:.0f}"));
    text += fmt::format(" | {} start(s)", runs[i].lives.size());
    if (runs[i].torn_lines > 0) text += fmt::format(" | {} torn line(s)", runs[i].torn_lines);
    text += "\n";
  }
  return text;
}

}  // namespace moesaic::apps::report
