#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/console_style.h"
#include "apps/run_header.h"
#include "core/train/run_sink.h"
#include "core/train/tier_meter.h"
#include "core/train/trainer.h"

namespace moesaic::apps {

/// Turns what a run does into records and events, and owns the outputs that show them. Every rank has one; only rank 0's
/// has outputs.
class RunReport {
 public:
  RunReport(const config::LoadedConfig& loaded, Communicator& host, const ConsoleStyle& style);

  /// For whatever counts long work or has events of its own; calls may come from any thread.
  RunSink& sinks() noexcept { return sinks_; }
  void line(const std::string& text) { sinks_.on_line(text); }
  void event(const RunEvent& event);

  /// After resuming was settled: opens the files, prints the header. All ranks call it.
  void begin(const RunFacts& facts);
  /// What the tiers of offloaded experts do from here on belongs to the next step.
  void begin_step();
  /// Every step, in order. All ranks call it. `started_line`: more for the line after the first step of this life.
  void step(const StepStats& stats, const Trainer& trainer, const std::string& started_line);
  void eval(const EvalStats& stats, std::int64_t step);
  /// The closing loss beside what a reader of text needs to judge it by.
  void closing_comparison(double loss, const data::TokenSource& valid);
  /// Prints what this life did, then how it ended.
  void end(const RunEnd& end);

 private:
  const config::Config& config() const { return loaded_.config; }
  void open_files(const RunFacts& facts);
  void measure_memory();
  StepRecord record_of(const StepStats& stats, const Trainer& trainer);
  std::string summary(const RunEnd& end) const;

  const config::LoadedConfig& loaded_;
  Communicator& host_;
  RunSinks sinks_;
  Console* console_ = nullptr;  // one of them; rank 0
  bool begun_ = false;          // a run that is refused has no summary
  Device device_;
  std::optional<TierMeter> tiers_;
  double peak_tflops_ = 0;                                 // 0: none is known
  std::optional<std::int64_t> device_bytes_, host_bytes_;  // of the rank with most, when last asked
  struct Life {
    std::int64_t steps = 0, first_step = 0, tokens = 0, skipped = 0, saves = 0;
    double warm_up_seconds = 0, seconds = 0;  // of the first step, of the others
    double first_loss = 0, last_loss = 0;
    std::optional<double> eval_loss;
  } life_;
  std::vector<std::pair<std::int64_t, double>>
      phase_flops_;  // last step of a phase, training FLOPs per token
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace moesaic::apps
