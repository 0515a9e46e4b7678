#pragma once
// A small hybrid model (KDA, KDA, sparse MLA; latent mixtures of experts, attention residuals, MTP), its data, and
// everything that trains it on one rank, as the executable puts it together.
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/nn/expert_tiers.h"
#include "core/train/optimizer.h"
#include "core/train/trainer.h"

namespace moesaic::test {

/// The configuration with `overrides` ("a.b=c"); its text file lies in a temporary folder of the process.
config::Config hybrid_config(const std::vector<std::string>& overrides = {});

/// Bytes of every persistent tensor by name, as checkpoints hold them.
using Snapshot = std::map<std::string, std::vector<std::byte>>;

/// Experts that do not lie on the device, and how much room there is for them.
struct Offload {
  bool weights = true;   ///< and gradients; else states alone
  double on_device = 0;  ///< share of them that the slots hold, as many as caches need at least
  double in_file = 0;    ///< share that lives in the file
  TierPolicy policy = TierPolicy::sched;
};

class Run {
 public:
  /// run_limit: ParameterStore::limit_runs().
  explicit Run(const config::Config& config,
               Communicator* world = nullptr,
               Stream::Mode mode = Stream::Mode::worker,
               Device device = kCpu,
               std::int64_t run_limit = 0,
               const std::optional<Offload>& offload = {},
               const offload::Disturbance& disturbance = {});

  StepStats step() { return trainer->step(); }
  std::vector<StepStats> steps(int n);
  Snapshot snapshot();
  /// Bytes of what kernels read, of all parameters that this rank holds, by name.
  Snapshot weights_of_kernels();
  /// Puts what this rank holds, whole tensors and pieces, into the whole tensors of all ranks; `mutex` guards them.
  void add_to(Snapshot& whole, std::mutex& mutex);
  /// Fills all state from a snapshot and counters from values, as a restart does.
  void restore(const Snapshot& tensors, const StateValues& values);

  config::Config config;
  std::unique_ptr<Mesh> mesh;  // with several ranks
  std::unique_ptr<ParameterStore> params;
  std::unique_ptr<Model> model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Trainer> trainer;
};

/// All ranks write one checkpoint together, as the executable does.
void save_together(Run& run, Communicator& world, const std::filesystem::path& folder);
/// The newest one.
void load_newest(Run& run, const std::filesystem::path& folder);

/// What a job of `ranks` ranks leaves behind: statistics of every step, the state of every rank (of all ranks together where
/// it is sharded), and the weights that each one's kernels read.
struct JobResult {
  std::vector<StepStats> stats;
  std::vector<Snapshot> states;
  std::vector<Snapshot> weights;
};
JobResult run_job(const config::Config& config,
                  int ranks,
                  int steps,
                  Stream::Mode mode = Stream::Mode::worker,
                  const std::optional<Offload>& offload = {});

/// Names whose bytes differ, or that only one of the two has; "" when none.
std::string differences(const Snapshot& a, const Snapshot& b, const std::string& only_prefix = "");
/// Largest |a - b| over an f64 tensor relative to its largest |b|, over all tensors; integers must agree. The name of the
/// worst is put into `worst`.
double largest_relative_error(const Snapshot& a, const Snapshot& b, std::string& worst);
/// Whether two steps report the same bits (time aside), those of every expert's load included.
bool same_numbers(const StepStats& a, const StepStats& b);

}  // namespace moesaic::test
