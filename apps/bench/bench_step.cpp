#include <algorithm>
#include <memory>
#include <ostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/assembly.h"
#include "apps/bench/bench.h"
#include "apps/bench/ceilings.h"
#include "apps/bench/op_profile.h"
#include "apps/bench/random_tokens.h"
#include "apps/bench/timing.h"
#include "apps/path_log.h"
#include "apps/planned_memory.h"
#include "core/model/from_config.h"
#include "core/model/plan.h"
#include "core/train/memory_plan.h"
#include "memory/device_hooks.h"

namespace moesaic::bench {
namespace {

constexpr int kWarmUpSteps = 2;

struct Result {
  std::int64_t steps = 0, tokens = 0;  // tokens of a step
  double step_seconds = 0;             // median
  double processor_seconds = 0;        // of a step, median
  double training_flops = 0;           // per token
  Device device;
  double sgemm_rate = 0;  // CPU
  Ceilings ceilings;      // GPU
  std::vector<MemoryUse> memory;
  std::size_t device_bytes = 0;                      // GPU: in use on the device
  std::size_t planned_bytes = 0, counted_bytes = 0;  // PlannedMemory
  std::string memory_line;
  double profiled_seconds =
      0;  // one step with every op timed: processor time, or the step's own on a GPU
  std::vector<OpProfile::Entry> ops;
  apps::PathLog paths;

