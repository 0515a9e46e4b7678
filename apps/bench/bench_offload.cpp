// What offloaded experts cost: the same steps with everything on the device, and with less and less of it.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>
#include <optional>
#include <ostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/assembly.h"
#include "apps/bench/bench.h"
#include "apps/bench/forced_routing.h"
#include "apps/bench/link_rates.h"
#include "apps/bench/random_tokens.h"
#include "apps/bench/timing.h"
#include "apps/plan_stages.h"
#include "apps/text_table.h"
#include "core/config/scalar.h"
#include "core/model/from_config.h"
#include "core/nn/expert_tiers.h"
#include "core/train/optimizer_config.h"
#include "core/train/tier_plan.h"
#include "memory/device_hooks.h"

namespace moesaic::bench {
namespace {

constexpr int kWarmUpSteps = 2;

/// One row: a number of tokens, a routing, a budget.
struct OffloadRow {
  std::int64_t tokens = 0;
  double zipf = 0;
  std::string budget;            ///< as given; empty: experts.offload is none
  std::uint64_t cache = 0;       ///< bytes
  double seconds = 0;            ///< of a step, median
  double up = 0, down = 0;       ///< bytes of a step over the link, of offloaded activations too
  double file = 0;               ///< bytes of a step read from the file or written to it
  double hits = 0, uses = 0;     ///< of weights
  double host_waits = 0;         ///< seconds of a step
  double loss = 0;               ///< of the last step
  std::size_t device_bytes = 0;  ///< in use, as the driver counts (GPU)
};

double share_of(const std::string& text) {
  const bool is_share = !text.empty() && text.back() == '%';
  const auto percent = config::parse_number(is_share ? text.substr(0, text.size() - 1) : "");
  if (!percent.value || *percent.value <= 0 || *percent.value > 100)
    throw UsageError(
        fmt::format("--budget {}: write shares of all experts, as in 100%,50%,25%", text));
  return *percent.value / 100;
}

/// The sums over all caches.
struct Counts {
  double up = 0, down = 0, file = 0, hits = 0, uses = 0, waits = 0;
};
Counts counts_of(const ParameterStore& params) {
  Counts all;
  if (params.tiers() == nullptr) return all;
  for (const TierCounters& c : params.tiers()->counters()) {
    all.up += static_cast<double>(c.cache.bytes_up);
    all.down += static_cast<double>(c.cache.bytes_down);
    all.file += static_cast<double>(c.file_bytes_read + c.file_bytes_written);
    all.waits += c.host_wait_seconds;
    if (c.kind != "weights") continue;
    all.hits += static_cast<double>(c.cache.hits);
    all.uses += static_cast<double>(c.cache.uses);
  }
  return all;
}

/// The configuration with what a row changes.
config::Config config_of(const OffloadOptions& o, const OffloadRow& row) {
  config::Config config = load_without_data(o.config, o.overrides).config;
  const std::int64_t unit = config.data.sequence_length * config.train.micro_batch_size;
  if (row.tokens % unit != 0)
    throw UsageError(
        fmt::format("--tokens {0}: write a multiple of data.sequence_length x "
                    "train.micro_batch_size ({1}), as in {2}",
                    row.tokens,
                    unit,
                    (row.tokens / unit + 1) * unit));
  config.train.global_batch_size = row.tokens / config.data.sequence_length;
  config.train.steps = kWarmUpSteps + o.steps;
  config.optimizer.warmup_steps = 0;
  config.memory.device_budget.reset();
  config.experts.device_cache.reset();
  if (row.budget.empty()) {
    config.experts.offload = config::ExpertOffload::none;
    config.experts.update = config::ExpertUpdateTime::after_step;
    return config;
  }
  if (config.experts.offload == config::ExpertOffload::none)
    config.experts.offload = config::ExpertOffload::full;
  config.experts.device_cache = static_cast<std::int64_t>(row.cache);
  return config;
}

void measure(const OffloadOptions& o, OffloadRow& row) {
  const config::Config config = config_of(o, row);
  apps::Assembly assembly = apps::assemble(config, true, apps::resolve_device(config));
  const std::int64_t length = config.data.sequence_length;
  const auto tokens = std::make_shared<RandomTokens>(
      4 * config.train.global_batch_size, length, config.model.vocab_size);
  Trainer trainer(Trainer::Parts{.config = &config,
                                 .params = assembly.params.get(),
                                 .model = assembly.model.get(),
                                 .optimizer = assembly.optimizer.get(),
                                 .train = tokens,
                                 .device = assembly.device,
                                 .recompute = recompute_policy(config.activations)});
  ForcedRouting routing(
      *assembly.model, length * config.train.micro_batch_size, row.zipf, assembly.device);
  trainer.set_choices(&routing);
  for (int i = 0; i < kWarmUpSteps; ++i)
    trainer.step();
  const Counts before = counts_of(*assembly.params);
  std::vector<double> times;
  double activations_up = 0, activations_down = 0;
  for (int i = 0; i < o.steps; ++i) {
    const StepStats stats = trainer.step();
    times.push_back(stats.seconds);
    activations_up = static_cast<double>(stats.activations_in);
    activations_down = static_cast<double>(stats.activations_out);
    row.loss = stats.loss;
  }
  const Counts after = counts_of(*assembly.params);
  row.seconds = median(times);
  const auto a_step = [&](double Counts::*what) { return (after.*what - before.*what) / o.steps; };
  row.up = a_step(&Counts::up) + activations_up;
  row.down = a_step(&Counts::down) + activations_down;
  row.file = a_step(&Counts::file);
  row.hits = a_step(&Counts::hits);
  row.uses = a_step(&Counts::uses);
  row.host_waits = a_step(&Counts::waits);
  if (assembly.device.kind == Device::Kind::cuda) {
    const auto memory = cuda::device_memory(assembly.device);
    row.device_bytes = memory.total - memory.free;
  }
}

/// Bytes of what a run keeps of its experts (weights, gradients, states), and of the smallest caches of what is offloaded.
struct ExpertBytes {
  std::uint64_t all = 0, least = 0;
};
ExpertBytes expert_bytes(const OffloadOptions& o) {
  const config::Config config = load_without_data(o.config, o.overrides).config;
  if (const int ranks = apps::planned_ranks(config.parallel); ranks > 1)
    throw UsageError(
        fmt::format("{}: bench offload measures one rank, and the layout has {}: set parallel.dp, "
                    "pp, cp, tp, ep and etp to 1",
                    o.config,
                    ranks));
  const bool on_gpu = apps::resolve_device(config).kind == Device::Kind::cuda;
  ParameterStore params(precision_of(config, on_gpu));
  const Model model(params, model_options(config));
  ExpertTierOptions options;
  options.state_kinds = expert_state_kinds(optimizer_options(config.optimizer));
  params.offload_experts(options);
  params.seal_pretend(kCpu);
  ExpertBytes bytes;
  const std::vector<TierGroup> groups = params.tier_groups(options.state_kinds);
  for (const TierGroup& g : groups) {
    const auto blocks = static_cast<std::uint64_t>(g.blocks());
    bytes.all += blocks * (g.weight_bytes + g.gradient_bytes) +
                 static_cast<std::uint64_t>(g.owned) * g.state_bytes();
  }
  if (bytes.all == 0)
    throw UsageError(o.config + ": a model without routed experts has nothing to offload");
  options.weights = config.experts.offload != config::ExpertOffload::states;
  options.gradients_in_ring = config.experts.update == config::ExpertUpdateTime::in_backward;
  fill_tiers(groups, {.least_slots = true}, options);
  bytes.least = device_bytes(tier_parts(groups, options));
  return bytes;
}

/// Bytes of a budget; refuses what no run could start with.
std::uint64_t bytes_of(const std::string& budget, const ExpertBytes& experts) {
  const auto bytes =
      static_cast<std::uint64_t>(share_of(budget) * static_cast<double>(experts.all));
  if (bytes >= experts.least) return bytes;
  const double percent =
      100 * static_cast<double>(experts.least) / static_cast<double>(experts.all);
  throw UsageError(fmt::format(
      "--budget {}: {} of {} bytes, and the smallest caches take {}; write at least {:.1f}%",
      budget,
      bytes,
      experts.all,
      experts.least,
      std::ceil(10 * percent) / 10));
}

/// Seconds that the links need at least for the bytes of a row.
double link_seconds(const OffloadRow& row, const LinkRates& rates) {
  const double both = std::min(row.up, row.down);
  return both / rates.up_both + (row.up - both) / rates.up + (row.down - both) / rates.down;
}

std::string gb(double bytes) {
  return fmt::format("{:.3f}", bytes / 1e9);
}

void print_text(const std::vector<OffloadRow>& rows,
                const LinkRates& rates,
                std::uint64_t all,
                const OffloadOptions& o,
                std::ostream& out) {
  out << fmt::format(
      "experts: {} of weights, gradients and states; budgets are shares of it\n"
      "link: {:.1f} GB/s up, {:.1f} GB/s down, {:.1f} GB/s each way at once\n"
      "median of {} steps; bound: the larger of the step without offload and the link's time\n\n",
      apps::binary(static_cast<std::int64_t>(all)),
      rates.up / 1e9,
      rates.down / 1e9,
      rates.up_both / 1e9,
      o.steps);
  apps::TextTable table("rlrrrrrrrrr",
                        {"tokens",
                         "routing",
                         "budget",
                         "step s",
                         "tok/s",
                         "of none",
                         "up GB",
                         "down GB",
                         "link s",
                         "of bound",
                         "hits"});
  const OffloadRow* none = nullptr;
  for (const OffloadRow& row : rows) {
    if (row.budget.empty()) none = &row;
    const double link = link_seconds(row, rates);
    const double bound = std::max(none->seconds, link);
    table.row({std::to_string(row.tokens),
               row.zipf == 0 ? "uniform" : fmt::format("zipf {:g}", row.zipf),
               row.budget.empty() ? "none" : row.budget,
               fmt::format("{:.3f}", row.seconds),
               fmt::format("{:.0f}", static_cast<double>(row.tokens) / row.seconds),
               fmt::format("{:.1f} %", 100 * none->seconds / row.seconds),
               gb(row.up),
               gb(row.down),
               fmt::format("{:.3f}", link),
               fmt::format("{:.2f}", row.seconds / bound),
               row.uses > 0 ? fmt::format("{:.0f} %", 100 * row.hits / row.uses) : ""});
  }
  out << table.text();
}

void print_json(const std::vector<OffloadRow>& rows,
                const LinkRates& rates,
                std::uint64_t all,
                std::ostream& out) {
  nlohmann::ordered_json json;
  json["expert_bytes"] = all;
  json["link"] = {{"up", rates.up}, {"down", rates.down}, {"each_way_at_once", rates.up_both}};
  for (const OffloadRow& row : rows) {
    json["rows"].push_back({{"tokens", row.tokens},
                            {"zipf", row.zipf},
                            {"budget", row.budget.empty() ? "none" : row.budget},
                            {"cache_bytes", row.cache},
                            {"step_seconds", row.seconds},
                            {"tokens_per_second", static_cast<double>(row.tokens) / row.seconds},
                            {"bytes_up", row.up},
                            {"bytes_down", row.down},
                            {"file_bytes", row.file},
                            {"link_seconds", link_seconds(row, rates)},
                            {"hits", row.hits},
                            {"uses", row.uses},
                            {"host_wait_seconds", row.host_waits},
                            {"device_bytes", row.device_bytes},
                            {"loss", row.loss}});
  }
  out << json.dump(2) << "\n";
}

}  // namespace

int bench_offload(const OffloadOptions& o, std::ostream& out) {
  for (const std::string& budget : o.budgets)
    share_of(budget);
  const ExpertBytes experts = expert_bytes(o);
  for (const std::string& budget : o.budgets)
    bytes_of(budget, experts);
  const Device device = apps::resolve_device(load_without_data(o.config, o.overrides).config);
  const LinkRates rates = measure_links(device);
  std::vector<OffloadRow> rows;
  for (const std::int64_t tokens : o.tokens) {
    for (const double zipf : o.zipf) {
      std::vector<std::string> budgets{""};
      budgets.insert(budgets.end(), o.budgets.begin(), o.budgets.end());
      std::optional<double> loss;
      for (const std::string& budget : budgets) {
        OffloadRow row{.tokens = tokens, .zipf = zipf, .budget = budget};
        if (!budget.empty()) row.cache = bytes_of(budget, experts);
        measure(o, row);
        std::cerr << fmt::format("{} tokens, zipf {:g}, {}: {:.3f} s a step\n",
                                 tokens,
                                 zipf,
                                 budget.empty() ? "no offload" : budget,
                                 row.seconds);
        // The same bits whatever lies where.
        if (!loss) loss = row.loss;
        if (row.loss != *loss)
          throw InternalError(
              fmt::format("the loss with a budget of {} is {:.17g}, without offload {:.17g}",
                          budget,
                          row.loss,
                          *loss));
        rows.push_back(std::move(row));
      }
    }
  }
  o.json ? print_json(rows, rates, experts.all, out) : print_text(rows, rates, experts.all, o, out);
  return 0;
}

}  // namespace moesaic::bench
