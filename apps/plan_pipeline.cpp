#include "apps/plan_pipeline.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "apps/plan_report.h"
#include "apps/text_table.h"
#include "parallel/pipeline/grid.h"

namespace moesaic::apps {
namespace {

using pipeline::Sizes;

constexpr int kGridWidth = 120;

std::string bytes_or_not(const std::optional<std::int64_t>& bytes) {
  return bytes ? binary(*bytes) : "too large to count";
}

/// "embedding, 0-11", "80-92, head".
std::string contents(const PipelinePlan& plan, std::size_t chunk, bool has_mtp) {
  std::vector<std::string> parts;
  const pipeline::LayerRange& layers = plan.chunks[chunk].layers;
  if (chunk == 0) parts.emplace_back("embedding");
  if (layers.size() == 1) parts.push_back(fmt::format("{}", layers.begin));
  if (layers.size() > 1) parts.push_back(fmt::format("{}-{}", layers.begin, layers.end - 1));
  if (chunk + 1 == plan.chunks.size()) parts.emplace_back(has_mtp ? "head, MTP" : "head");
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string chunks(const config::Config& config, const PipelinePlan& plan) {
  TextTable table("llrrrrrrrr",
                  {"chunk",
                   "layers",
                   "rank",
                   "parameters",
                   "forward/token",
                   "of mean",
                   "in flight",
                   "activations each",
                   "sends on",
                   "gets back"});
  for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
    const ChunkPlan& chunk = plan.chunks[c];
    std::string sent = chunk.sent_bytes == 0 ? "-" : binary(chunk.sent_bytes);
    if (!chunk.sent_snapshots.empty())
      sent += fmt::format(" (sum + {})", chunk.sent_snapshots.size());
    table.row({std::to_string(c),
               contents(plan, c, config.model.mtp.num_nextn_predict_layers > 0),
               std::to_string(chunk.rank),
               grouped(chunk.parameters),
               operations(static_cast<std::int64_t>(chunk.forward_flops)),
               fmt::format("{:.0f} %", 100 * chunk.share),
               std::to_string(chunk.slots),
               bytes_or_not(chunk.activation_bytes),
               std::move(sent),
               chunk.returned_bytes == 0 ? "-" : binary(chunk.returned_bytes)});
  }
  const char* snapshots = config.model.residual.type == config::ResidualType::attention
                              ? ", sum + n: the running sum and n snapshots of the residuals that "
                                "the receiver has not seen"
                              : "";
  return fmt::format(
             "Chunks (in flight: micro-batches between forward and the end of backward; "
             "activations "
             "and bundles of one micro-batch{})\n",
             snapshots) +
         table.text();
}

std::string ranks(const PipelinePlan& plan) {
  TextTable table("rlrrr", {"rank", "chunks", "busy", "kept at once", "activations"});
  for (std::size_t r = 0; r < plan.schedule.ranks.size(); ++r) {
    table.row(
        {std::to_string(r),
         fmt::format("{}", fmt::join(plan.schedule.placement.chunks_of(static_cast<int>(r)), ", ")),
         fmt::format("{:.1f} %", 100 * plan.times.busy[r] / plan.times.makespan),
         std::to_string(plan.slots.per_rank[r]),
         bytes_or_not(plan.activation_bytes[r])});
  }
  return "Ranks (kept at once: pairs of chunk and micro-batch; activations of layers only)\n" +
         table.text();
}

std::string phases(const PipelinePlan& plan) {
  if (plan.phases.size() < 2) return "";
  TextTable table("rrr", {"steps", "micro-batches", "idle"});
  for (const PipelinePhase& p : plan.phases)
    table.row({fmt::format("{}-{}", p.begin + 1, p.end),
               std::to_string(p.micro_batches),
               fmt::format("{:.1f} %", 100 * p.bubble)});
  const PipelinePhase& main = plan.phases[plan.main_phase];
  return fmt::format(
             "Pipeline by phases; all else is about steps {}-{}, which take the most operations\n",
             main.begin + 1,
             main.end) +
         table.text();
}

std::string title(const pipeline::Schedule& schedule) {
  const Sizes& s = schedule.sizes;
  if (schedule.kind == pipeline::Kind::vertical && s.pieces > 1)
    return fmt::format(
        "Layer by layer: {} chunks, each over {} pieces (counted as micro-batches here) before the "
        "next; {} micro-batch{} of {} pieces in a step",
        s.chunks,
        s.in_a_group(),
        s.micro_batches / s.pieces,
        s.micro_batches == s.pieces ? "" : "es",
        s.pieces);
  if (schedule.kind == pipeline::Kind::vertical)
    return fmt::format("Vertical order: {} chunks, each over all {} micro-batches of a step",
                       s.chunks,
                       s.micro_batches);
  std::string kind = name(schedule.kind);
  if (schedule.kind == pipeline::Kind::zero_bubble) kind += s.chunks == 1 ? " (ZB-H1)" : " (ZB-V)";
  return fmt::format("Pipeline: {}, {} stages x {} chunk{}, {} micro-batches per step",
                     kind,
                     s.stages,
                     s.chunks,
                     s.chunks == 1 ? "" : "s",
                     s.micro_batches);
}

std::string legend(const pipeline::Schedule& schedule) {
  const bool is_split = schedule.kind == pipeline::Kind::zero_bubble;
  return fmt::format("F forward, B {}, number of the micro-batch{}; every {} as long as a forward",
                     is_split ? "gradients of inputs, W of weights" : "backward",
                     schedule.sizes.chunks > 1 ? ", letter of the rank's chunk" : "",
                     is_split ? "part" : "column");
}

}  // namespace

std::string pipeline_text(const config::Config& config, const PipelinePlan& plan) {
  const std::string idle =
      plan.schedule.placement.stages() == 1
          ? "\n"
          : fmt::format(
                "  idle {:.1f} % of the time by the operations of the chunks, {:.1f} % if all "
                "chunks were alike; messages and optimizer not counted\n\n",
                100 * plan.times.bubble_fraction(),
                100 * plan.unit_bubble);
  return title(plan.schedule) +
         (config.parallel.dp ? "\n" : ", as parallel.dp is not set and counts as 1\n") + idle +
         chunks(config, plan) + ranks(plan) + phases(plan) +
         fmt::format("Schedule ({})\n", legend(plan.schedule)) +
         pipeline::grid_text(plan.schedule, kGridWidth) + "\n";
}

std::string schedule_text(const PipelinePlan& plan, ScheduleForm form) {
  switch (form) {
    case ScheduleForm::csv:
      return pipeline::schedule_csv(plan.schedule, plan.times);
    case ScheduleForm::json:
      return schedule_json(plan);
    default:
      return pipeline::grid_text(plan.schedule);
  }
}

}  // namespace moesaic::apps
