#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "core/train/run_sink.h"

namespace moesaic {

/// The JSON object of a step on one line, without newline. Numbers that are not finite become the texts "nan", "inf",
/// "-inf", and the object then has "non_finite": true.
std::string to_json(const StepRecord& record);
/// {"type":"experts","step":…,"layers":[L],"bias_min":[L],"bias_max":[L],"tokens":[[E], …]}: the tokens of every expert of
/// the layers that have them, one line; empty when none has.
std::string experts_to_json(const StepRecord& record);

/// {"type":"exchange","step":…,"layers":[L],"dispatch_seconds":[L], …}: what the exchanges of every layer took; empty when the
/// record does not tell.
std::string exchange_to_json(const StepRecord& record);

/// {"type":"offload","step":…,"weights":{"uses":…,"hits":…, …}, …}: what caches and homes of offloaded experts did, kind by
/// kind, and in steps with details "layers":[L], "layer_uses":[L], …; empty without offload.
std::string offload_to_json(const StepRecord& record);

/// RUN_DIR/metrics.jsonl: one JSON object a line, written to the file at once. Each life of the run begins with a header
/// and ends with an object of type "stop", unless it was killed. A continued run appends; when the last line was torn by
/// a kill, a newline comes first. Readers take the last record of a step. Throws ResourceError (path, cause).
class MetricsFile final : public RunSink {
 public:
  explicit MetricsFile(const std::filesystem::path& path);
  ~MetricsFile() override;

  void on_header(const RunHeader& header) override;
  void on_step(const StepRecord& record) override;
  /// {"type": "…", "step": …, values, texts}
  void on_event(const RunEvent& event) override;
  /// Closes the file, and says whether the disk has all of it; nothing may be written afterwards.
  void on_end(const RunEnd& end) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
