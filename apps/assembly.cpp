#include "apps/assembly.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/base/activity.h"
#include "core/config/check.h"
#include "core/model/from_config.h"
#include "core/train/optimizer_config.h"
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

Device resolve_device(const config::Config& config, int local_rank, int local_size) {
  using Choice = config::DeviceChoice;
  if (config.run.device == Choice::cpu) return kCpu;
  const int devices = cuda::device_count();
  if (config.run.device == Choice::automatic && devices == 0) return kCpu;
  const int ordinal = devices > 0 ? local_rank % devices : 0;
  const Device device{Device::Kind::cuda, static_cast<std::int16_t>(ordinal)};
  if (const std::string problem = cuda_problem(device); !problem.empty()) {
    if (config.run.device == Choice::automatic) return kCpu;
    throw UsageError("run.device: cuda: " + problem + " (run.device=cpu)");
  }
  if (local_size > devices && !config.comm.share_gpu) {
    throw UsageError(fmt::format(
        "{} ranks were started on this machine, which has {} GPU(s): start one rank per GPU, use "
        "run.device=cpu, or set comm.share_gpu=true to let ranks take turns on a GPU (slow, for "
        "tests)",
        local_size,
        devices));
  }
  cuda::select_device(device);
  return device;
}

DeviceCommOptions device_comm_options(const config::Config& config) {
  return {.reduction = config.comm.reduction == config::ReductionOrder::library
                           ? Reduction::library
                           : Reduction::ordered,
          .share_gpu = config.comm.share_gpu,
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

Assembly assemble(const config::Config& config, bool for_training, Device device) {
  check_trainable(config);
  Assembly a;
  a.device = device;
  config::Config types = config;
  // Nothing updates masters then, and their form in training must not decide where a model can be used.
  if (!for_training) types.optimizer.master = config::MasterWeights::f32;
  a.precision = precision_of(types, a.device.kind == Device::Kind::cuda);
  a.params = std::make_unique<ParameterStore>(a.precision);
  a.model = std::make_unique<Model>(*a.params, model_options(config.model, config.train));
  if (for_training) {
    std::string text;
    for (const auto& f : phase_findings(*a.params, config.train))
      text += fmt::format("\n  {}: {}", f.keys.front(), f.message);
    if (!text.empty()) throw UsageError("these phases cannot be trained:" + text);
    for (const auto& f : recompute_findings(*a.model, config.activations))
      text += fmt::format("\n  {}: {}", f.keys.front(), f.message);
    if (!text.empty()) throw UsageError("nothing was started:" + text);
  }
  std::vector<char> trained(a.params->params().size(), 0);
  if (for_training) trained = ever_trained(make_phases(config), *a.params);
  a.params->seal(a.device, trained);
  a.params->initialize(static_cast<std::uint64_t>(config.run.seed),
                       static_cast<int>(config.run.threads));
  if (for_training)
    a.optimizer = std::make_unique<Optimizer>(*a.params, optimizer_options(config.optimizer));
  return a;
}

}  // namespace moesaic::apps
