#include "apps/assembly.h"

#include <algorithm>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "apps/gpu_choice.h"
#include "core/base/activity.h"
#include "core/config/check.h"
#include "core/model/from_config.h"
#include "core/model/pipeline_plan.h"
#include "core/train/expert_exchange.h"
#include "core/train/memory_plan.h"
#include "core/train/optimizer_config.h"
#include "core/train/phases.h"
#include "core/train/token_groups.h"
#include "kernels/ops/op_list.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {

namespace {

// Why CUDA cannot be used at all; empty when it can.
std::string cuda_problem(Device device) {
  if (const std::string problem = cuda::device_problem(device); !problem.empty()) return problem;
  const auto missing = missing_cuda_ops();
  if (missing.empty()) return "";
  return fmt::format(
      "{} ops have no CUDA kernel: {}; use the CPU", missing.size(), fmt::join(missing, ", "));
}

// A device is the same for whoever sees it, under whatever number; by rank.
VisibleGpus visible_gpus(Communicator* host) {
  std::string mine;
  for (int i = 0; i < cuda::device_count(); ++i)
    mine += cuda::device_uuid({Device::Kind::cuda, static_cast<std::int16_t>(i)}) + "\n";
  VisibleGpus all;
  for (const std::string& text :
       host != nullptr ? host->all_gather_host(mine) : std::vector<std::string>{mine}) {
    auto& gpus = all.emplace_back();
    std::istringstream lines(text);
    for (std::string uuid; std::getline(lines, uuid);)
      gpus.push_back(uuid);
  }
  return all;
}

}  // namespace

Device device_from_name(const std::string& name) {
  if (name == "cpu") return kCpu;
  if (name != "cuda") throw UsageError(fmt::format("--device {}: allowed are cpu, cuda", name));
  const Device device{Device::Kind::cuda, 0};
  if (const std::string problem = cuda::device_problem(device); !problem.empty())
    throw UsageError("--device cuda: " + problem);
  cuda::select_device(device);
  return device;
}

namespace {

Device take_gpu(const VisibleGpus& visible, std::size_t rank, bool share, const GpuWords& words) {
  const GpuChoice choice = choose_gpus(visible, share);
  const Device device{Device::Kind::cuda,
                      static_cast<std::int16_t>(std::max(0, choice.numbers[rank]))};
  if (const std::string problem = cuda_problem(device); !problem.empty())
    throw UsageError(fmt::format("{}: {} ({})", words.gpu, problem, words.cpu));
  const bool all_have_one =
      std::none_of(choice.numbers.begin(), choice.numbers.end(), [](int n) { return n < 0; });
  if (!all_have_one)
    throw UsageError(words.gpu + ": " + gpu_choice_problem(visible, choice, words));
  cuda::select_device(device);
  return device;
}

std::size_t rank_of(Communicator* host) {
  return static_cast<std::size_t>(host != nullptr ? host->rank() : 0);
}

}  // namespace

Device gpu_of_rank(Communicator* host, bool share, const GpuWords& words) {
  return take_gpu(visible_gpus(host), rank_of(host), share, words);
}

Device resolve_device(const config::Config& config, Communicator* host) {
  using Choice = config::DeviceChoice;
  if (config.run.device == Choice::cpu) return kCpu;
  const VisibleGpus visible = visible_gpus(host);
  if (config.run.device == Choice::automatic) {
    if (num_different(visible) == 0) return kCpu;
    const std::size_t rank = rank_of(host);
    const int number = choose_gpus(visible, config.comm.share_gpu).numbers[rank];
    const Device device{Device::Kind::cuda, static_cast<std::int16_t>(std::max(0, number))};
    if (!visible[rank].empty() && !cuda_problem(device).empty()) return kCpu;
  }
  return take_gpu(visible, rank_of(host), config.comm.share_gpu, {});
}

DeviceCommOptions device_comm_options(const config::Config& config) {
  return {.reduction = config.comm.reduction == config::ReductionOrder::library
                           ? Reduction::library
                           : Reduction::ordered,
          .share_gpu = config.comm.share_gpu,
          .ranks_per_node = static_cast<int>(config.comm.ranks_per_node.value_or(0)),
          .activity = activity_of_thread()};
}

