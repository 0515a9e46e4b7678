#pragma once
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/assembly.h"
#include "apps/file_lock.h"
#include "apps/launch.h"
#include "core/config/load.h"
#include "core/train/memory_plan.h"
#include "core/train/metrics.h"

namespace moesaic::apps {

enum class Resume { automatic, must, never };

/// One training run, from the point of view of one rank: builds the parts, continues from a checkpoint, loops, evaluates,
/// saves, and says on rank 0 what it does.
class TrainRun {
 public:
  TrainRun(const config::LoadedConfig& loaded, Resume resume, const RankPlace& place);
  ~TrainRun();
  /// Returns the exit code. Throws NumericsError after train.max_bad_steps steps in a row that were not finite.
  int execute();

 private:
  const config::Config& config() const { return loaded_.config; }
  bool is_root() const { return host_.rank() == 0; }
  void say(const std::string& line) const;
  void prepare();
  void check_memory() const;
  void lock_run_dir();
  void continue_from_checkpoint();
  void report_changes(const std::string& checkpoint) const;
  std::string memory_line() const;
  void print_header() const;
  void print_data() const;
  void open_metrics();
  void mark_ranges();
  StepStats next_step();
  void report(const StepStats& stats);
  void save();
  double report_eval(bool whole);
  void open_run_dir();
  bool out_of_time();
  void report_final();
  void report_data_use();
  std::filesystem::path checkpoints() const;

  const config::LoadedConfig& loaded_;
  Resume resume_;
  RankPlace place_;
  Communicator& host_;                          // of all ranks, for host memory
  std::optional<MemoryPlan> memory_plan_;       // on a GPU
  std::size_t memory_before_ = 0;               // in use on the device before this run took any
  std::unique_ptr<Communicator> device_world_;  // of all ranks, for device memory; null on the CPU
  Assembly assembly_;
  data::Blend train_;
  std::shared_ptr<const data::TokenSource> valid_;
  std::unique_ptr<OpObserver> nvtx_;  // debug.nvtx; the trainer calls it
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<FileLock> lock_;
  std::unique_ptr<MetricsWriter> metrics_;
  StepLog log_;
  std::int64_t last_saved_ = -1;
  bool reported_ = false;
  std::vector<std::pair<std::int64_t, double>>
      phase_flops_;  ///< last step, training FLOPs per token
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace moesaic::apps
