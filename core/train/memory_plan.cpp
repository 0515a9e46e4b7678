#include "core/train/memory_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include "comm/device_communicator.h"
#include "core/base/memory_shortage.h"
#include "core/model/from_config.h"
#include "core/model/pipeline_plan.h"
#include "core/nn/losses.h"
#include "core/train/expert_copier.h"
#include "core/train/expert_move.h"
#include "core/train/expert_updates.h"
#include "core/train/optimizer_config.h"
#include "core/train/step_memory.h"

namespace moesaic {
namespace {

// The driver's context, the kernels of this program and the libraries' own memory, as a single-GPU run leaves them on an
// H200 beside its own buffers.
constexpr std::size_t kCudaRuntimeBytes = std::size_t{632} << 20;
struct Unit {
  double bytes;
  const char* name;
};
// One for a whole table, so that its lines compare.
Unit unit_for(std::size_t bytes) {
  constexpr double kMiB = 1024.0 * 1024.0, kGiB = 1024.0 * kMiB, kTiB = 1024.0 * kGiB;
  const auto size = static_cast<double>(bytes);
  if (size < 100 * kGiB) return {kMiB, "MiB"};
  if (size < 100 * kTiB) return {kGiB, "GiB"};
  return {kTiB, "TiB"};
}

}  // namespace

std::size_t MemoryPlan::total() const {
  std::size_t sum = runtime + communication;
  for (const MemoryUse& use : parts)
    sum += use.bytes;
  return sum;
}

namespace {

// Of a tag in host memory whose device part has a buffer of its own.
constexpr const char* kHostSuffix = ", host";

// A part in all tiers.
struct Row {
  std::string tag;
  std::size_t device = 0, host = 0, file = 0;
};

std::vector<Row> rows_of(const MemoryPlan& plan) {
  std::vector<Row> rows;
  const auto add = [&](const MemoryUse& use, std::size_t Row::*where) {
    auto row =
        std::find_if(rows.begin(), rows.end(), [&](const Row& r) { return r.tag == use.tag; });
    if (row == rows.end()) row = rows.insert(row, {.tag = use.tag});
    (*row).*where += use.bytes;
  };
  for (const MemoryUse& use : plan.parts)
    add(use, &Row::device);
  if (plan.communication > 0) add({"communication", plan.communication}, &Row::device);
  if (plan.runtime > 0) add({"CUDA context and libraries (estimate)", plan.runtime}, &Row::device);
  for (const MemoryUse& use : plan.host)
    add({use.tag.substr(0, use.tag.rfind(kHostSuffix)), use.bytes}, &Row::host);
  for (const MemoryUse& use : plan.file)
    add(use, &Row::file);
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::max({a.device, a.host, a.file}) > std::max({b.device, b.host, b.file});
  });
  return rows;
}

}  // namespace

std::string MemoryPlan::table() const {
  const std::vector<Row> rows = rows_of(*this);
  Row sum{.tag = "sum"};
  for (const Row& r : rows) {
    sum.device += r.device;
    sum.host += r.host;
    sum.file += r.file;
  }
  const Unit unit = unit_for(std::max({sum.device, sum.host, sum.file}));
  const bool has_tiers = sum.host + sum.file > 0;
  std::string text;
  if (has_tiers)
    text += fmt::format("  {:<40} {:>16} {:>16} {:>16}\n", "", "device", "host memory", "file");
  const auto size = [&](std::size_t bytes) -> std::string {
    if (bytes == 0) return "-";
    return fmt::format("{:.1f} {}", static_cast<double>(bytes) / unit.bytes, unit.name);
  };
  const auto line = [&](const Row& r) {
    text += fmt::format("  {:<40} {:>16}", r.tag, size(r.device));
    if (has_tiers) text += fmt::format(" {:>16} {:>16}", size(r.host), size(r.file));
    text += "\n";
  };
  for (const Row& r : rows)
    line(r);
  line(sum);
  if (activations_out > 0)
    text += fmt::format("  offloaded activations: a step copies {} out and {} back\n",
                        size(activations_out),
                        size(activations_in));
  return text;
}

