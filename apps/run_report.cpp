#include "apps/run_report.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>

#include <fmt/format.h>
#include <unistd.h>

#include "core/data/entropy.h"
#include "core/model/plan.h"
#include "core/train/sinks/console.h"
#include "core/train/sinks/metrics_file.h"
#include "core/train/sinks/prometheus.h"
#include "core/train/sinks/tensorboard.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {

namespace {

// Resident memory of this process.
std::int64_t host_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0, resident = 0;
  file >> pages >> resident;
  return file ? resident * ::sysconf(_SC_PAGESIZE) : 0;
}

bool is_multiple(std::int64_t step, std::int64_t of) {
  return of > 0 && step % of == 0;
}

}  // namespace

RunReport::RunReport(const config::LoadedConfig& loaded,
                     Communicator& host,
                     const ConsoleStyle& style)
    : loaded_(loaded), host_(host) {
  if (host_.rank() != 0) return;
  Console::Options options;
  options.lines = &std::cout;
  options.bar = style.bar ? &std::cerr : nullptr;
  options.columns = style.columns;
  options.color = style.color;
  options.step_lines = style.step_lines;
  options.interval = config().log.interval;
  options.detail_every = config().log.detail_every;
  auto console = std::make_unique<Console>(options);
  console_ = console.get();
  sinks_.add(std::move(console));
}

void RunReport::open_files(const RunFacts& facts) {
  const std::filesystem::path dir(config().run.dir);
  const auto& log = config().log;
  if (log.metrics) sinks_.add(std::make_unique<MetricsFile>(dir / "metrics.jsonl"));
  if (log.tensorboard) sinks_.add(std::make_unique<TensorBoard>(dir / "tensorboard"));
  if (const auto path = prometheus_path(log.prometheus.value_or(""), dir); !path.empty()) {
    sinks_.add(std::make_unique<PrometheusFile>(PrometheusFile::Options{
        .path = path,
        .run = std::filesystem::absolute(dir / "x").lexically_normal().parent_path().filename(),
        .checkpoint_every = config().checkpoint.every,
        .disk = dir,
        .warn = [](const std::string& text) { std::cerr << "moesaic: " << text << std::endl; }}));
  }
  StepLines::Hardware hardware;
  hardware.peak_flops = facts.peak.tflops * 1e12;
  if (facts.assembly.device.kind != Device::Kind::cuda) hardware.device = "rank";
  if (facts.assembly.device.kind == Device::Kind::cuda || facts.peak.tflops > 0)
    hardware.devices = host_.size();
  console_->set_hardware(hardware);
}

void RunReport::begin(const RunFacts& facts) {
  begun_ = true;
  device_ = facts.assembly.device;
  peak_tflops_ = facts.peak.tflops;
  if (host_.rank() == 0) tiers_.emplace(*facts.assembly.params, *facts.assembly.model);
  const RunHeader header = run_header(facts);
  for (const PhasePlan& phase : make_plan(config()).phases)
    phase_flops_.push_back({phase.end, 3.0 * static_cast<double>(phase.forward_flops)});
  if (host_.rank() != 0) return;
  open_files(facts);
  sinks_.on_header(header);
  RunEvent event;
  event.type = facts.continues ? "resume" : "start";
  event.step = facts.steps_done;
  if (!facts.checkpoint.empty()) event.texts["path"] = facts.checkpoint;
  sinks_.on_event(event);
}

void RunReport::begin_step() {
  if (tiers_) tiers_->begin();
}

void RunReport::event(const RunEvent& event) {
  if (event.type == "save") ++life_.saves;
  sinks_.on_event(event);
}

// Ranks differ by what they hold; the one with most is the one that runs out first.
void RunReport::measure_memory() {
  host_bytes_ = host_.all_reduce_host(host_bytes(), ReduceOp::max);
  if (device_.kind != Device::Kind::cuda) return;
  const auto memory = cuda::device_memory(device_);
  device_bytes_ =
      host_.all_reduce_host(static_cast<std::int64_t>(memory.total - memory.free), ReduceOp::max);
}

StepRecord RunReport::record_of(const StepStats& stats, const Trainer& trainer) {
  StepRecord record;
  record.step = stats.step;
  record.time = unix_time();
  record.steps = config().train.steps;
  record.loss = stats.loss;
  const auto& model = config().model;
  if (model.mtp.num_nextn_predict_layers > 0) record.loss_parts["mtp"] = stats.mtp_loss;
  if (model.indexer) record.loss_parts["indexer_kl"] = stats.indexer_kl;
  if (model.balance.aux_loss != config::AuxLoss::none)
    record.loss_parts["balance"] = stats.balance_loss;
  if (model.balance.z_loss_weight != 0) record.loss_parts["router_z"] = stats.router_z;
  record.grad_norm = stats.grad_norm;
  record.learning_rate = stats.learning_rate;
  record.tokens = stats.tokens;
  record.seconds = stats.seconds;
  record.parts = stats.parts;
  record.skipped = stats.skipped;
  record.experts = stats.experts;
  record.exchange = stats.exchange;
  if (tiers_) {
    record.tiers = tiers_->kinds();
    if (is_multiple(stats.step, config().log.detail_every)) record.tier_layers = tiers_->layers();
  }
  record.replays = stats.replays;
  if (stats.activations_out > 0) {
    record.activations_out = stats.activations_out;
    record.activations_in = stats.activations_in;
  }
  for (const auto& [last_step, flops] : phase_flops_) {
    if (stats.step > last_step) continue;
    record.flops = flops * static_cast<double>(stats.tokens);
    break;
  }
  record.total_tokens = trainer.tokens_seen();
  const auto& log = config().log;
  const bool is_gpu = device_.kind == Device::Kind::cuda;
  if (record.flops && stats.seconds > 0 && (is_gpu || peak_tflops_ > 0)) {
    record.tflops_per_device = *record.flops / stats.seconds / host_.size() / 1e12;
    if (peak_tflops_ > 0) record.mfu = *record.tflops_per_device / peak_tflops_;
  }
  record.memory_bytes = device_bytes_;
  if (is_multiple(stats.step, log.detail_every)) record.host_bytes = host_bytes_;
  if (!is_multiple(stats.step, log.expert_every)) {
    for (auto& layer : record.experts)
      layer.tokens.clear();
  }
  return record;
}

