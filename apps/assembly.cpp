#include "apps/assembly.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/config/check.h"
#include "core/data/joined_source.h"
#include "core/model/from_config.h"
#include "core/train/optimizer_config.h"
#include "kernels/ops/op_list.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {

Device resolve_device(const config::RunConfig& run) {
  const auto missing = missing_cuda_ops();
  if (run.device == config::DeviceChoice::cuda) {
    if (!missing.empty()) {
      throw UsageError(
          fmt::format("run.device: cuda cannot be used yet: {} ops have no CUDA kernel: {}. Use "
                      "run.device=cpu.",
                      missing.size(),
                      fmt::join(missing, ", ")));
    }
    if (cuda::device_count() == 0)
      throw UsageError(
          "run.device: cuda, but no CUDA device was found; use run.device=cpu, or check the driver "
          "with nvidia-smi");
    return {Device::Kind::cuda, 0};
  }
  const bool automatic_cuda =
      run.device == config::DeviceChoice::automatic && missing.empty() && cuda::device_count() > 0;
  return automatic_cuda ? Device{Device::Kind::cuda, 0} : kCpu;
}

std::shared_ptr<const data::TokenSource> open_tokens(const std::vector<std::string>& paths,
                                                     const config::Config& config) {
  std::vector<std::shared_ptr<const data::TokenSource>> sources;
  for (const auto& path : paths)
    sources.push_back(data::open_text(path, config.model.vocab_size));
  return data::join_sources(std::move(sources));
}

Assembly assemble(const config::Config& config, bool for_training) {
  if (const auto problems = config::untrainable(config); !problems.empty()) {
    std::string text = "this configuration can be planned but not trained:";
    for (const auto& p : problems)
      text += fmt::format("\n  {}: {}", p.key, p.message);
    throw UsageError(text);
  }
  Assembly a;
  a.device = resolve_device(config.run);
  a.precision = precision_of(config.run, a.device.kind == Device::Kind::cuda);
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
