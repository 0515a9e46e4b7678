#include "core/train/sinks/step_line.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic {
namespace {

constexpr std::size_t kRecentSteps = 100;

// Digits after the point as long as the number is short, else an exponent: the line keeps its
// width.
std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  return std::abs(value) < 1e5 ? fmt::format("{:.{}f}", value, digits)
                               : fmt::format("{:.3e}", value);
}

std::string step_time(double seconds) {
  return seconds < 0.1 ? fmt::format("{:.1f} ms", seconds * 1e3) : fmt::format("{:.2f} s", seconds);
}

std::string expert_fields(const std::vector<ExpertLoad>& experts) {
  if (experts.empty()) return {};
  double worst = 0, worst_rank = 0;
  std::int64_t dead = 0;
  for (const auto& e : experts) {
    worst = std::isnan(e.max_over_mean) ? e.max_over_mean : std::max(worst, e.max_over_mean);
    worst_rank = std::max(worst_rank, e.rank_max_over_mean.value_or(0));
    dead += e.dead_experts;
  }
  return fmt::format(" | moe max/mean {}", fixed(worst, 2)) +
         (worst_rank > 0 ? fmt::format(" ranks {}", fixed(worst_rank, 2)) : "") +
         (dead > 0 ? fmt::format(" dead {}", dead) : "");
}

std::string gib(std::int64_t bytes) {
  return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / 1073741824.0);
}

// Bytes of a step, which a small model counts in MiB.
std::string moved(std::int64_t bytes) {
  constexpr std::int64_t kGiB = std::int64_t{1} << 30;
  return bytes < kGiB ? fmt::format("{:.2f} MiB", static_cast<double>(bytes) / 1048576.0)
                      : gib(bytes);
}

// Extremes over the layers, each with the layer where it is.
std::string expert_details(const std::vector<ExpertLoad>& experts) {
  const ExpertLoad *busiest = nullptr, *narrowest = nullptr, *low = nullptr, *high = nullptr;
  std::int64_t dead = 0, dead_layers = 0, passes = 0;
  for (const auto& e : experts) {
    if (busiest == nullptr || e.max_over_mean > busiest->max_over_mean) busiest = &e;
    if (narrowest == nullptr || e.entropy < narrowest->entropy) narrowest = &e;
    if (e.bias_min && (low == nullptr || *e.bias_min < *low->bias_min)) low = &e;
    if (e.bias_max && (high == nullptr || *e.bias_max > *high->bias_max)) high = &e;
    dead += e.dead_experts;
    dead_layers += e.dead_experts > 0 ? 1 : 0;
    passes += e.further_passes.value_or(0);
  }
  std::string text = fmt::format("moe {} layer(s) | max/mean {:.2f} in layer {} | dead {}",
                                 experts.size(),
                                 busiest->max_over_mean,
                                 busiest->layer,
                                 dead);
  if (dead > 0) text += fmt::format(" in {} layer(s)", dead_layers);
  if (passes > 0) text += fmt::format(" | {} further pass(es)", passes);
  text += fmt::format(" | least entropy {:.3f} in layer {}", narrowest->entropy, narrowest->layer);
  if (low != nullptr && high != nullptr)
    text += fmt::format(" | router bias {:.4f} (layer {}) to {:.4f} (layer {})",
                        *low->bias_min,
                        low->layer,
                        *high->bias_max,
                        high->layer);
  return text;
}

// What all layers took together, and the layer whose exchange was waited for longest.
std::string exchange_details(const std::vector<LayerExchange>& layers) {
  LayerExchange sum;
  const LayerExchange* slowest = &layers.front();
  const auto exposed = [](const LayerExchange& e) {
    return e.dispatch.exposed + e.combine.exposed;
  };
  for (const auto& e : layers) {
    for (const auto way : {&LayerExchange::dispatch, &LayerExchange::combine}) {
      (sum.*way).seconds += (e.*way).seconds;
      (sum.*way).exposed += (e.*way).exposed;
      (sum.*way).bytes += (e.*way).bytes;
    }
    if (exposed(e) > exposed(*slowest)) slowest = &e;
  }
  const auto way = [](const char* name, const LayerExchange::Way& w) {
    return fmt::format("{} {}, waited for {}, {:.1f} MiB",
                       name,
                       step_time(w.seconds),
                       step_time(w.exposed),
                       static_cast<double>(w.bytes) / 1048576.0);
  };
  return fmt::format("exchange {} | {} | longest wait {} in layer {}",
                     way("dispatch", sum.dispatch),
                     way("combine", sum.combine),
                     step_time(exposed(*slowest)),
                     slowest->layer);
}

// Hits kind by kind, what all kinds moved, and where the host waited longest.
std::string offload_details(const StepRecord& record) {
  std::string text = "offload hits";
  TierTraffic sum;
  for (const auto& [kind, traffic] : record.tiers) {
    text += fmt::format(" {} {:.1f}%", kind, 100 * traffic.hit_ratio());
    sum += traffic;
  }
  text += fmt::format(" | up {}, down {}", moved(sum.bytes_up), moved(sum.bytes_down));
  if (sum.file_read + sum.file_written > 0)
    text +=
        fmt::format(" | file read {}, written {}", moved(sum.file_read), moved(sum.file_written));
  if (record.replays)
    text +=
        fmt::format(" | replays {} of {} step(s)", record.replays->members, record.replays->steps);
  text += fmt::format(
      " | host waited {} ({} time(s))", step_time(sum.host_wait_seconds), sum.host_waits);
  const LayerTierTraffic* slowest = nullptr;
  for (const auto& l : record.tier_layers) {
    if (slowest == nullptr || l.traffic.host_wait_seconds > slowest->traffic.host_wait_seconds)
      slowest = &l;
  }
  if (slowest != nullptr && slowest->traffic.host_wait_seconds > 0)
    text += fmt::format(
        ", {} in layer {}", step_time(slowest->traffic.host_wait_seconds), slowest->layer);
  return text;
}

