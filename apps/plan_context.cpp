#include "apps/plan_context.h"

#include <numeric>

#include <fmt/format.h>

#include "apps/text_table.h"

namespace moesaic::apps {

std::string context_summary(const ContextPlan::Phase& phase) {
  return fmt::format("{} pieces of {} tokens | busiest rank {:.2f} x the mean in forward",
                     phase.work.size(),
                     grouped(phase.piece_tokens),
                     phase.busiest_over_mean());
}

std::string context_text(const ContextPlan& plan) {
  std::string text =
      "Context parallelism: contiguous pieces of a micro-batch; later ones see more keys "
      "(documents as long as sequences)\n";
  for (std::size_t i = 0; i < plan.phases.size(); ++i) {
    const ContextPlan::Phase& phase = plan.phases[i];
    if (plan.phases.size() > 1) text += fmt::format("phase {}: ", i);
    text += context_summary(phase) + "\n";
    TextTable table("rrrr", {"piece", "tokens", "forward", "of the mean"});
    const double mean = std::accumulate(phase.work.begin(), phase.work.end(), 0.0) /
                        static_cast<double>(phase.work.size());
    for (std::size_t r = 0; r < phase.work.size(); ++r)
      table.row({std::to_string(r),
                 grouped(phase.piece_tokens),
                 operations(static_cast<std::int64_t>(phase.work[r])),
                 fmt::format("{:.2f}", phase.work[r] / mean)});
    text += table.text();
  }
  return text;
}

}  // namespace moesaic::apps