void RunReport::step(const StepStats& stats,
                     const Trainer& trainer,
                     const std::string& started_line) {
  // Nothing is allocated once training has begun, so that the device need not be asked every step.
  const bool first = life_.steps == 0;
  if (first || is_multiple(stats.step, config().log.detail_every)) measure_memory();
  if (first) {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start_;
    line(fmt::format(
        "started    first step done {:.1f} s after the start{}", since.count(), started_line));
    life_.first_step = stats.step;
    life_.first_loss = stats.loss;
  }
  ++life_.steps;
  (first ? life_.warm_up_seconds : life_.seconds) += stats.seconds;
  if (!first) life_.tokens += stats.tokens;
  life_.last_loss = stats.loss;
  life_.skipped += stats.skipped ? 1 : 0;
  sinks_.on_step(record_of(stats, trainer));
  for (const ExpertsMoved& moved : stats.moved) {
    RunEvent event;
    event.type = "experts_moved";
    event.step = stats.step;
    event.values = {{"layer", static_cast<double>(moved.layer)},
                    {"rank_max_over_mean_before", moved.before},
                    {"rank_max_over_mean_after", moved.after},
                    {"experts", static_cast<double>(moved.experts)},
                    {"bytes", static_cast<double>(moved.bytes)}};
    if (config().experts.replicas > 0)
      event.values["replicas"] = static_cast<double>(moved.replicas);
    event.line = fmt::format(
        "experts moved: layer {}: rank max/mean {:.2f} -> {:.2f}, {} experts, {:.1f} MiB",
        moved.layer,
        moved.before,
        moved.after,
        moved.experts,
        static_cast<double>(moved.bytes) / 1048576.0);
    if (config().experts.replicas > 0) event.line += fmt::format(", {} replicas", moved.replicas);
    sinks_.on_event(event);
  }
  if (!stats.skipped) return;
  RunEvent event;
  event.type = "skip";
  event.step = stats.step;
  event.values["in_a_row"] = static_cast<double>(trainer.consecutive_bad_steps());
  event.line =
      fmt::format("skip: loss or gradient norm is not finite; nothing was updated ({} in a row)",
                  trainer.consecutive_bad_steps());
  sinks_.on_event(event);
}

void RunReport::eval(const EvalStats& stats, std::int64_t step) {
  life_.eval_loss = stats.loss;
  RunEvent event;
  event.type = "eval";
  event.step = step;
  event.values = {{"loss", stats.loss}, {"tokens", static_cast<double>(stats.predicted_tokens)}};
  event.line = fmt::format(
      "eval loss {:.4f} nats/token over {} held-out tokens", stats.loss, stats.predicted_tokens);
  sinks_.on_event(event);
}

// A model that knows only the frequencies of bytes, or of pairs.
void RunReport::closing_comparison(double loss, const data::TokenSource& valid) {
  if (host_.rank() != 0 || valid.info().format != config::DataFormat::bytes_text) return;
  data::TokenCounts counts;
  counts.add(valid);
  const double unigram = data::unigram_entropy(counts), bigram = data::bigram_entropy(counts);
  line(
      fmt::format("held-out   loss {:.4f} nats/byte | unigram entropy {:.4f} (loss is {:.2f} x) | "
                  "bigram entropy {:.4f} (loss is {:.2f} x)",
                  loss,
                  unigram,
                  loss / unigram,
                  bigram,
                  loss / bigram));
}

std::string RunReport::summary(const RunEnd& end) const {
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start_;
  std::string text = fmt::format("summary    {}", format_duration(since.count()));
  if (life_.steps > 0) {
    text += fmt::format(" | steps {} to {}, {} of them skipped | loss {:.4f} -> {:.4f}",
                        life_.first_step,
                        end.step,
                        life_.skipped,
                        life_.first_loss,
                        life_.last_loss);
  } else {
    text += end.exit_code == 0 ? " | no step was left to do" : " | no step was done";
  }
  if (life_.eval_loss) text += fmt::format(" | last eval loss {:.4f}", *life_.eval_loss);
  if (life_.seconds > 0) {
    text += fmt::format(" | {} tok/s in steps",
                        format_count(static_cast<double>(life_.tokens) / life_.seconds));
    text +=
        fmt::format(", which took {:.0f}% of the time",
                    100 * (life_.seconds + life_.warm_up_seconds) / std::max(since.count(), 1e-9));
  }
  return text + fmt::format(" | {} checkpoint(s) written", life_.saves);
}

void RunReport::end(const RunEnd& end) {
  if (begun_ && host_.rank() == 0) line(summary(end));
  sinks_.on_end(end);
}

}  // namespace moesaic::apps
