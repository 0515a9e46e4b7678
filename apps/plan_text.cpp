#include <algorithm>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "apps/plan_context.h"
#include "apps/plan_offload.h"
#include "apps/plan_pipeline.h"
#include "apps/plan_report.h"
#include "apps/text_table.h"
#include "core/config/check.h"
#include "core/config/without_effect.h"
#include "core/model/from_config.h"
#include "parallel/mesh.h"

namespace moesaic::apps {
namespace {

std::string bytes_or_not(const std::optional<std::int64_t>& bytes) {
  return bytes ? binary(*bytes) : "too large to count";
}

bool same(const LayerPlan& a, const LayerPlan& b) {
  return a.attention == b.attention && a.mixer == b.mixer && a.parameters.all == b.parameters.all &&
         a.parameters.active == b.parameters.active;
}

std::string range(std::size_t first, std::size_t last) {
  return first == last ? std::to_string(first) : fmt::format("{}-{}", first, last);
}

std::string layers(const ModelPlan& plan) {
  TextTable table("lllrr",
                  {"layers", "attention", "channel mixer", "parameters each", "active each"});
  for (std::size_t first = 0, last; first < plan.layers.size(); first = last + 1) {
    last = first;
    while (last + 1 < plan.layers.size() && same(plan.layers[first], plan.layers[last + 1]))
      ++last;
    const LayerPlan& layer = plan.layers[first];
    table.row({range(first, last),
               layer.attention,
               layer.mixer,
               grouped(layer.parameters.all),
               grouped(layer.parameters.active)});
  }
  return "Layers, counted from 0 as in tensor names\n" + table.text();
}

std::string kinds(const ModelPlan& plan) {
  struct Kind {
    std::string name;
    std::int64_t layers = 0;
    ParameterCount parameters;
  };
  std::vector<Kind> all;
  for (const LayerPlan& layer : plan.layers) {
    const std::string name = layer.attention + " + " + layer.mixer;
    auto it = std::find_if(all.begin(), all.end(), [&](const Kind& k) { return k.name == name; });
    if (it == all.end()) it = all.insert(all.end(), Kind{name, 0, {}});
    ++it->layers;
    it->parameters.all += layer.parameters.all;
    it->parameters.active += layer.parameters.active;
  }
  TextTable table("lrrr", {"kind of layer", "layers", "parameters", "active"});
  for (const Kind& k : all)
    table.row({k.name,
               std::to_string(k.layers),
               grouped(k.parameters.all),
               grouped(k.parameters.active)});
  return table.text();
}

std::string parameters(const ModelPlan& plan) {
  TextTable table("lrr", {"part", "parameters", "active"});
  for (const PartPlan& part : plan.parts)
    table.row({name(part.part), grouped(part.parameters.all), grouped(part.parameters.active)});
  table.row({"total", grouped(plan.model.all), grouped(plan.model.active)});
  if (plan.mtp.all > 0)
    table.row({"MTP (not in the total)", grouped(plan.mtp.all), grouped(plan.mtp.active)});
  return "Parameters (active: of a token; the input embedding is a lookup and not counted)\n" +
         table.text();
}

std::string flops(const ModelPlan& plan) {
  TextTable table("lrl", {"part", "forward", "formula"});
  for (const FlopsPlan& part : plan.flops)
    table.row({part.part, operations(part.flops), part.formula});
  table.row({"forward", operations(plan.forward_flops), "sum"});
  table.row({"training", operations(plan.training_flops), "3 x forward"});
  if (plan.mtp_flops)
    table.row({"MTP (not in the sum)", operations(plan.mtp_flops->flops), plan.mtp_flops->formula});
  return fmt::format("Operations per token at T = {} tokens of context, causal average T/2\n",
                     grouped(plan.sequence_length)) +
         table.text();
}

std::string memory(const config::Config& config, const ModelPlan& plan) {
  TextTable classes("llrrrrrrr",
                    {"optimised by",
                     "stored as",
                     "parameters",
                     "weight",
                     "master",
                     "gradient",
                     "state",
                     "average",
                     "bytes each"});
  for (const ByteClass& c : plan.byte_classes) {
    classes.row({c.optimizer,
                 name(c.stored_as),
                 grouped(c.parameters),
                 std::to_string(c.weight),
                 std::to_string(c.master),
                 std::to_string(c.gradient),
                 std::to_string(c.state),
                 std::to_string(c.average),
                 std::to_string(c.per_parameter())});
  }
  TextTable totals("lr", {"whole model, before it is split over ranks", ""});
  const BytesPlan& b = plan.bytes;
  const std::pair<const char*, std::int64_t> rows[] = {
      {"weights", b.weights},
      {"master weights", b.masters},
      {"gradients", b.gradients},
      {"optimizer state", b.optimizer},
      {"weight average", b.average},
      {"routing bias, statistics of a step", b.buffers},
      {"total", b.total}};
  for (const auto& [what, bytes] : rows)
    totals.row({what, binary(bytes)});
  totals.row({fmt::format("activations of a micro-batch, {} x {} tokens",
                          config.train.micro_batch_size,
                          grouped(plan.sequence_length)),
              bytes_or_not(plan.activation_bytes)});
  return fmt::format("Memory, {} compute and {} master weights{}; bytes per parameter\n",
                     name(plan.precision.compute),
                     name(plan.precision.master),
                     plan.precision.split_masters ? " (split)" : "") +
         classes.text() + totals.text();
}

std::string phases(const ModelPlan& plan) {
  TextTable table("rrrrlrrrrrr",
                  {"steps",
                   "until token",
                   "tokens",
                   "batch",
                   "attention",
                   "trained",
                   "frozen",
                   "gradients",
                   "optimizer",
                   "forward/token",
                   "activations"});
  for (const PhasePlan& p : plan.phases) {
    table.row({fmt::format("{}-{}", p.begin + 1, p.end),
               grouped(p.end_token),
               grouped(p.sequence_length),
               fmt::format("{} ({})", grouped(p.global_batch_size), p.micro_batch_size),
               p.dense_warmup ? "dense, indexer warms up" : "as in the model",
               grouped(p.trained),
               grouped(p.frozen),
               binary(p.gradient_bytes),
               binary(p.optimizer_bytes),
               operations(p.forward_flops),
               bytes_or_not(p.activation_bytes)});
  }
  return fmt::format(
             "Phases (until token: of the run; tokens: of a sequence; batch: sequences per step, "
             "in "
             "brackets per micro-batch; parameters{}; frozen ones have no gradient, no optimizer "
             "state "
             "and no reduction)\n",
             plan.mtp.all > 0 ? " with MTP" : "") +
         table.text();
}

bool is_over_budget(const config::Config& config, const MemoryPlan& memory) {
  const auto& budget = config.memory.device_budget;
  return budget && memory.total() > static_cast<std::size_t>(*budget);
}

// A line for every stage of a pipeline.
std::string stage_table(const std::vector<MemoryPlan>& stages) {
  if (stages.size() < 2) return "";
  TextTable table("rrrr", {"stage", "device", "host memory", "file"});
  const auto size = [](std::uint64_t bytes) { return binary(static_cast<std::int64_t>(bytes)); };
  for (std::size_t s = 0; s < stages.size(); ++s)
    table.row({std::to_string(s),
               size(stages[s].total()),
               size(bytes_of(stages[s].host)),
               size(bytes_of(stages[s].file))});
  return "Memory of a rank of every stage\n" + table.text();
}

std::string rank_memory(const config::LoadedConfig& loaded,
                        const std::vector<MemoryPlan>& stages,
                        std::int64_t least_document) {
  const std::size_t stage = largest_on_device(stages);
  const MemoryPlan& memory = stages[stage];
  const std::string beyond =
      is_over_budget(loaded.config, memory)
          ? fmt::format("memory.device_budget is {}: this run does not start\n",
                        binary(*loaded.config.memory.device_budget))
          : "";
  return fmt::format(
             "Memory of a rank of {}{}, by a dry run of its steps on the {} backend; documents of "
             "at least {} tokens\n{}",
             memory.ranks,
             stages.size() > 1 ? fmt::format(", of stage {}, which needs most on the device", stage)
                               : "",
             memory.device.kind == Device::Kind::cuda ? "CUDA" : "CPU",
             grouped(least_document),
             memory.table()) +
         beyond + stage_table(stages);
}

// Of the stage with most of it.
std::string offload(const config::Config& config,
                    const ModelPlan& plan,
                    const std::vector<MemoryPlan>& stages) {
  const auto stage = largest_offload(stages);
  if (!stage) return "";
  return offload_text(
      config, plan, stages[*stage], stages.size() > 1 ? fmt::format(" of stage {}", *stage) : "");
}

}  // namespace

std::string plan_text(const config::LoadedConfig& loaded,
                      const ModelPlan& plan,
                      const std::vector<MemoryPlan>& stages,
                      const std::string& recompute,
                      const std::optional<PipelinePlan>& pipeline,
                      std::int64_t least_document,
                      bool too_little) {
  const config::ModelConfig& model = loaded.config.model;
  std::string text = fmt::format("{}: {}, {} layers, hidden {}, vocabulary {}\n\n",
                                 loaded.path,
                                 model.model_type,
                                 model.num_hidden_layers,
                                 model.hidden_size,
                                 model.vocab_size);
  text += layers(plan) + kinds(plan) + parameters(plan) + flops(plan) +
          memory(loaded.config, plan) + phases(plan);
  const config::ParallelConfig& parallel = loaded.config.parallel;
  if (const int ranks = planned_ranks(parallel); ranks > 1)
    text += MeshLayout(mesh_config(parallel), ranks).table() + "\n";
  if (!stages.empty())
    text += rank_memory(loaded, stages, least_document) + offload(loaded.config, plan, stages);
  text += recompute;
  if (const auto context = plan_context(loaded.config, plan)) text += context_text(*context);
  if (pipeline) text += pipeline_text(loaded.config, *pipeline);
  for (const config::Problem& note : config::untrainable(loaded.config))
    text += "note: " + note.key + ": " + note.message + "\n";
  for (const config::Finding& note : config::without_effect(loaded.config))
    text += "note: " + note.keys.front() + ": " + note.message + "\n";
  if (too_little)
    return text + (loaded.config.experts.offload == config::ExpertOffload::none
                       ? "does not fit into host memory\n"
                       : "does not fit; shown with the smallest caches of experts that are "
                         "possible\n");
  if (!stages.empty() && is_over_budget(loaded.config, stages[largest_on_device(stages)]))
    return text + "does not fit into memory.device_budget\n";
  return text + "no problems found\n";
}

}  // namespace moesaic::apps
