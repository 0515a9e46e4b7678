#include "core/train/sinks/prometheus.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "core/base/durable_file.h"
#include "core/base/error.h"

namespace moesaic {
namespace {

struct Metric {
  std::string_view name, type, help;
};

// Everything that a file may hold; docs/monitoring.md lists the same.
constexpr Metric kMetrics[] = {
    {"moesaic_run_info", "gauge", "1; version, device and precision are labels."},
    {"moesaic_running", "gauge", "1 while the run lives, 0 after its end."},
    {"moesaic_exit_code", "gauge", "Exit code of the run that ended."},
    {"moesaic_ranks", "gauge", "Ranks of the run."},
    {"moesaic_start_timestamp_seconds", "gauge", "Unix time at which this life of the run began."},
    {"moesaic_step", "gauge", "Last step that was done."},
    {"moesaic_target_steps", "gauge", "Steps of the whole run."},
    {"moesaic_last_step_timestamp_seconds", "gauge", "Unix time at which the last step ended."},
    {"moesaic_step_duration_seconds", "gauge", "Wall time of the last step."},
    {"moesaic_step_part_seconds", "gauge", "Time of the last step on rank 0, by part."},
    {"moesaic_tokens_total", "counter", "Tokens consumed since the first step of the run."},
    {"moesaic_tokens_per_second", "gauge", "Tokens of the last step over its wall time."},
    {"moesaic_flops_per_second", "gauge", "Model FLOPs of the last step over time and devices."},
    {"moesaic_flops_utilization_ratio",
     "gauge",
     "The same over the peak of the run's header (MFU)."},
    {"moesaic_loss", "gauge", "Cross-entropy of the last step, nats per token."},
    {"moesaic_loss_part", "gauge", "A further term of the loss, by part."},
    {"moesaic_grad_norm", "gauge", "Gradient norm of the last step, before clipping."},
    {"moesaic_learning_rate", "gauge", "Learning rate of the last step."},
    {"moesaic_skipped_steps_total", "counter", "Steps of this life that were not finite."},
    {"moesaic_device_memory_bytes", "gauge", "Device memory in use on the rank with most."},
    {"moesaic_host_memory_bytes", "gauge", "Resident memory of the process with most."},
    {"moesaic_expert_load_max_ratio", "gauge", "Busiest expert over the mean, worst layer."},
    {"moesaic_expert_rank_load_max_ratio",
     "gauge",
     "Busiest rank of the experts over the mean, worst layer (parallel.ep above 1)."},
    {"moesaic_expert_entropy_ratio", "gauge", "Entropy of the load over its largest, worst layer."},
    {"moesaic_dead_experts", "gauge", "Experts without a token in the last step, all layers."},
    {"moesaic_further_passes", "gauge", "Passes of the exchange beyond the first, all layers."},
    {"moesaic_exchange_seconds",
     "gauge",
     "Time of exchanges in the last step with details, by way."},
    {"moesaic_exchange_exposed_seconds", "gauge", "The part that experts waited for, by way."},
    {"moesaic_exchange_bytes", "gauge", "Bytes that rank 0 sent to other ranks, by way."},
    {"moesaic_offload_hit_ratio",
     "gauge",
     "Uses of blocks that found them on the device, by kind."},
    {"moesaic_offload_bytes",
     "gauge",
     "Bytes that rank 0 moved for offloaded experts in the last step, by way."},
    {"moesaic_offload_host_wait_seconds",
     "gauge",
     "Time in which rank 0's host waited for them in the last step."},
    {"moesaic_offload_replays",
     "gauge",
     "Matrices of experts that rank 0 brought up to date in the last step."},
    {"moesaic_offload_steps_replayed", "gauge", "Updates that they were given then."},
    {"moesaic_eval_loss", "gauge", "Loss on held-out text, nats per token."},
    {"moesaic_eval_step", "gauge", "Step of that evaluation."},
    {"moesaic_data_ratio", "gauge", "Realised share of a source of the blend."},
    {"moesaic_checkpoint_step", "gauge", "Step of the newest checkpoint of this life."},
    {"moesaic_checkpoint_interval_steps", "gauge", "Steps between checkpoints; 0 = none."},
    {"moesaic_checkpoint_timestamp_seconds", "gauge", "Unix time of the newest checkpoint."},
    {"moesaic_checkpoint_bytes", "gauge", "Size of the newest checkpoint."},
    {"moesaic_disk_free_bytes", "gauge", "Free space where checkpoints are written."},
};

std::string escaped(std::string_view value) {
  std::string text;
  for (const char c : value) {
    if (c == '\\' || c == '"') text += '\\';
    if (c == '\n')
      text += "\\n";
    else
      text += c;
  }
  return text;
}

std::string label(std::string_view name, std::string_view value) {
  return fmt::format("{}=\"{}\"", name, escaped(value));
}

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  return fmt::format("{}", value);
}

}  // namespace