  double tokens_per_second() const { return static_cast<double>(tokens) / step_seconds; }
  double rate() const { return training_flops * tokens_per_second(); }
  double processor_rate() const {
    return training_flops * static_cast<double>(tokens) / processor_seconds;
  }
};

// As a training run plans itself.
MemoryPlan plan_of(const config::Config& config, Device device, const RandomTokens& tokens) {
  apps::check_trainable(config);
  const bool on_gpu = device.kind == Device::Kind::cuda;
  MemoryLimits limits;
  if (on_gpu) limits.device_free = cuda::device_memory(device).free;
  const data::DocumentBound documents(tokens);
  return plan_memory(config, device, precision_of(config, on_gpu), {&documents, 1}, 1, 0, limits);
}

Result measure(const config::Config& config, const StepOptions& options) {
  const Device device = apps::resolve_device(config);
  const bool on_gpu = device.kind == Device::Kind::cuda;
  const std::int64_t length = config.data.sequence_length;
  const auto tokens = std::make_shared<RandomTokens>(
      4 * config.train.global_batch_size, length, config.model.vocab_size);
  apps::PlannedMemory use(device);
  const MemoryPlan plan = plan_of(config, device, *tokens);
  apps::Assembly assembly = apps::assemble(config, true, device, {}, plan.tiers);
  Trainer trainer(
      Trainer::Parts{.config = &config,
                     .params = assembly.params.get(),
                     .model = assembly.model.get(),
                     .optimizer = assembly.optimizer.get(),
                     .train = tokens,
                     .device = assembly.device,
                     .recompute = recompute_policy(config.activations),
                     .path = options.separate ? KernelPath::separate : KernelPath::automatic});
  Result result;
  result.steps = options.steps;
  result.device = assembly.device;
  if (!on_gpu) result.sgemm_rate = library_sgemm_rate();
  for (int i = 0; i < kWarmUpSteps; ++i)
    result.tokens = trainer.step().tokens;
  std::vector<double> times, processor_times;
  for (int i = 0; i < options.steps; ++i) {
    const double start = processor_seconds_now();
    times.push_back(trainer.step().seconds);
    processor_times.push_back(processor_seconds_now() - start);
    use.look();
  }
  result.planned_bytes = use.planned(plan);
  result.counted_bytes = use.counted();
  result.memory_line = use.line(plan);
  result.step_seconds = median(times);
  result.processor_seconds = median(processor_times);
  OpProfile profile(trainer.stream());
  trainer.observe(&profile);
  trainer.observe_paths(&result.paths);
  const double start = processor_seconds_now();
  double seconds = 0;
  for (int i = 0; i < options.steps; ++i) {
    seconds += trainer.step().seconds;
    profile.collect();
  }
  result.profiled_seconds = (on_gpu ? seconds : processor_seconds_now() - start) / options.steps;
  trainer.observe(nullptr);
  trainer.observe_paths(nullptr);
  if (on_gpu) {
    const auto memory = cuda::device_memory(assembly.device);
    result.device_bytes = memory.total - memory.free;
    result.memory = memory_in_use();
    result.ceilings = measure_ceilings(assembly.device);
  }
  result.ops = profile.sorted();
  for (auto& op : result.ops) {
    op.seconds /= options.steps;
    op.cost.flops /= options.steps;
    op.cost.bytes /= options.steps;
    op.calls /= options.steps;
  }
  result.training_flops = static_cast<double>(make_plan(config).training_flops);
  return result;
}

void print_speed(const Result& r, std::ostream& out) {
  const bool on_gpu = r.device.kind == Device::Kind::cuda;
  out << fmt::format("one process, {} tokens per step, median of {} steps\n", r.tokens, r.steps);
  out << fmt::format("memory           {}\n", r.memory_line);
  if (on_gpu) {
    out << fmt::format("device           {}, {:.2f} GiB in use\n",
                       cuda::device_name(r.device),
                       static_cast<double>(r.device_bytes) / (1 << 30));
    for (const MemoryUse& use : r.memory) {
      if (use.bytes >= std::size_t{1} << 24)
        out << fmt::format(
            "  {:<34}{:>9.2f} GiB\n", use.tag, static_cast<double>(use.bytes) / (1 << 30));
    }
    out << fmt::format("step             {}\n", time_text(r.step_seconds));
  } else {
    out << fmt::format("step             {} (processor time {})\n",
                       time_text(r.step_seconds),
                       time_text(r.processor_seconds));
  }
  out << fmt::format("rate             {:.0f} tokens/s\n", r.tokens_per_second());
  out << fmt::format(
      "model operations {:.2f} MFLOP per token in training, as `moesaic plan` counts\n",
      r.training_flops / 1e6);
  if (on_gpu) {
    out << fmt::format("                 {:.1f} TFLOP/s\n", r.rate() / 1e12);
    out << fmt::format(
        "ceilings         bf16 product {:.0f} TFLOP/s (8192^3), copy {:.2f} TB/s (2 GiB, read + "
        "written)\n",
        r.ceilings.flops_per_second / 1e12,
        r.ceilings.bytes_per_second / 1e12);
    out << fmt::format(
        "MFU              {:.1f} % = model operations x tokens/s over the product's rate\n\n",
        100 * r.rate() / r.ceilings.flops_per_second);
    return;
  }
  out << fmt::format("                 {:.2f} GFLOP/s, {:.2f} GFLOP per second of processor time\n",
                     r.rate() / 1e9,
                     r.processor_rate() / 1e9);
  out << fmt::format(
      "library sgemm    {:.2f} GFLOP per second of processor time (1024^3, one thread)\n",
      r.sgemm_rate / 1e9);
  out << fmt::format("share of sgemm   {:.1f} %\n\n", 100 * r.processor_rate() / r.sgemm_rate);
}

void print_text(const Result& r, std::ostream& out) {
  const bool on_gpu = r.device.kind == Device::Kind::cuda;
  print_speed(r, out);
  out << fmt::format("{:<32}{:>7}{:>12}{:>8}{:>10}{:>10}  {}\n",
                     on_gpu ? "op, device time per step" : "op, processor time per step",
                     "calls",
                     "time",
                     "share",
                     on_gpu ? "TFLOP/s" : "GFLOP/s",
                     "GB/s",
                     on_gpu ? "path" : "");
  double sum = 0;
  for (const auto& op : r.ops) {
    sum += op.seconds;
    out << fmt::format("{:<32}{:>7}{:>12}{:>7.1f}%{:>10.2f}{:>10.2f}  {}\n",
                       op.op,
                       op.calls,
                       time_text(op.seconds),
                       100 * op.seconds / r.profiled_seconds,
                       op.cost.flops / op.seconds / (on_gpu ? 1e12 : 1e9),
                       op.cost.bytes / op.seconds / 1e9,
                       r.paths.of(op.op));
  }
  const double rest = r.profiled_seconds - sum;
  out << fmt::format("{:<32}{:>7}{:>12}{:>7.1f}%\n",
                     on_gpu ? "copies, zeroing, idle" : "copies, zeroing, host",
                     "",
                     time_text(rest),
                     100 * rest / r.profiled_seconds);
}

void print_json(const Result& r, std::ostream& out) {
  nlohmann::ordered_json json;
  json["tokens_per_step"] = r.tokens;
  json["steps"] = r.steps;
  json["step_seconds"] = r.step_seconds;
  json["tokens_per_second"] = r.tokens_per_second();
  json["training_flops_per_token"] = r.training_flops;
  json["flops_per_second"] = r.rate();
  json["device"] = to_string(r.device);
  json["planned_bytes"] = r.planned_bytes;
  json["counted_bytes"] = r.counted_bytes;
  if (r.device.kind == Device::Kind::cuda) {
    json["device_name"] = cuda::device_name(r.device);
    json["device_bytes"] = r.device_bytes;
    json["product_flops_per_second"] = r.ceilings.flops_per_second;
    json["copy_bytes_per_second"] = r.ceilings.bytes_per_second;
    json["mfu"] = r.rate() / r.ceilings.flops_per_second;
    json["profiled_seconds"] = r.profiled_seconds;
  } else {
    json["library_sgemm_flops_per_second"] = r.sgemm_rate;
    json["step_processor_seconds"] = r.processor_seconds;
    json["flops_per_processor_second"] = r.processor_rate();
    json["share_of_sgemm"] = r.processor_rate() / r.sgemm_rate;
    json["profiled_processor_seconds"] = r.profiled_seconds;
  }
  for (const auto& op : r.ops) {
    json["ops"].push_back({{"op", op.op},
                           {"calls", op.calls},
                           {"seconds", op.seconds},
                           {"flops", op.cost.flops},
                           {"bytes", op.cost.bytes},
                           {"path", r.paths.of(op.op)}});
  }
  out << json.dump(2) << "\n";
}

}  // namespace

int bench_step(const config::LoadedConfig& loaded, const StepOptions& options, std::ostream& out) {
  const std::int64_t needed = kWarmUpSteps + 2 * options.steps;
  if (loaded.config.train.steps < needed) {
    throw UsageError(fmt::format("train.steps is {}, but {} are needed for --steps {}",
                                 loaded.config.train.steps,
                                 needed,
                                 options.steps));
  }
  const Result result = measure(loaded.config, options);
  options.json ? print_json(result, out) : print_text(result, out);
  return 0;
}

}  // namespace moesaic::bench
