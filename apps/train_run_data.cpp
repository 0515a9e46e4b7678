// What a run says about its data: at the start, and at the end.
#include <fmt/format.h>

#include "apps/train_run.h"
#include "core/data/windows.h"
#include "core/model/plan.h"

namespace moesaic::apps {

// Where the tokens come from and how they are cut into steps.
void TrainRun::print_data() const {
  const std::vector<PhasePlan> phases = make_plan(config()).phases;
  say(fmt::format("data       {}: {} documents, {} tokens | sequences of {} tokens, {} per step",
                  train_.name(),
                  train_.num_documents(),
                  train_.num_tokens(),
                  phases.front().sequence_length,
                  phases.front().global_batch_size));
  const auto weights = train_.weights();
  double all = 0;
  for (const double w : weights)
    all += w;
  for (const auto& set : train_.sets) {
    if (train_.sets.size() == 1) break;
    say(fmt::format("           {:.4f} % {}: {} documents, {} tokens",
                    100 * set.weight / all,
                    set.source->name(),
                    set.source->num_documents(),
                    set.source->num_tokens()));
  }
  for (const auto& set : train_.sets) {
    const auto windows = data::num_windows(set.source, phases.front().sequence_length);
    const double drawn = static_cast<double>(phases.front().global_batch_size) * set.weight / all;
    if (drawn > static_cast<double>(windows))
      say(fmt::format(
          "warning    {}: an epoch is {} samples, a step draws {:.0f}: samples repeat within a "
          "step; use more data, shorter sequences or a smaller batch",
          set.source->name(),
          windows,
          drawn));
  }
  for (const auto& set : train_.sets) {
    if (!set.source->keeps_documents_whole()) continue;
    const data::WholeWindows packed(set.source, phases.front().sequence_length);
    say(fmt::format(
        "           {}: {} windows of whole records; {} records cut to {} tokens, {} without a "
        "target in them left out",
        set.source->name(),
        packed.count(),
        packed.cut_documents(),
        phases.front().sequence_length,
        packed.left_out()));
  }
  for (const PhasePlan& phase : phases) {
    if (phases.size() == 1) break;
    say(fmt::format(
        "phase      steps {} to {} | sequences of {} tokens, {} per step ({} at once) | {} to "
        "{} tokens seen",
        phase.begin + 1,
        phase.end,
        phase.sequence_length,
        phase.global_batch_size,
        phase.micro_batch_size,
        phase.first_token,
        phase.end_token));
  }
}

// How much of every data set the run has seen; of a blend, beside what its weights ask for.
void TrainRun::report_data_use() {
  if (!is_root()) return;
  const std::vector<DataUse> all = trainer_->data_use();
  std::int64_t samples = 0;
  for (const DataUse& use : all)
    samples += use.samples;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const DataUse& use = all[i];
    const double share = static_cast<double>(use.samples) / static_cast<double>(samples);
    std::string line = fmt::format("data       {}:", use.name);
    if (all.size() > 1)
      line +=
          fmt::format(" {:.4f} % of the samples (weight {:.4f} %),", 100 * share, 100 * use.share);
    say(line +
        fmt::format(" {} samples, {} tokens, {:.3f} epochs", use.samples, use.tokens, use.epochs));
    if (metrics_) {
      metrics_->event("data",
                      trainer_->steps_done(),
                      {{"samples", static_cast<double>(use.samples)},
                       {"tokens", static_cast<double>(use.tokens)},
                       {"epochs", use.epochs},
                       {"share", share},
                       {"weight", use.share}},
                      {{"name", use.name}});
    }
  }
}

}  // namespace moesaic::apps
