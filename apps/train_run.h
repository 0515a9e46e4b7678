#pragma once
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/assembly.h"
#include "apps/checkpointing.h"
#include "apps/file_lock.h"
#include "apps/launch.h"
#include "apps/planned_memory.h"
#include "apps/resume.h"
#include "apps/run_report.h"
#include "apps/stop_requests.h"
#include "comm/watchdog.h"
#include "core/config/load.h"
#include "core/train/memory_plan.h"
#include "core/train/touch_recorder.h"

namespace moesaic::apps {

/// One training run, from the point of view of one rank: builds the parts, continues from a checkpoint, loops, evaluates,
/// saves, and says on rank 0 what it does.
class TrainRun {
 public:
  TrainRun(const config::LoadedConfig& loaded,
           ResumeChoice resume,
           const RankPlace& place,
           Watchdog* watchdog,
           const ConsoleStyle& console);
  ~TrainRun();
  /// Returns the exit code. Throws NumericsError after train.max_bad_steps steps in a row that were not finite.
  int execute();

 private:
  const config::Config& config() const { return loaded_.config; }
  bool is_root() const { return host_.rank() == 0; }
  FinishedRun finished_before();
  int end_finished(const FinishedRun& finished);
  void take_lock();
  void prepare();
  void plan_and_check_memory(Device device);
  void plan_memory_of_rank(Device device);
  void check_budget() const;
  void check_memory() const;
  void prepare_saving();
  std::vector<ConfigChange> load_state();
  std::string memory_text();
  void begin_report();
  int run();
  void mark_ranges();
  void log_touches();
  bool updates_run_beside() const;
  bool is_lazy() const;
  void note_idle_keys();
  void warn_of_dense_updates();
  int train();
  std::optional<StepStats> next_step(StopReason& stop);
  std::optional<StepStats> traced_step(std::int64_t& stop_wish);
  int stop_early(StopReason reason);
  void finish();
  void refuse_bad_numbers() const;
  void count_saving(const std::function<void()>& work);
  void look_at_saves();
  void finish_saving();
  double evaluate(bool whole);
  void open_run_dir(const std::vector<ConfigChange>& changes);
  void report_failure(const Error& error);
  void meet_on_board();
  void report_data_use();

  const config::LoadedConfig& loaded_;
  ResumeChoice resume_;
  RankPlace place_;
  Watchdog* watchdog_;  // null when comm.watchdog_s is 0
  Communicator& host_;  // of all ranks, for host memory
  RunReport report_;
  std::optional<MemoryPlan> memory_plan_;       // where plan_and_check_memory() makes one
  std::optional<PlannedMemory> device_use_;     // on a GPU
  std::unique_ptr<Communicator> device_world_;  // of all ranks, for device memory; null on the CPU
  std::unique_ptr<Mesh> mesh_;
  Assembly assembly_;
  data::Blend train_;
  std::shared_ptr<const data::TokenSource> valid_;
  std::string tokenizer_hash_;  // of what made the tokens; kUnknownTokenizer where nobody says
  std::unique_ptr<OpObserver> nvtx_;  // debug.nvtx; the trainer calls it
  std::unique_ptr<Trainer> trainer_;
  std::optional<TouchRecorder> touches_;  // experts.touch_log; listens to the store of assembly_
  std::unique_ptr<FileLock> lock_;
  std::unique_ptr<Checkpointing> checkpointing_;
  std::unique_ptr<StopRequests> stops_;
  double saving_seconds_ = 0;  // that training waited since the last step
  bool continues_ = false;
  bool has_stepped_ = false;
  std::string continued_from_;  // checkpoint named by --resume
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The verbs `train` and `resume`: `load` reads the configuration before MPI starts. Returns the exit code.
int run_training(const std::function<config::LoadedConfig()>& load,
                 const std::string& resume,
                 bool fallback,
                 const ConsoleArguments& console);

}  // namespace moesaic::apps