std::filesystem::path prometheus_path(const std::string& setting,
                                      const std::filesystem::path& run_dir) {
  if (setting.empty() || setting == "false") return {};
  if (setting == "true") return run_dir / "metrics.prom";
  const std::filesystem::path path(setting);
  if (path.extension() == ".prom") return path;
  const auto name = run_dir.lexically_normal().filename().string();
  return path / ("moesaic_" + (name.empty() ? "run" : name) + ".prom");
}

PrometheusFile::PrometheusFile(const Options& options) : options_(options) {
  const auto folder = std::filesystem::absolute(options_.path).parent_path();
  if (!std::filesystem::is_directory(folder))
    throw ResourceError(fmt::format("log.prometheus: {} is not a folder", folder.string()));
}

void PrometheusFile::set(const char* name, double value, const std::string& labels) {
  values_[name][labels] = value;
}

void PrometheusFile::on_header(const RunHeader& header) {
  std::string labels = label("version", header.version);
  for (const char* name : {"device", "precision"}) {
    if (const auto it = header.texts.find(name); it != header.texts.end())
      labels += "," + label(name, it->second);
  }
  set("moesaic_run_info", 1, labels);
  set("moesaic_running", 1);
  set("moesaic_ranks", header.ranks);
  set("moesaic_step", static_cast<double>(header.start_step));
  set("moesaic_start_timestamp_seconds", unix_time());
  set("moesaic_skipped_steps_total", 0);
  set("moesaic_checkpoint_interval_steps", static_cast<double>(options_.checkpoint_every));
  write();
}

void PrometheusFile::set_experts(const StepRecord& record) {
  if (record.experts.empty()) return;
  double worst = 0, worst_rank = 0, entropy = 1;
  std::int64_t dead = 0;
  std::optional<std::int64_t> passes;
  for (const auto& e : record.experts) {
    worst = std::max(worst, e.max_over_mean);
    worst_rank = std::max(worst_rank, e.rank_max_over_mean.value_or(0));
    entropy = std::min(entropy, e.entropy);
    dead += e.dead_experts;
    if (e.further_passes) passes = passes.value_or(0) + *e.further_passes;
  }
  set("moesaic_expert_load_max_ratio", worst);
  if (worst_rank > 0) set("moesaic_expert_rank_load_max_ratio", worst_rank);
  set("moesaic_expert_entropy_ratio", entropy);
  set("moesaic_dead_experts", static_cast<double>(dead));
  if (passes) set("moesaic_further_passes", static_cast<double>(*passes));
}

void PrometheusFile::set_exchange(const StepRecord& record) {
  if (record.exchange.empty()) return;
  for (const auto way : {&LayerExchange::dispatch, &LayerExchange::combine}) {
    LayerExchange::Way sum;
    for (const auto& e : record.exchange) {
      sum.seconds += (e.*way).seconds;
      sum.exposed += (e.*way).exposed;
      sum.bytes += (e.*way).bytes;
    }
    const std::string labels =
        label("way", way == &LayerExchange::dispatch ? "dispatch" : "combine");
    set("moesaic_exchange_seconds", sum.seconds, labels);
    set("moesaic_exchange_exposed_seconds", sum.exposed, labels);
    set("moesaic_exchange_bytes", static_cast<double>(sum.bytes), labels);
  }
}

void PrometheusFile::set_tiers(const StepRecord& record) {
  if (record.tiers.empty()) return;
  TierTraffic sum;
  for (const auto& [kind, traffic] : record.tiers) {
    set("moesaic_offload_hit_ratio", traffic.hit_ratio(), label("kind", kind));
    sum += traffic;
  }
  const std::pair<const char*, std::int64_t> ways[] = {{"up", sum.bytes_up},
                                                       {"down", sum.bytes_down},
                                                       {"file_read", sum.file_read},
                                                       {"file_written", sum.file_written}};
  for (const auto& [way, bytes] : ways)
    set("moesaic_offload_bytes", static_cast<double>(bytes), label("way", way));
  set("moesaic_offload_host_wait_seconds", sum.host_wait_seconds);
  if (!record.replays) return;
  set("moesaic_offload_replays", static_cast<double>(record.replays->members));
  set("moesaic_offload_steps_replayed", static_cast<double>(record.replays->steps));
}

