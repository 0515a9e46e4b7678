#include "apps/data_lines.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/data/windows.h"

namespace moesaic::apps {
namespace {

// "2,048,000".
std::string grouped(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (std::size_t at = digits.size(); at > 3; at -= 3)
    digits.insert(at - 3, 1, ',');
  return digits;
}

double sum_of_weights(const data::Blend& train) {
  double all = 0;
  for (const auto& set : train.sets)
    all += set.weight;
  return all;
}

std::string source_line(const data::Blend& train,
                        const data::TokenSource* valid,
                        const ModelPlan& plan) {
  double wanted = 0;
  for (const PhasePlan& phase : plan.phases)
    wanted += static_cast<double>(phase.end - phase.begin) *
              static_cast<double>(phase.global_batch_size * phase.sequence_length);
  const std::int64_t tokens = train.num_tokens();
  std::string line = fmt::format("data       {} | {} documents, {} tokens",
                                 train.name(),
                                 grouped(train.num_documents()),
                                 grouped(tokens));
  if (train.sets.size() == 1)
    line += fmt::format(" | {:.2f} epoch(s) in {} steps",
                        wanted / static_cast<double>(std::max<std::int64_t>(1, tokens)),
                        plan.phases.back().end);
  if (valid != nullptr)
    line += fmt::format(" | held out: {} tokens", grouped(valid->num_tokens()));
  return line;
}

void add_set_lines(const data::Blend& train,
                   const PhasePlan& phase,
                   std::vector<std::string>& lines) {
  const double all = sum_of_weights(train);
  for (const auto& set : train.sets) {
    const auto windows = data::num_windows(set.source, phase.sequence_length);
    const double drawn = static_cast<double>(phase.global_batch_size) * set.weight / all;
    if (train.sets.size() > 1)
      lines.push_back(fmt::format("           {:.4f} % {}: {} documents, {} tokens",
                                  100 * set.weight / all,
                                  set.source->name(),
                                  grouped(set.source->num_documents()),
                                  grouped(set.source->num_tokens())));
    if (drawn > static_cast<double>(windows))
      lines.push_back(fmt::format(
          "warning    {}: an epoch is {} samples, a step draws {:.0f}: samples repeat within a "
          "step; use more data, shorter sequences or a smaller batch",
          set.source->name(),
          windows,
          drawn));
    if (!set.source->keeps_documents_whole()) continue;
    const data::WholeWindows packed(set.source, phase.sequence_length);
    lines.push_back(fmt::format(
        "           {}: {} windows of whole records; {} records cut to {} tokens, {} without a "
        "target in them left out",
        set.source->name(),
        packed.count(),
        packed.cut_documents(),
        phase.sequence_length,
        packed.left_out()));
  }
}

}  // namespace

std::vector<std::string> data_lines(const config::Config& config,
                                    const data::Blend& train,
                                    const data::TokenSource* valid,
                                    const ModelPlan& plan,
                                    int ranks) {
  std::vector<std::string> lines{source_line(train, valid, plan)};
  const PhasePlan& first = plan.phases.front();
  add_set_lines(train, first, lines);
  if (plan.phases.size() == 1) {
    const std::int64_t micro = config.train.micro_batch_size;
    lines.push_back(fmt::format(
        "batch      {} sequences x {} tokens = {} tokens a step | {} micro-batch(es) of {} on a "
        "rank",
        first.global_batch_size,
        first.sequence_length,
        grouped(first.global_batch_size * first.sequence_length),
        first.global_batch_size / ranks / micro,
        micro));
    return lines;
  }
  for (const PhasePlan& phase : plan.phases)
    lines.push_back(fmt::format(
        "phase      steps {} to {} | sequences of {} tokens, {} per step ({} at once) | {} to {} "
        "tokens seen",
        phase.begin + 1,
        phase.end,
        phase.sequence_length,
        phase.global_batch_size,
        phase.micro_batch_size,
        grouped(phase.first_token),
        grouped(phase.end_token)));
  return lines;
}

std::vector<RunEvent> data_use_events(const std::vector<DataUse>& all, std::int64_t step) {
  std::int64_t samples = 0;
  for (const DataUse& use : all)
    samples += use.samples;
  std::vector<RunEvent> events;
  for (const DataUse& use : all) {
    const double share =
        static_cast<double>(use.samples) / static_cast<double>(std::max<std::int64_t>(1, samples));
    RunEvent event;
    event.type = "data";
    event.step = step;
    event.values = {{"samples", static_cast<double>(use.samples)},
                    {"tokens", static_cast<double>(use.tokens)},
                    {"epochs", use.epochs},
                    {"share", share},
                    {"weight", use.share}};
    event.texts["name"] = use.name;
    event.line = fmt::format("data {}:", use.name);
    if (all.size() > 1)
      event.line +=
          fmt::format(" {:.4f} % of the samples (weight {:.4f} %),", 100 * share, 100 * use.share);
    event.line +=
        fmt::format(" {} samples, {} tokens, {:.3f} epochs", use.samples, use.tokens, use.epochs);
    events.push_back(std::move(event));
  }
  return events;
}

}  // namespace moesaic::apps