// "time 1.59 s a step | forward 31.2% | …", without parts that took next to nothing.
std::string time_details(const StepSeconds& parts, std::int64_t steps) {
  const double sum = std::accumulate(parts.of.begin(), parts.of.end(), 0.0);
  std::string text = fmt::format("time {} a step", step_time(sum / static_cast<double>(steps)));
  for (std::size_t i = 0; i < kStepParts; ++i) {
    const double share = sum > 0 ? 100 * parts.of[i] / sum : 0;
    if (share >= 0.05) text += fmt::format(" | {} {:.1f}%", name(static_cast<StepPart>(i)), share);
  }
  return text;
}

}  // namespace

std::string format_count(double value) {
  static constexpr const char* kUnits[] = {"", "k", "M", "G", "T", "P"};
  if (!std::isfinite(value)) return fixed(value, 0);
  std::size_t unit = 0;
  // 999.95 would be printed as 1000.0: one unit more from there on.
  while (std::abs(value) >= 999.5 && unit + 1 < std::size(kUnits)) {
    value /= 1000;
    ++unit;
  }
  const double size = std::abs(value);
  const int digits = unit == 0 ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}", value, digits, kUnits[unit]);
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds > 3.6e9) return "-";
  const auto s = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

void StepLines::add(const StepRecord& record) {
  last_ = record;
  if (added_ == 1) since_line_ = {};  // without the warm-up, even when it had no line
  ++added_;
  since_line_.steps += 1;
  since_line_.tokens += record.tokens;
  since_line_.seconds += record.seconds;
  since_line_.flops += record.flops.value_or(0);
  if (added_ == 1) return;
  if (record.parts) {
    ++since_details_.steps;
    for (std::size_t i = 0; i < kStepParts; ++i)
      since_details_.sum.of[i] += record.parts->of[i];
  }
  const auto slot = static_cast<std::size_t>(added_ - 2) % kRecentSteps;
  if (slot >= recent_seconds_.size()) recent_seconds_.resize(slot + 1);
  recent_seconds_[slot] = record.seconds;
}

std::vector<std::string> StepLines::detail_lines() {
  std::vector<std::string> lines;
  if (!last_.experts.empty() && last_.experts.front().bias_min)
    lines.push_back(expert_details(last_.experts));
  if (!last_.exchange.empty()) lines.push_back(exchange_details(last_.exchange));
  if (!last_.tiers.empty()) lines.push_back(offload_details(last_));
  if (last_.host_bytes) {
    std::string text = "mem";
    if (last_.memory_bytes) text += fmt::format(" device {} |", gib(*last_.memory_bytes));
    lines.push_back(text + fmt::format(" host {} (the rank with most)", gib(*last_.host_bytes)));
  }
  const Parts parts = std::exchange(since_details_, {});
  if (parts.steps > 0) lines.push_back(time_details(parts.sum, parts.steps));
  return lines;
}

std::string StepLines::line() {
  MOESAIC_CHECK(added_ > 0, "no step to report");
  // A second line for one step repeats its own numbers.
  if (since_line_.steps == 0)
    since_line_ = {1, last_.tokens, last_.seconds, last_.flops.value_or(0)};
  const Sum mean = std::exchange(since_line_, {});
  std::string text = fmt::format("step {}/{}", last_.step, last_.steps);
  if (added_ == 1) text += " (warm-up)";
  text += " | loss " + fixed(last_.loss, 4);
  if (last_.grad_norm) text += " | gnorm " + fixed(*last_.grad_norm, 3);
  text += fmt::format(" | lr {:.2e}", last_.learning_rate);
  if (last_.skipped) text += " | skipped";
  if (mean.tokens > 0 && mean.seconds > 0) {
    const double rate = static_cast<double>(mean.tokens) / mean.seconds;
    text += " | " + format_count(rate) + " tok/s";
    if (hardware_.devices > 1)
      text += fmt::format(" ({}/{})", format_count(rate / hardware_.devices), hardware_.device);
  }
  if (mean.flops > 0 && mean.seconds > 0 && hardware_.devices > 0) {
    const double rate = mean.flops / mean.seconds / hardware_.devices;
    text += fmt::format(" | {:.{}f} TF/s/{}", rate / 1e12, rate < 1e13 ? 2 : 0, hardware_.device);
    if (hardware_.peak_flops > 0)
      text += fmt::format(" {:.1f}%", 100 * rate / hardware_.peak_flops);
  }
  text += " | " + step_time(mean.seconds / static_cast<double>(mean.steps));
  if (last_.memory_bytes)
    text +=
        fmt::format(" | mem {:.1f} GiB", static_cast<double>(*last_.memory_bytes) / 1073741824.0);
  text += expert_fields(last_.experts);
  if (!recent_seconds_.empty() && last_.step < last_.steps) {
    const double sum = std::accumulate(recent_seconds_.begin(), recent_seconds_.end(), 0.0);
    text += " | eta " + format_duration(sum / static_cast<double>(recent_seconds_.size()) *
                                        static_cast<double>(last_.steps - last_.step));
  }
  return text;
}

}  // namespace moesaic
