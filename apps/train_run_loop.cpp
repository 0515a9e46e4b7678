// The steps of a run, its evaluations and checkpoints between them, and its end.
#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "apps/finished_mark.h"
#include "apps/train_run.h"
#include "core/train/step_trace.h"

namespace moesaic::apps {

double TrainRun::evaluate(bool whole) {
  const PeriodScope period("evaluation", false);
  ShownProgress progress(report_.sinks(), whole ? "final evaluation" : "evaluation", 0, "batches");
  const EvalStats stats = trainer_->evaluate(whole, &*progress);
  report_.eval(stats, trainer_->steps_done());
  return stats.loss;
}

// All ranks agree whether there is another step, and if not, why.
std::optional<StepStats> TrainRun::next_step(StopReason& stop) {
  const bool first = !std::exchange(has_stepped_, true);
  const PeriodScope period("training", first);
  report_.begin_step();
  if (touches_) touches_->forget();
  auto wish = static_cast<std::int64_t>(stops_->wish());
  const auto stats = traced_step(wish);
  stop = static_cast<StopReason>(wish);
  if (!stats) return stats;
  if (touches_) touches_->end_step(stats->step);
  stops_->step_took(stats->seconds);
  if (watchdog_ != nullptr && !first) watchdog_->step_took(stats->seconds);
  return stats;
}

// A traced step is watched by the trace alone.
std::optional<StepStats> TrainRun::traced_step(std::int64_t& stop_wish) {
  const std::int64_t step = trainer_->steps_done() + 1;
  const auto& traced = config().log.trace_steps;
  if (std::find(traced.begin(), traced.end(), step) == traced.end())
    return trainer_->step_unless_stopped(stop_wish);
  StepTrace trace(trainer_->stream());
  trainer_->observe(&trace);
  trainer_->observe_paths(&trace);
  const auto stats = trainer_->step_unless_stopped(stop_wish);
  trainer_->observe(nvtx_.get());
  trainer_->observe_paths(nullptr);
  if (!stats) return stats;
  const int rank = host_.rank();
  const auto path = fmt::format("{}/trace/step-{:08}.rank{}.json", config().run.dir, step, rank);
  trace.write(path, rank);
  report_.event(
      {.type = "trace", .step = step, .texts = {{"path", path}}, .line = "trace " + path});
  return stats;
}

int TrainRun::train() {
  const PeriodScope period("between steps", false);
  const auto& train = config().train;
  while (trainer_->steps_done() < train.steps) {
    count_saving([this] { look_at_saves(); });
    StopReason stop = StopReason::none;
    auto stats = next_step(stop);
    if (!stats) return stop_early(stop);
    stats->parts[StepPart::checkpoint] = std::exchange(saving_seconds_, 0);
    const std::string memory = memory_text();
    report_.step(*stats, *trainer_, memory.empty() ? "" : " | " + memory);
    refuse_bad_numbers();
    const std::int64_t step = trainer_->steps_done();
    if (valid_ && train.eval_every > 0 && step % train.eval_every == 0 && step < train.steps)
      evaluate(false);
    const std::int64_t every = config().checkpoint.every;
    // A state that only skips must not push good checkpoints out.
    if (every > 0 && step % every == 0 && trainer_->consecutive_bad_steps() == 0) {
      const PeriodScope saving("saving", true);
      count_saving([this] { checkpointing_->save(); });
    }
  }
  if (const std::int64_t bad = trainer_->consecutive_bad_steps(); bad > 0) {
    throw NumericsError(fmt::format(
        "the last {} step(s) were not finite; nothing was saved after step {}. Lower optimizer.lr.",
        bad,
        train.steps - bad));
  }
  finish();
  return 0;
}

void TrainRun::finish() {
  if (config().checkpoint.save_at_end) {
    finish_saving();
  } else {
    checkpointing_->settle();
  }
  report_data_use();
  if (valid_) report_.closing_comparison(evaluate(true), *valid_);
  report_.end({trainer_->steps_done(),
               0,
               "finished",
               fmt::format("finished   step {} of {} | {} tokens | {} skipped step(s)",
                           trainer_->steps_done(),
                           config().train.steps,
                           trainer_->tokens_seen(),
                           trainer_->skipped_steps())});
  if (!is_root()) return;
  try {
    mark_finished(config().run.dir, trainer_->steps_done());
    stops_->remove_file();            // a request in the last step
  } catch (const ResourceError& e) {  // everything is saved; starting again would evaluate again
    report_.line(fmt::format("warning    {}", e.what()));
  }
}

void TrainRun::count_saving(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  saving_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void TrainRun::finish_saving() {
  const PeriodScope period("saving", true);
  checkpointing_->finish();
}

void TrainRun::look_at_saves() {
  checkpointing_->look();
  if (const double seconds = checkpointing_->last_save_seconds(); seconds > 0)
    stops_->save_took(seconds);
}

// Whatever the interval: a run that is stopped more often than it saves must get on all the same.
int TrainRun::stop_early(StopReason reason) {
  finish_saving();
  stops_->remove_file();
  constexpr int kCode = static_cast<int>(ExitCode::requeue);
  report_.end(
      {trainer_->steps_done(),
       kCode,
       to_string(reason),
       fmt::format("stopped    {} at step {} of {}; the same command continues (exit code {})",
                   to_string(reason),
                   trainer_->steps_done(),
                   config().train.steps,
                   kCode)});
  return kCode;
}

void TrainRun::refuse_bad_numbers() const {
  const std::int64_t limit = config().train.max_bad_steps, step = trainer_->steps_done();
  if (trainer_->consecutive_bad_steps() < limit) return;
  throw NumericsError(
      fmt::format("{} steps in a row had a loss or gradient norm that was not finite, the last "
                  "one step {}; none of them was saved. "
                  "Lower optimizer.lr, or look at the data of {}.",
                  limit,
                  step,
                  limit == 1 ? fmt::format("that step")
                             : fmt::format("steps {} to {}", step - limit + 1, step)));
}

}  // namespace moesaic::apps
