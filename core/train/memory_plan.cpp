#include "core/train/memory_plan.h"

#include <algorithm>

#include <fmt/format.h>

#include "comm/device_communicator.h"
#include "core/model/from_config.h"
#include "core/model/pipeline_plan.h"
#include "core/nn/losses.h"
#include "core/train/expert_copier.h"
#include "core/train/expert_move.h"
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

std::string MemoryPlan::table() const {
  std::vector<MemoryUse> lines = parts;
  if (communication > 0) lines.push_back({"communication", communication});
  if (runtime > 0) lines.push_back({"CUDA context and libraries (estimate)", runtime});
  std::stable_sort(
      lines.begin(), lines.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  const Unit unit = unit_for(total());
  std::string text;
  const auto line = [&](const std::string& tag, std::size_t bytes) {
    text += fmt::format(
        "  {:<40} {:>12.1f} {}\n", tag, static_cast<double>(bytes) / unit.bytes, unit.name);
  };
  for (const MemoryUse& use : lines)
    line(use.tag, use.bytes);
  line("sum", total());
  return text;
}

MemoryPlan plan_memory(const config::Config& config,
                       Device device,
                       const Precision& precision,
                       std::span<const data::DocumentBound> documents,
                       int ranks,
                       int rank) {
  const MeshPosition position(std::make_shared<MeshLayout>(mesh_config(config.parallel), ranks),
                              rank);
  const ModelOptions options = model_options(config);
  ParameterStore params(precision, position);
  Model model(params, options, stage_share(config, position));
  const std::vector<Phase> phases = make_phases(config);
  if (auto sharding = state_sharding(config, model)) params.shard_state(*sharding);
  params.seal_pretend(device, ever_trained(phases, params));
  ParameterStore whole(precision);
  if (position.extent(Axis::pp) > 1) {
    const Model declared(whole, options);
    whole.seal_pretend(device, ever_trained(phases, whole));
  }
  Optimizer optimizer(
      params, optimizer_options(config.optimizer), whole.sealed() ? &whole : nullptr);
  const StepMemory step = measure_run(config,
                                      phases,
                                      documents,
                                      model,
                                      params,
                                      &optimizer,
                                      device,
                                      recompute_policy(config.activations));
  const StepBuffers buffers = step_buffers(phases, model, params, position.extent(Axis::dp));

  MemoryPlan plan;
  plan.device = device;
  plan.ranks = ranks;
  plan.parts = params.memory_use();
  const auto state = optimizer.memory_use();
  plan.parts.insert(plan.parts.end(), state.begin(), state.end());
  plan.parts.push_back({"batches", buffers.batches});
  plan.parts.push_back({"balance margins", buffers.margins});
  plan.parts.push_back({"scratch", step.scratch});
  plan.parts.push_back({"exchange scratch", step.exchange});
  plan.parts.push_back({"transient", step.transient});
  plan.parts.push_back({"saved activations", step.slot});
  plan.parts.push_back(
      {"split backward", step.deferred * static_cast<std::size_t>(step.num_deferred)});
  plan.parts.push_back({"pipeline bundles", step.bundles});
  plan.parts.push_back({"losses", kNumLosses * 8});
  if (config.experts.place_every > 0)
    plan.parts.push_back({"experts on their way", ExpertMove::memory_bytes(params)});
  plan.parts.push_back({"gradients of expert replicas", ExpertCopier::memory_bytes(params)});
  plan.parts.erase(std::remove_if(plan.parts.begin(),
                                  plan.parts.end(),
                                  [](const MemoryUse& use) { return use.bytes == 0; }),
                   plan.parts.end());
  if (device.kind == Device::Kind::cuda) {
    plan.runtime = kCudaRuntimeBytes;
    plan.communication = device_communication_bytes(ranks);
  }
  return plan;
}

}  // namespace moesaic
