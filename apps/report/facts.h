#pragma once
#include <string>
#include <vector>

#include "apps/report/read_run.h"
#include "apps/report/series.h"

namespace moesaic::apps::report {

/// The numbers of a run that fit into a table; NaN is what its metrics do not tell.
struct RunNumbers {
  std::int64_t first_step = 0, last_step = 0, steps = 0, skipped = 0;
  double target_steps = kAbsent, tokens = kAbsent;
  double first_loss = kAbsent, final_loss = kAbsent, smooth_loss = kAbsent;
  double last_eval = kAbsent, best_eval = kAbsent;
  std::int64_t best_eval_step = 0;
  double tokens_per_second = kAbsent;  ///< median over steps, the first of each life left out
  double step_seconds = kAbsent;       ///< likewise
  double tflops = kAbsent, mfu = kAbsent;
  double memory_bytes = kAbsent, host_bytes = kAbsent;                ///< largest
  double max_over_mean = kAbsent, dead = kAbsent, entropy = kAbsent;  ///< of the last step
  double wall_seconds = 0, in_steps = 0, in_saves = 0;                ///< summed over lives
};
RunNumbers numbers_of(const RunData& run);

/// A column of the step lines over steps, gaps where it is absent. `without_warm_up` drops the first step of each life.
Series column(const RunData& run, double StepLine::*value, bool without_warm_up = false);
/// Steps over which lines are smoothed: a fiftieth of the run, 5 to 200.
double smoothing_span(const RunData& run);

/// A table: a heading per column, then rows of cells.
struct Table {
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows;
};
/// A row per fact, a column per run; rows that no run fills are left out.
Table facts_table(const std::vector<RunData>& runs);
/// Keys of config.yaml whose values differ between the runs, except run.dir. "absent" where a run has no such key.
Table config_table(const std::vector<RunData>& runs);
/// Lives of all runs: from, to, how it ended.
Table lives_table(const std::vector<RunData>& runs);

/// A few lines per run for the terminal.
std::string text_summary(const std::vector<RunData>& runs);

}  // namespace moesaic::apps::report
