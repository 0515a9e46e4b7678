#include "apps/run_report.h"

#include <filesystem>
#include <iostream>

#include <fmt/format.h>

#include "core/data/entropy.h"
#include "core/model/plan.h"
#include "core/train/sinks/console.h"
#include "core/train/sinks/metrics_file.h"

namespace moesaic::apps {

RunReport::RunReport(const config::LoadedConfig& loaded,
                     Communicator& host,
                     const ConsoleStyle& style)
    : loaded_(loaded), host_(host), style_(style) {
  if (host_.rank() != 0) return;
  Console::Options options;
  options.lines = &std::cout;
  options.bar = style.bar ? &std::cerr : nullptr;
  options.columns = style.columns;
  options.color = style.color;
  options.step_lines = style.step_lines;
  options.interval = config().log.interval;
  sinks_.add(std::make_unique<Console>(options));
}

void RunReport::begin(const RunFacts& facts) {
  const RunHeader header = run_header(facts);
  for (const PhasePlan& phase : make_plan(config()).phases)
    phase_flops_.push_back({phase.end, 3.0 * static_cast<double>(phase.forward_flops)});
  if (host_.rank() != 0) return;
  const std::filesystem::path dir(config().run.dir);
  if (config().log.metrics) sinks_.add(std::make_unique<MetricsFile>(dir / "metrics.jsonl"));
  sinks_.on_header(header);
  RunEvent event;
  event.type = facts.checkpoint.empty() ? "start" : "resume";
  event.step = facts.steps_done;
  if (!facts.checkpoint.empty()) event.texts["path"] = facts.checkpoint;
  sinks_.on_event(event);
}

StepRecord RunReport::record_of(const StepStats& stats, const Trainer& trainer) const {
  StepRecord record;
  record.step = stats.step;
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
  record.skipped = stats.skipped;
  record.experts = stats.experts;
  for (const auto& [last_step, flops] : phase_flops_) {
    if (stats.step > last_step) continue;
    record.flops = flops * static_cast<double>(stats.tokens);
    break;
  }
  record.total_tokens = trainer.tokens_seen();
  return record;
}

void RunReport::step(const StepStats& stats,
                     const Trainer& trainer,
                     const std::string& started_line) {
  if (!stepped_) {
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - start_;
    line(fmt::format(
        "started    first step done {:.1f} s after the start{}", since.count(), started_line));
    stepped_ = true;
  }
  sinks_.on_step(record_of(stats, trainer));
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
  if (host_.rank() != 0 || config().data.format != config::DataFormat::bytes_text) return;
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

}  // namespace moesaic::apps