namespace {

/// A rank of a run, on memory that is not there.
struct PlannedRank {
  const config::Config& config;
  Device device;
  const Precision& precision;
  std::span<const data::DocumentBound> documents;
  int ranks, rank;
};

struct DryRun {
  MemoryPlan plan;
  std::vector<TierGroup> groups;  ///< of offloaded experts
  std::size_t activations_host = 0;
};

// Buckets are cut by bytes, so that experts' states need not lie evenly.
std::optional<int> rank_of_states(const ParameterStore& params,
                                  const MeshLayout& layout,
                                  std::span<const TierGroup> groups) {
  if (groups.empty()) return std::nullopt;
  const auto axes = params.spec(params.params_of(groups.front().storages.front()).front())
                        .placement.gradient_axes();
  const std::vector<int> ranks = layout.group_of(axes, params.position().world_rank());
  std::vector<std::int64_t> elements(ranks.size(), 0);
  for (const TierGroup& group : groups) {
    for (const StorageId id : group.storages) {
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        const FlatRange range = params.range_of_owner(id, static_cast<int>(i));
        elements[i] += range.end - range.begin;
      }
    }
  }
  auto most = static_cast<std::size_t>(params.position().in_group(axes).index);
  for (std::size_t i = 0; i < ranks.size(); ++i)
    if (elements[i] > elements[most]) most = i;
  return ranks[most];
}

DryRun dry_run(const PlannedRank& run, const std::optional<ExpertTierOptions>& tiers) {
  const config::Config& config = run.config;
  const auto layout = std::make_shared<MeshLayout>(mesh_config(config.parallel), run.ranks);
  const MeshPosition position(layout, run.rank);
  const ModelOptions options = model_options(config);
  ParameterStore params(run.precision, position);
  Model model(params, options, stage_share(config, position));
  const std::vector<Phase> phases = make_phases(config);
  if (auto sharding = state_sharding(config, model)) params.shard_state(*sharding);
  if (tiers) params.offload_experts(*tiers);
  params.seal_pretend(run.device, ever_trained(phases, params));
  ParameterStore whole(run.precision, position);
  if (position.extent(Axis::pp) > 1) {
    const Model declared(whole, options);
    whole.seal_pretend(run.device, ever_trained(phases, whole));
  }
  Optimizer optimizer(
      params, optimizer_options(config.optimizer), whole.sealed() ? &whole : nullptr);
  ExpertUpdates::check_in_backward(config, params, optimizer);
  const StepMemory step = measure_run(config,
                                      phases,
                                      run.documents,
                                      model,
                                      params,
                                      &optimizer,
                                      run.device,
                                      recompute_policy(config.activations));
  const StepBuffers buffers = step_buffers(phases, model, params, position.extent(Axis::dp));

  DryRun result;
  MemoryPlan& plan = result.plan;
  plan.device = run.device;
  plan.ranks = run.ranks;
  plan.parts = params.memory_use();
  const auto state = optimizer.memory_use();
  plan.parts.insert(plan.parts.end(), state.begin(), state.end());
  plan.parts.push_back({"batches", buffers.batches});
  plan.parts.push_back({"balance margins", buffers.margins});
  plan.parts.push_back({"scratch", step.scratch});
  plan.parts.push_back({"exchange scratch", step.exchange});
  plan.parts.push_back(
      {"update scratch", static_cast<std::size_t>(step.update_streams) * step.updates});
  plan.parts.push_back({"transient", step.transient});
  plan.parts.push_back({"saved activations", step.slot});
  plan.parts.push_back({"offloaded activations", step.offload});
  plan.activations_out = step.offload_out;
  plan.activations_in = step.offload_in;
  plan.parts.push_back(
      {"split backward", step.deferred * static_cast<std::size_t>(step.num_deferred)});
  plan.parts.push_back({"bundles between chunks", step.bundles});
  plan.parts.push_back({"key gradients of pieces", step.piece_sums});
  plan.parts.push_back({"losses", losses_bytes(model)});
  if (config.experts.place_every > 0)
    plan.parts.push_back({"experts on their way", ExpertMove::memory_bytes(params)});
  plan.parts.push_back({"gradients of expert replicas", ExpertCopier::memory_bytes(params)});
  plan.runtime = runtime_bytes(run.device);
  if (run.device.kind == Device::Kind::cuda)
    plan.communication = device_communication_bytes(run.ranks);
  // A stage of a pipeline may hold no experts; its run offloads them all the same.
  plan.tiers = tiers;
  if (tiers && params.tiers() != nullptr) {
    result.groups = params.tier_groups(tiers->state_kinds);
    plan.rank_of_states = rank_of_states(params, *layout, result.groups);
    const auto host = params.tiers()->host_use();
    plan.host.insert(plan.host.end(), host.begin(), host.end());
    plan.file = params.tiers()->file_use();
    if (!tiers->groups.empty()) plan.tier_parts = tier_parts(result.groups, *tiers);
  }
  result.activations_host = step.offload_host;
  plan.host.push_back({std::string("offloaded activations") + kHostSuffix, step.offload_host});
  for (auto* list : {&plan.parts, &plan.host, &plan.file})
    std::erase_if(*list, [](const MemoryUse& use) { return use.bytes == 0; });
  return result;
}

}  // namespace

