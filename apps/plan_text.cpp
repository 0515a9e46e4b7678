#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "apps/plan_report.h"
#include "core/config/check.h"

namespace moesaic::apps {
namespace {

/// 2779484478208 -> "2,779,484,478,208".
std::string grouped(std::int64_t n) {
  std::string digits = std::to_string(n);
  for (std::size_t at = digits.size(); at > 3; at -= 3)
    digits.insert(at - 3, 1, ',');
  return digits;
}

std::string binary(std::int64_t bytes) {
  constexpr std::array<const char*, 6> kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit)
    value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string operations(std::int64_t flops) {
  constexpr std::array<const char*, 5> kUnits{"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"};
  double value = static_cast<double>(flops);
  std::size_t unit = 0;
  for (; value >= 1000 && unit + 1 < kUnits.size(); ++unit)
    value /= 1000;
  return fmt::format("{:.2f} {}", value, kUnits[unit]);
}

std::string bytes_or_not(const std::optional<std::int64_t>& bytes) {
  return bytes ? binary(*bytes) : "too large to count";
}

/// Rows of cells under a heading; columns are as wide as their widest cell. 'l' and 'r' in
/// `alignment` per column.
class Table {
 public:
  Table(std::string alignment, std::vector<std::string> heading)
      : alignment_(std::move(alignment)) {
    row(std::move(heading));
  }
  void row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const {
    std::vector<std::size_t> widths(alignment_.size(), 0);
    for (const auto& cells : rows_) {
      for (std::size_t i = 0; i < cells.size(); ++i)
        widths[i] = std::max(widths[i], cells[i].size());
    }
    std::string all;
    for (const auto& cells : rows_) {
      std::string line;
      for (std::size_t i = 0; i < cells.size(); ++i) {
        line += alignment_[i] == 'r' ? fmt::format("  {:>{}}", cells[i], widths[i])
                                     : fmt::format("  {:<{}}", cells[i], widths[i]);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      all += line + "\n";
    }
    return all + "\n";
  }

 private:
  std::string alignment_;
  std::vector<std::vector<std::string>> rows_;
};

bool same(const LayerPlan& a, const LayerPlan& b) {
  return a.attention == b.attention && a.mixer == b.mixer && a.parameters.all == b.parameters.all &&
         a.parameters.active == b.parameters.active;
}

std::string range(std::size_t first, std::size_t last) {
  return first == last ? std::to_string(first) : fmt::format("{}-{}", first, last);
}

std::string layers(const ModelPlan& plan) {
  Table table("lllrr", {"layers", "attention", "channel mixer", "parameters each", "active each"});
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
  Table table("lrrr", {"kind of layer", "layers", "parameters", "active"});
  for (const Kind& k : all)
    table.row({k.name,
               std::to_string(k.layers),
               grouped(k.parameters.all),
               grouped(k.parameters.active)});
  return table.text();
}

std::string parameters(const ModelPlan& plan) {
  Table table("lrr", {"part", "parameters", "active"});
  for (const PartPlan& part : plan.parts)
    table.row({name(part.part), grouped(part.parameters.all), grouped(part.parameters.active)});
  table.row({"total", grouped(plan.model.all), grouped(plan.model.active)});
  if (plan.mtp.all > 0)
    table.row({"MTP (not in the total)", grouped(plan.mtp.all), grouped(plan.mtp.active)});
  return "Parameters (active: of a token; the input embedding is a lookup and not counted)\n" +
         table.text();
}

std::string flops(const ModelPlan& plan) {
  Table table("lrl", {"part", "forward", "formula"});
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
  Table classes("llrrrrrrr",
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
  Table totals("lr", {"whole model, before it is split over ranks", ""});
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
  Table table("rrrrlrrrrrr",
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

std::string rank_memory(const config::LoadedConfig& loaded, const MemoryPlan& memory) {
  const std::int64_t ranks = loaded.config.parallel.dp.value_or(1);
  return fmt::format(
      "Memory of a rank of {}, by a dry run of its steps on the {} backend; documents of at least "
      "{} "
      "tokens\n{}",
      ranks,
      memory.device.kind == Device::Kind::cuda ? "CUDA" : "CPU",
      kPlannedDocument,
      memory.table());
}

}  // namespace

std::string plan_text(const config::LoadedConfig& loaded,
                      const ModelPlan& plan,
                      const std::optional<MemoryPlan>& rank) {
  const config::ModelConfig& model = loaded.config.model;
  std::string text = fmt::format("{}: {}, {} layers, hidden {}, vocabulary {}\n\n",
                                 loaded.path,
                                 model.model_type,
                                 model.num_hidden_layers,
                                 model.hidden_size,
                                 model.vocab_size);
  text += layers(plan) + kinds(plan) + parameters(plan) + flops(plan) +
          memory(loaded.config, plan) + phases(plan);
  if (rank) text += rank_memory(loaded, *rank);
  for (const config::Problem& note : config::untrainable(loaded.config))
    text += "note: " + note.key + ": " + note.message + "\n";
  return text + "no problems found\n";
}

}  // namespace moesaic::apps
