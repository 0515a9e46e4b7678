#include "core/train/sinks/tensorboard.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/train/sinks/heat_map.h"

namespace moesaic {
namespace {

// What a step says of all experts of the model.
void add_experts(EventSummary& s, const StepRecord& record) {
  if (record.experts.empty()) return;
  double worst = 0, worst_rank = 0;
  std::int64_t dead = 0;
  std::optional<std::int64_t> passes;
  for (const auto& e : record.experts) {
    worst = std::isnan(e.max_over_mean) ? e.max_over_mean : std::max(worst, e.max_over_mean);
    worst_rank = std::max(worst_rank, e.rank_max_over_mean.value_or(0));
    dead += e.dead_experts;
    if (e.further_passes) passes = passes.value_or(0) + *e.further_passes;
  }
  s.scalar("moe/max_over_mean", worst);
  if (worst_rank > 0) s.scalar("moe/rank_max_over_mean", worst_rank);
  s.scalar("moe/dead_experts", static_cast<double>(dead));
  if (passes) s.scalar("moe/further_passes", static_cast<double>(*passes));
}

void add_layers(EventSummary& s, const StepRecord& record) {
  for (const auto& e : record.experts) {
    if (e.tokens.empty()) continue;
    const std::string layer = fmt::format("moe/L{:02}/", e.layer);
    s.scalar(layer + "load_max", e.max_over_mean);
    if (e.rank_max_over_mean) s.scalar(layer + "rank_load_max", *e.rank_max_over_mean);
    s.scalar(layer + "dead", static_cast<double>(e.dead_experts));
    s.scalar(layer + "entropy", e.entropy);
    if (e.bias_min) s.scalar(layer + "bias_min", *e.bias_min);
    if (e.bias_max) s.scalar(layer + "bias_max", *e.bias_max);
    s.histogram(layer + "tokens", e.tokens);
  }
  for (const auto& e : record.exchange) {
    const std::string layer = fmt::format("moe/L{:02}/", e.layer);
    for (const auto way : {&LayerExchange::dispatch, &LayerExchange::combine}) {
      const std::string tag = layer + (way == &LayerExchange::dispatch ? "dispatch_" : "combine_");
      s.scalar(tag + "seconds", (e.*way).seconds);
      s.scalar(tag + "exposed_seconds", (e.*way).exposed);
      s.scalar(tag + "megabytes", static_cast<double>((e.*way).bytes) / 1e6);
    }
  }
  const Image map = expert_heat_map(record.experts);
  if (!map.png.empty()) s.image("moe/load", map.width, map.height, map.png);
}

void add_tiers(EventSummary& s, const StepRecord& record) {
  if (record.tiers.empty()) return;
  TierTraffic sum;
  for (const auto& [kind, traffic] : record.tiers) {
    s.scalar("offload/hit_ratio_" + kind, traffic.hit_ratio());
    sum += traffic;
  }
  s.scalar("offload/up_megabytes", static_cast<double>(sum.bytes_up) / 1e6);
  s.scalar("offload/down_megabytes", static_cast<double>(sum.bytes_down) / 1e6);
  s.scalar("offload/file_read_megabytes", static_cast<double>(sum.file_read) / 1e6);
  s.scalar("offload/file_written_megabytes", static_cast<double>(sum.file_written) / 1e6);
  s.scalar("offload/host_wait_seconds", sum.host_wait_seconds);
  if (record.replays) {
    s.scalar("offload/replays", static_cast<double>(record.replays->members));
    s.scalar("offload/steps_replayed", static_cast<double>(record.replays->steps));
  }
  for (const auto& l : record.tier_layers) {
    const std::string layer = fmt::format("offload/L{:02}/", l.layer);
    s.scalar(layer + "hit_ratio", l.traffic.hit_ratio());
    s.scalar(layer + "up_megabytes", static_cast<double>(l.traffic.bytes_up) / 1e6);
    s.scalar(layer + "host_wait_seconds", l.traffic.host_wait_seconds);
  }
}

}  // namespace

TensorBoard::TensorBoard(const std::filesystem::path& folder) : file_(folder) {}

void TensorBoard::on_header(const RunHeader& header) {
  file_.session_start(header.start_step + 1);
  EventSummary s;
  s.text("config", "```yaml\n" + header.config + "\n```");
  file_.write(header.start_step + 1, s);
}

void TensorBoard::on_step(const StepRecord& r) {
  EventSummary s;
  const auto put = [&](const char* tag, const auto& value) {
    if (value) s.scalar(tag, static_cast<double>(*value));
  };
  s.scalar("train/loss", r.loss);
  for (const auto& [name, value] : r.loss_parts)
    s.scalar("train/loss_" + name, value);
  put("train/grad_norm", r.grad_norm);
  s.scalar("train/lr", r.learning_rate);
  s.scalar("train/skipped", r.skipped ? 1 : 0);
  put("train/total_tokens", r.total_tokens);
  s.scalar("perf/step_seconds", r.seconds);
  for (std::size_t i = 0; r.parts && i < kStepParts; ++i)
    s.scalar(fmt::format("perf/seconds_{}", name(static_cast<StepPart>(i))), r.parts->of[i]);
  put("perf/tokens_per_second", r.tokens_per_second());
  put("perf/tflops_per_device", r.tflops_per_device);
  put("perf/mfu", r.mfu);
  put("perf/device_memory_bytes", r.memory_bytes);
  put("perf/host_memory_bytes", r.host_bytes);
  add_experts(s, r);
  add_layers(s, r);
  add_tiers(s, r);
  file_.write(r.step, s);
}

void TensorBoard::on_event(const RunEvent& event) {
  EventSummary s;
  for (const auto& [name, value] : event.values)
    s.scalar(event.type + "/" + name, value);
  if (!s.empty()) file_.write(event.step, s);
}

void TensorBoard::on_end(const RunEnd&) {
  file_.finish();
}

}  // namespace moesaic
