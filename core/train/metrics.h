#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace moesaic {

/// How the tokens of a step spread over the experts of one layer.
struct ExpertLoad {
  std::int64_t layer = 0;         ///< as in the tensor names
  double max_over_mean = 0;       ///< tokens of the busiest expert / mean over experts; 1 is even
  std::int64_t dead_experts = 0;  ///< experts without a token in this step
};

/// What one step did, summed or averaged over all ranks. Fields without a value appear neither in
/// the line nor in the file.
struct StepRecord {
  std::int64_t step = 0;                     ///< counted from 1
  std::int64_t steps = 0;                    ///< of the whole run
  double loss = 0;                           ///< what is minimised
  std::map<std::string, double> loss_parts;  ///< by name: lm, mtp, balance, z, …
  std::optional<double> grad_norm;           ///< before clipping
  double learning_rate = 0;
  std::int64_t tokens = 0;          ///< of this step
  double seconds = 0;               ///< wall time of this step
  bool skipped = false;             ///< not finite: nothing was updated
  std::vector<ExpertLoad> experts;  ///< MoE layers
  std::optional<double> flops;  ///< model FLOPs of this step, by the formula of the run's header
  std::optional<std::int64_t> memory_bytes;  ///< largest device memory of a rank
  std::optional<std::int64_t> total_tokens;  ///< consumed since step 1
};

/// The JSON object of a step on one line, without newline. Numbers that are not finite become the
/// texts "nan", "inf",
/// "-inf", and the object then has "non_finite": true.
std::string to_json(const StepRecord& record);

/// Makes the lines of the log:
///   step 120/2000 | loss 5.8123 | gnorm 1.203 | lr 2.40e-04 | 41.2k tok/s | 1.59 s | moe
///   max/mean 1.42 | eta 0:49:50
/// moe: the worst layer; a "dead N" follows when experts, summed over the layers, had no token.
/// Rates and seconds are means over the steps since the last line. The first step after a start is
/// slower than the rest: its line is marked (warm-up), and no mean contains it. The remaining time
/// is that of the mean of the last 100 steps.
class StepLog {
 public:
  struct Hardware {
    int gpus = 0;                   ///< 0: no figures per GPU
    double peak_flops_per_gpu = 0;  ///< per second; 0: no utilisation
  };
  StepLog() = default;
  explicit StepLog(Hardware hardware) : hardware_(hardware) {}

  /// Every step, in order.
  void add(const StepRecord& record);
  /// The line of the last step added, without newline; InternalError when none was.
  std::string line();

 private:
  Hardware hardware_;
  StepRecord last_;
  std::int64_t added_ = 0;
  struct Sum {
    std::int64_t steps = 0, tokens = 0;
    double seconds = 0, flops = 0;
  };
  Sum since_line_;
  std::vector<double> recent_seconds_;  // a ring
};

/// h:mm:ss, rounded to seconds; "0:00:00" for what is not positive, "-" for what is not finite or
/// above 10^6 hours.
std::string format_duration(double seconds);
/// Three digits and a unit: "950", "41.2k", "1.23M".
std::string format_count(double value);

/// The first line of metrics.jsonl, and the first after each continuation.
struct RunHeader {
  std::string config_hash;
  std::string version;
  int ranks = 1;
  std::int64_t start_step = 0;  ///< the last step that is already done
  std::map<std::string, std::string>
      texts;  ///< anything else: layout, device, formula of the FLOPs
};

/// RUN_DIR/metrics.jsonl: one JSON object a line, written to the file at once. A continued run
/// appends; when the last line was torn by a kill, a newline comes first. Readers take the last
/// record of a step. One rank has one. Throws ResourceError (path, cause).
class MetricsWriter {
 public:
  MetricsWriter(const std::filesystem::path& path, const RunHeader& header);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  void write(const StepRecord& record);
  /// {"type": "…", "step": …, values}: save, eval, spike, stop, ….
  void event(const std::string& type,
             std::int64_t step,
             const std::map<std::string, double>& values = {},
             const std::map<std::string, std::string>& texts = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
