#pragma once
#include <filesystem>
#include <memory>

#include "core/train/run_sink.h"
#include "core/train/sinks/event_file.h"

namespace moesaic {

/// Event files for TensorBoard, a new one per life of the run. A life that continues from step N makes readers drop what
/// earlier lives wrote of steps after N.
///
/// Tags: train/…, perf/…, moe/… every step; moe/L07/… (load_max, dead, entropy, bias_min, bias_max and the histogram
/// tokens) and the picture moe/load only for records with tokens per expert, so their number does not depend on the number
/// of experts; TYPE/NAME for the values of an event (eval/loss, save/seconds); the configuration as a text.
class TensorBoard final : public RunSink {
 public:
  /// Throws ResourceError (path, cause).
  explicit TensorBoard(const std::filesystem::path& folder);
  void on_header(const RunHeader& header) override;
  void on_step(const StepRecord& record) override;
  void on_event(const RunEvent& event) override;
  /// Closes the file, and says whether the disk has all of it; nothing may be written afterwards.
  void on_end(const RunEnd& end) override;

 private:
  EventFile file_;
};

}  // namespace moesaic