void PrometheusFile::on_step(const StepRecord& r) {
  const auto put = [&](const char* name, const auto& value, double scale = 1) {
    if (value) set(name, static_cast<double>(*value) * scale);
  };
  set("moesaic_step", static_cast<double>(r.step));
  set("moesaic_target_steps", static_cast<double>(r.steps));
  set("moesaic_last_step_timestamp_seconds", r.time);
  set("moesaic_step_duration_seconds", r.seconds);
  for (std::size_t i = 0; r.parts && i < kStepParts; ++i) {
    const char* part = name(static_cast<StepPart>(i));
    set("moesaic_step_part_seconds", r.parts->of[i], label("part", part));
  }
  put("moesaic_tokens_total", r.total_tokens);
  put("moesaic_tokens_per_second", r.tokens_per_second());
  put("moesaic_flops_per_second", r.tflops_per_device, 1e12);
  put("moesaic_flops_utilization_ratio", r.mfu);
  set("moesaic_loss", r.loss);
  for (const auto& [part, value] : r.loss_parts)
    set("moesaic_loss_part", value, label("part", part));
  put("moesaic_grad_norm", r.grad_norm);
  set("moesaic_learning_rate", r.learning_rate);
  skipped_ += r.skipped ? 1 : 0;
  set("moesaic_skipped_steps_total", static_cast<double>(skipped_));
  put("moesaic_device_memory_bytes", r.memory_bytes);
  put("moesaic_host_memory_bytes", r.host_bytes);
  set_experts(r);
  set_exchange(r);
  set_tiers(r);
  if (std::chrono::steady_clock::now() - written_ >= options_.interval) write();
}

void PrometheusFile::on_event(const RunEvent& event) {
  const auto value = [&](const char* key, const char* name) {
    if (const auto it = event.values.find(key); it != event.values.end()) set(name, it->second);
  };
  if (event.type == "eval") {
    value("loss", "moesaic_eval_loss");
    set("moesaic_eval_step", static_cast<double>(event.step));
  } else if (event.type == "save") {
    set("moesaic_checkpoint_step", static_cast<double>(event.step));
    set("moesaic_checkpoint_timestamp_seconds", unix_time());
    value("bytes", "moesaic_checkpoint_bytes");
  } else if (event.type == "resume") {
    set("moesaic_checkpoint_step", static_cast<double>(event.step));
  } else if (event.type == "data") {
    for (const auto& [source, share] : event.values)
      set("moesaic_data_ratio", share, label("source", source));
  }
  write();
}

void PrometheusFile::on_end(const RunEnd& end) {
  set("moesaic_running", 0);
  set("moesaic_exit_code", end.exit_code);
  write();
}

std::string PrometheusFile::text() const {
  std::string all;
  const std::string run = label("run", options_.run);
  for (const Metric& metric : kMetrics) {
    const auto family = values_.find(std::string(metric.name));
    if (family == values_.end()) continue;
    all += fmt::format(
        "# HELP {} {}\n# TYPE {} {}\n", metric.name, metric.help, metric.name, metric.type);
    for (const auto& [labels, value] : family->second)
      all += fmt::format(
          "{}{{{}{}{}}} {}\n", metric.name, run, labels.empty() ? "" : ",", labels, number(value));
  }
  return all;
}

void PrometheusFile::write() {
  written_ = std::chrono::steady_clock::now();
  std::error_code error;
  const auto space = std::filesystem::space(options_.disk, error);
  if (!error) set("moesaic_disk_free_bytes", static_cast<double>(space.available));
  // The collector reads what ends in .prom, not what lies beside it for a moment.
  try {
    replace_file(options_.path, text(), Sync::no);
  } catch (const ResourceError& e) {
    if (std::exchange(warned_, true) || !options_.warn) return;
    options_.warn(fmt::format("log.prometheus: {}", e.what()));
  }
}

}  // namespace moesaic