void check_trainable(const config::Config& config) {
  if (const auto problems = config::untrainable(config); !problems.empty()) {
    std::string text = "this configuration can be planned but not trained:";
    for (const auto& p : problems)
      text += fmt::format("\n  {}: {}", p.key, p.message);
    throw UsageError(text);
  }
}

namespace {

void refuse(const char* what, const std::vector<config::Finding>& findings) {
  if (findings.empty()) return;
  std::string text = what;
  for (const auto& f : findings)
    text += fmt::format("\n  {}: {}", f.keys.front(), f.message);
  throw UsageError(text);
}

void check_patterns(const config::Config& config, const ParameterStore& params, Model& model) {
  refuse("these phases cannot be trained:", phase_findings(params, config.train));
  const Phase phase = make_phases(config).front();
  const TokenGroups groups(params.position(), nullptr);
  const auto exchange =
      make_expert_exchange(config,
                           phase,
                           params.precision(),
                           params.position(),
                           static_cast<int>(config.comm.ranks_per_node.value_or(0)),
                           nullptr);
  Bounds bounds = groups.bounds(phase.piece_tokens(), phase.sequence_length, exchange.get());
  bounds.pieces = phase.pieces;
  refuse("nothing was started:", recompute_findings(model, config.activations, bounds));
  refuse("this pipeline cannot be made:", pipeline_findings(config));
}

ExpertTierOptions plan_tiers(const config::Config& config,
                             Device device,
                             const Precision& precision,
                             const MeshPosition& position) {
  MemoryLimits limits;
  if (device.kind == Device::Kind::cuda) limits.device_free = cuda::device_memory(device).free;
  const data::DocumentBound any(1);
  return plan_memory(config,
                     device,
                     precision,
                     {&any, 1},
                     position.world_size(),
                     position.world_rank(),
                     limits)
      .tiers.value();
}

}  // namespace

// The form of masters in training must not decide where a model can be used. Where it can be kept it is: split masters round to
// bf16 in their own way.
Precision forward_precision(const config::Config& config, bool on_gpu) {
  config::Config types = config;
  types.optimizer.master = config::MasterWeights::f32;
  const Precision precision = precision_of(types, on_gpu);
  return precision.compute == DType::bf16 ? precision_of(config, on_gpu) : precision;
}

Assembly assemble(const config::Config& config,
                  bool for_training,
                  Device device,
                  const MeshPosition& position,
                  std::optional<ExpertTierOptions> tiers) {
  check_trainable(config);
  Assembly a;
  a.device = device;
  const bool on_gpu = a.device.kind == Device::Kind::cuda;
  a.precision = for_training ? precision_of(config, on_gpu) : forward_precision(config, on_gpu);
  const ModelOptions options = model_options(config);
  // Patterns of names are about the whole model, of which a stage of a pipeline holds a part.
  ParameterStore whole(a.precision, position);
  if (for_training) {
    Model model(whole, options);
    check_patterns(config, whole, model);
  }
  a.params = std::make_unique<ParameterStore>(a.precision, position);
  // A forward pass alone goes through all layers at once, in whatever chunks or order they were trained.
  a.model = std::make_unique<Model>(
      *a.params, options, for_training ? stage_share(config, position) : StageShare{});
  std::vector<char> trained(a.params->params().size(), 0);
  if (for_training) {
    trained = ever_trained(make_phases(config), *a.params);
    if (auto sharding = state_sharding(config, *a.model)) a.params->shard_state(*sharding);
    if (config.experts.offload != config::ExpertOffload::none && !tiers)
      tiers = plan_tiers(config, a.device, a.precision, position);
  } else {
    a.params->keep_weights_alone();
  }
  if (tiers) a.params->offload_experts(std::move(*tiers));
  a.params->seal(a.device, trained);
  a.params->initialize(static_cast<std::uint64_t>(config.run.seed),
                       static_cast<int>(config.run.threads));
  if (!for_training) return a;
  const bool is_part = position.extent(Axis::pp) > 1;
  if (is_part) whole.seal_pretend(a.device, ever_trained(make_phases(config), whole));
  a.optimizer = std::make_unique<Optimizer>(
      *a.params, optimizer_options(config.optimizer), is_part ? &whole : nullptr);
  return a;
}

}  // namespace moesaic::apps
