#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "apps/console_style.h"
#include "apps/run_header.h"
#include "core/train/run_sink.h"
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
  void event(const RunEvent& event) { sinks_.on_event(event); }

  /// After resuming was settled: opens the files, prints the header. All ranks call it.
  void begin(const RunFacts& facts);
  /// Every step, in order. All ranks call it. `started_line`: more for the line after the first step of this life.
  void step(const StepStats& stats, const Trainer& trainer, const std::string& started_line);
  void eval(const EvalStats& stats, std::int64_t step);
  /// The closing loss beside what a reader of text needs to judge it by.
  void closing_comparison(double loss, const data::TokenSource& valid);
  void end(const RunEnd& end) { sinks_.on_end(end); }

 private:
  const config::Config& config() const { return loaded_.config; }
  StepRecord record_of(const StepStats& stats, const Trainer& trainer) const;

  const config::LoadedConfig& loaded_;
  Communicator& host_;
  ConsoleStyle style_;
  RunSinks sinks_;
  bool stepped_ = false;
  std::vector<std::pair<std::int64_t, double>>
      phase_flops_;  // last step of a phase, training FLOPs per token
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace moesaic::apps
