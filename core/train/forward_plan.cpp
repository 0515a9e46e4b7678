#include "core/train/forward_plan.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "core/base/memory_shortage.h"
#include "core/model/from_config.h"
#include "core/nn/losses.h"
#include "core/train/sequence_buffers.h"
#include "core/train/step_memory.h"

namespace moesaic {
namespace {

// Nothing is kept for a backward pass.
const RecomputePolicy kKeepNothing{.all = true, .patterns = {}};

// A short window may need more than a long one: kernels are chosen by sizes.
ForwardSizes measure(const ForwardRun& run, Model& model, ParameterStore& params) {
  ForwardSizes most;
  for (const ForwardWindow& window : run.windows) {
    const StepMemory m = measure_step(model,
                                      params,
                                      nullptr,
                                      run.device,
                                      static_cast<int>(run.config.run.threads),
                                      {.tokens = window.tokens,
                                       .sequence = window.longest,
                                       .step_tokens = window.tokens,
                                       .most_documents = window.documents,
                                       .mtp = false},
                                      kKeepNothing);
    most.scratch = std::max(most.scratch, m.scratch);
    most.transient = std::max(most.transient, m.transient);
    most.slot = std::max(most.slot, m.slot);
    most.tokens = std::max(most.tokens, window.tokens);
  }
  most.transient += 256;  // the sum that the head takes beside the logits for log-probabilities
  most.batch = SequenceBuffers::bytes_for(most.tokens);
  most.losses = kNumLosses * 8;
  const auto results = static_cast<std::size_t>(
      std::max({most.tokens, model.head().vocabulary(), std::int64_t{kNumLosses}}));
  most.results = results * byte_size(run.precision.stats);
  return most;
}

struct DryForward {
  ForwardPlan plan;
  std::vector<TierGroup> groups;  ///< of offloaded experts
};

DryForward dry_forward(const ForwardRun& run, const std::optional<ExpertTierOptions>& tiers) {
  ParameterStore params(run.precision);
  Model model(params, model_options(run.config));
  params.keep_weights_alone();
  if (tiers) params.offload_experts(*tiers);
  params.seal_pretend(run.device, std::vector<char>(params.params().size(), 0));
  model.set_sparse_stage(run.sparse);
  DryForward result;
  ForwardSizes& sizes = result.plan.sizes;
  sizes = measure(run, model, params);
  MemoryPlan& memory = result.plan.memory;
  memory.device = run.device;
  memory.parts = params.memory_use();
  for (const MemoryUse& use : {MemoryUse{"scratch", sizes.scratch},
                               MemoryUse{"transient", sizes.transient},
                               MemoryUse{"activations", sizes.slot},
                               MemoryUse{"batch", sizes.batch},
                               MemoryUse{"losses", sizes.losses},
                               MemoryUse{"results", sizes.results}})
    memory.parts.push_back(use);
  memory.runtime = runtime_bytes(run.device);
  if (params.tiers() != nullptr) {
    memory.tiers = tiers;
    result.groups = params.tier_groups({});
    memory.host = params.tiers()->host_use();
    memory.file = params.tiers()->file_use();
    if (!tiers->groups.empty()) memory.tier_parts = tier_parts(result.groups, *tiers);
  }
  for (auto* list : {&memory.parts, &memory.host, &memory.file})
    std::erase_if(*list, [](const MemoryUse& use) { return use.bytes == 0; });
  return result;
}

ExpertTierOptions tier_options(const ForwardRun& run) {
  ExpertTierOptions options = expert_tier_options(run.config, run.rank);
  options.state_kinds.clear();
  // A training run may have the folder, too.
  options.file_prefix = "forward-";
  return options;
}

std::uint64_t weight_bytes(std::span<const TierGroup> groups) {
  std::uint64_t bytes = 0;
  for (const TierGroup& group : groups)
    bytes += static_cast<std::uint64_t>(group.blocks()) * group.weight_bytes;
  return bytes;
}

[[noreturn]] void refuse(const ForwardRun& run, const MemoryPlan& plan, const DeviceLimit& limit) {
  const auto advice = [&]() -> std::string {
    if (run.config.model.num_experts > 0 &&
        run.config.experts.offload != config::ExpertOffload::full)
      return "Set experts.offload=full, with which experts wait in host memory";
    if (run.config.experts.device_cache) return "Lower experts.device_cache, or leave it out";
    return "Use a smaller train.micro_batch_size or data.sequence_length";
  };
  throw MemoryShortage(
      MemoryShortage::Where::device,
      plan.total(),
      fmt::format("{} {} bytes, and this model needs {} of device memory to run forward, whole on "
                  "every rank:\n{}{}{}.",
                  limit.key.empty() ? "the device has" : limit.key + " is",
                  limit.bytes,
                  plan.total(),
                  plan.table(),
                  advice(),
                  limit.key.empty() ? "" : fmt::format(", or raise {}", limit.key)));
}

// What is left of the device beside caches that fill it (see device_limit()) is there for all else.
bool fits_without_caches(const MemoryPlan& plan,
                         const DeviceLimit& limit,
                         const MemoryLimits& limits) {
  if (!limit.key.empty()) return plan.total() <= limit.bytes;
  return plan.total() - plan.runtime <= *limits.device_free;
}

TierLimits limits_of_tiers(const config::Config& config, const MemoryLimits& limits) {
  TierLimits tier = tier_limits(config);
  tier.is_vertical = false;  // one batch at a time
  tier.is_forward_only = true;
  if (limits.host && !config.memory.host_budget) {
    tier.host = *limits.host;
    tier.host_is_budget = false;
  }
  return tier;
}

}  // namespace

ForwardPlan plan_forward(const ForwardRun& run, const MemoryLimits& limits) {
  MOESAIC_CHECK(!run.windows.empty(), "a model for no window");
  const config::Config& config = run.config;
  ForwardPlan resident = dry_forward(run, std::nullopt).plan;
  const auto limit = device_limit(config, limits, resident.memory.runtime);
  const bool fits = !limit || fits_without_caches(resident.memory, *limit, limits);
  if (config.experts.offload != config::ExpertOffload::full) {
    if (!fits) refuse(run, resident.memory, *limit);
    return resident;
  }
  const auto& cache = config.experts.device_cache;
  const ExpertTierOptions unfilled = tier_options(run);
  const DryForward bare = dry_forward(run, unfilled);
  if (fits && (!cache || weight_bytes(bare.groups) <= static_cast<std::uint64_t>(*cache)))
    return resident;
  TierLimits tier = limits_of_tiers(config, limits);
  if (limit && !cache) {
    // What the rest takes does not depend on the caches.
    const std::uint64_t rest = bare.plan.memory.total();
    tier.device = limit->bytes - std::min<std::uint64_t>(limit->bytes, rest);
    tier.device_key = limit->key;
    tier.device_budget = limit->bytes;
    tier.device_rest = rest;
  }
  ExpertTierOptions filled = unfilled;
  fill_tiers(bare.groups, tier, filled);
  ForwardPlan plan = dry_forward(run, filled).plan;
  if (limit && plan.memory.total() > limit->bytes) refuse(run, plan.memory, *limit);
  if (limit && !cache) plan.memory.device_limit = limit->bytes;
  return plan;
}

std::vector<tiers::Visit> forward_visits(Model& model) {
  std::vector<tiers::Visit> visits;
  const auto layers = static_cast<std::int64_t>(model.options().layers.size());
  for (const auto& named : model.moe_layers()) {
    if (named.layer < layers)
      visits.push_back({static_cast<std::int32_t>(visits.size()), tiers::VisitKind::forward, 0});
  }
  return visits;
}

}  // namespace moesaic