std::size_t runtime_bytes(Device device) {
  return device.kind == Device::Kind::cuda ? kCudaRuntimeBytes : 0;
}

std::optional<DeviceLimit> device_limit(const config::Config& config,
                                        const MemoryLimits& limits,
                                        std::size_t runtime) {
  // Beside the caches' own sizes, which the driver rounds up.
  constexpr std::uint64_t kMargin = std::uint64_t{256} << 20;
  std::optional<DeviceLimit> least;
  const auto consider = [&](std::uint64_t bytes, const std::string& key) {
    if (!least || bytes < least->bytes) least = DeviceLimit{bytes, key};
  };
  if (config.memory.device_budget)
    consider(static_cast<std::uint64_t>(*config.memory.device_budget), "memory.device_budget");
  if (limits.device) consider(*limits.device, limits.device_key);
  if (limits.device_free)
    consider(*limits.device_free - std::min(*limits.device_free, kMargin) + runtime, "");
  return least;
}

namespace {

MemoryPlan plan_with_tiers(const PlannedRank& run, const MemoryLimits& limits) {
  const ExpertTierOptions unfilled = expert_tier_options(run.config, run.rank);
  const DryRun bare = dry_run(run, unfilled);
  TierLimits tier = tier_limits(run.config);
  if (limits.least_caches) tier = {.least_slots = true};
  if (limits.host && !limits.least_caches && !run.config.memory.host_budget) {
    tier.host = *limits.host;
    tier.host_is_budget = false;
  }
  tier.host_rest = bare.activations_host;
  const auto limit = device_limit(run.config, limits, bare.plan.runtime);
  const bool is_left_over = limit && !run.config.experts.device_cache && !limits.least_caches;
  // What the rest takes depends a little on the caches.
  constexpr int kTries = 4;
  std::uint64_t rest = bare.plan.total();
  MemoryPlan plan;
  for (int i = 0; i < kTries; ++i) {
    if (is_left_over) {
      tier.device = limit->bytes - std::min<std::uint64_t>(limit->bytes, rest);
      tier.device_key = limit->key;
      tier.device_budget = limit->bytes;
      tier.device_rest = rest;
    }
    plan = dry_run(run, plan_expert_tiers(run.config, bare.groups, tier, run.rank)).plan;
    if (!is_left_over || plan.total() <= limit->bytes) break;
    rest += plan.total() - limit->bytes;
  }
  if (is_left_over) plan.device_limit = limit->bytes;
  return plan;
}

// Of activations that wait in host memory, without experts there.
void check_host(const config::Config& config, std::size_t bytes, const MemoryLimits& limits) {
  const auto& budget = config.memory.host_budget;
  const std::uint64_t limit = budget        ? static_cast<std::uint64_t>(*budget)
                              : limits.host ? *limits.host
                                            : TierLimits::kNoLimit;
  if (bytes <= limit) return;
  throw MemoryShortage(
      MemoryShortage::Where::host,
      bytes,
      fmt::format("offloaded activations of this rank need {}B of host memory; {} {}B{}. "
                  "{}, or offload less (activations.residual_offload, activations.offload)",
                  bytes,
                  budget ? "memory.host_budget is" : "the system counts",
                  limit,
                  budget ? "" : " as available to it",
                  budget ? "Raise it" : "Set memory.host_budget, if more can be had"));
}

}  // namespace

MemoryPlan plan_memory(const config::Config& config,
                       Device device,
                       const Precision& precision,
                       std::span<const data::DocumentBound> documents,
                       int ranks,
                       int rank,
                       const MemoryLimits& limits) {
  const PlannedRank run{config, device, precision, documents, ranks, rank};
  if (config.experts.offload != config::ExpertOffload::none) return plan_with_tiers(run, limits);
  DryRun result = dry_run(run, std::nullopt);
  if (!limits.least_caches) check_host(config, result.activations_host, limits);
  return std::move(result.plan);
}

}  // namespace moesaic
