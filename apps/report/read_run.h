#pragma once
#include <array>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace moesaic::apps::report {

constexpr double kAbsent = std::numeric_limits<double>::quiet_NaN();

/// Keys of `seconds_by_part`, in the order in which they are stacked.
constexpr std::array<const char*, 7> kParts = {
    "forward", "backward", "optimizer", "communication", "data", "checkpoint", "other"};

/// A `step` line of metrics.jsonl; NaN is what the line does not have, or has as "nan". Units as in docs/monitoring.md.
struct StepLine {
  std::int64_t step = 0;
  double loss = kAbsent, grad_norm = kAbsent, lr = kAbsent;
  double tokens = kAbsent, total_tokens = kAbsent;
  double seconds = kAbsent, time = kAbsent, tokens_per_second = kAbsent;
  double tflops = kAbsent, mfu = kAbsent, memory_bytes = kAbsent, host_bytes = kAbsent;
  /// Of the worst layer, of all layers together, of the worst layer.
  double max_over_mean = kAbsent, dead = kAbsent, entropy = kAbsent;
  std::array<double, kParts.size()> parts;  ///< seconds; NaN: not in the line
  bool skipped = false;
  bool warm_up = false;  ///< first step of a life: its time is no measure of speed

  StepLine() { parts.fill(kAbsent); }
};

/// How the tokens of one step spread over experts.
struct ExpertTable {
  std::int64_t step = 0;
  std::vector<std::int64_t> layers;        ///< [L], as in the tensor names
  std::vector<std::vector<double>> ratio;  ///< [L][E], tokens / mean of the layer; 0 = no token
  std::vector<std::vector<std::int64_t>> tokens;  ///< [L][E]
};

/// From one start of the program to its end.
struct Life {
  std::int64_t start_step = 0;             ///< steps done before it
  double begin = kAbsent, last = kAbsent;  ///< Unix times of its header and of its last line
  double step_seconds = 0, stall_seconds = 0;
  std::map<std::string, std::string> facts;  ///< of its header: version, ranks, device, …
  std::vector<std::string> lines;            ///< its header as printed
  std::string end;                           ///< reason; empty when it was killed, or still runs
  std::optional<std::int64_t> exit_code;
};

struct BiasRange {
  double low = kAbsent, high = kAbsent;
};

/// What the folder of a run tells.
struct RunData {
  std::string name;
  std::filesystem::path path;
  std::map<std::int64_t, StepLine> steps;  ///< by step; the last life that did it counts
  std::map<std::int64_t, double> evals;    ///< loss, nats per token
  std::map<std::int64_t, double> saves;    ///< bytes
  std::map<std::int64_t, BiasRange> bias;  ///< of all layers
  ExpertTable experts;                     ///< of the last record; no layers when there is none
  std::vector<Life> lives;
  std::string config;  ///< config.yaml; empty where there is none
  std::int64_t torn_lines = 0, first_torn_line = 0;
};

/// Reads RUN_DIR/metrics.jsonl and config.yaml. A life that begins at step S drops what earlier lives wrote about later
/// steps. Lines that a kill has torn are passed over and counted. Throws InputError when `dir` is not the folder of a run
/// or nothing in its metrics.jsonl is a record.
RunData read_run(const std::filesystem::path& dir);

/// One line of metrics.jsonl into `run`; false when it is no record.
bool add_line(const std::string& line, RunData& run);

/// The value of a key of config.yaml ("optimizer.clip_grad_norm") as text; nothing when it is not there.
std::optional<std::string> config_value(const RunData& run, const std::string& key);

/// Gives every run a name of its own: its folder's, with as many parents as it takes to tell them apart.
void name_runs(std::vector<RunData>& runs);

}  // namespace moesaic::apps::report
