#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/config/enums.h"

// How the work is laid out on the machine: sections parallel … debug. Meanings: system_config.cpp.
namespace moesaic::config {

template <class S>
class Fields;

struct ParallelConfig {
  std::optional<std::int64_t> dp;  ///< empty = ranks / (tp * pp * cp)
  std::int64_t tp = 1;
  std::int64_t pp = 1;
  std::int64_t cp = 1;
  std::int64_t ep = 1;
  std::int64_t etp = 1;
  std::int64_t zero = 1;  ///< 1: optimizer state is sharded over the ranks that sum a gradient
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;
  std::optional<std::int64_t> chunks;  ///< of a stage; empty = chunks_per_stage()
  std::vector<std::int64_t> layers;    ///< of each chunk; empty = balanced by cost
  std::int64_t chunks_per_stage() const {
    return chunks.value_or(schedule == PipelineSchedule::interleaved ? 2 : 1);
  }
  LayerOrder order = LayerOrder::horizontal;
  static void describe(Fields<ParallelConfig>& f);
};

struct DispatchConfig {
  Exchange exchange = Exchange::automatic;
  Hierarchy hierarchy = Hierarchy::inter_first;
  std::int64_t hops = 2;
  DispatchDtype dtype = DispatchDtype::activation;
  DispatchDtype backward_dtype = DispatchDtype::activation;
  double buffer_factor = 0;  ///< 0 = for any routing
  bool checksum = false;
  bool overlap = false;
  std::int64_t chunks = 1;
  static void describe(Fields<DispatchConfig>& f);
};

struct ActivationsConfig {
  /// Name patterns; "selective" among them names what needs no product of matrices. {"full"} = all that can be
  /// recomputed, {} or {"none"} = nothing.
  std::vector<std::string> recompute;
  bool residual_offload = false;
  std::vector<std::string> offload;  ///< name patterns of what else waits in host memory
  std::int64_t piece_tokens = 0;     ///< most tokens that a layer works off at once; 0 = all
  static void describe(Fields<ActivationsConfig>& f);
};

struct ExpertsConfig {
  ExpertOffload offload = ExpertOffload::none;
  ExpertPolicy policy = ExpertPolicy::sched;
  ExpertUpdateTime update = ExpertUpdateTime::after_step;
  std::optional<std::int64_t> device_cache;  ///< bytes of all caches; empty = from device_budget
  std::optional<std::string> touch_log;
  std::int64_t place_every = 0;  ///< steps; 0 = experts stay where they are
  double place_decay = 0.99;
  std::int64_t replicas =
      0;  ///< slots of a rank and layer for copies of experts; needs place_every
  static void describe(Fields<ExpertsConfig>& f);
};

struct MemoryConfig {
  std::optional<std::int64_t> device_budget;  ///< bytes
  std::optional<std::int64_t> host_budget;    ///< bytes
  std::optional<std::int64_t> file_budget;    ///< bytes
  std::optional<std::string> file_path;
  bool verify_reads = true;
  static void describe(Fields<MemoryConfig>& f);
};

struct CheckpointConfig {
  std::int64_t every = 0;       ///< steps; 0 = only as save_at_end says
  std::int64_t keep_last = 2;   ///< 0 = keep all
  std::int64_t keep_every = 0;  ///< steps; 0 = none is kept for good
  bool async = true;
  OnSaveError on_error = OnSaveError::stop;
  bool save_at_end = true;
  std::optional<std::string> load_weights;
  static void describe(Fields<CheckpointConfig>& f);
};

struct CommConfig {
  std::optional<std::int64_t> ranks_per_node;  ///< empty = from the launcher
  double watchdog_s = 120;                     ///< 0 = off
  double first_step_s = 600;
  ReductionOrder reduction = ReductionOrder::ordered;
  bool share_gpu = false;
  static void describe(Fields<CommConfig>& f);
};

struct LogConfig {
  std::int64_t interval = 1;
  std::int64_t detail_every = 100;  ///< steps; 0 = never
  std::int64_t expert_every = 100;  ///< steps; 0 = never
  std::optional<double> peak_tflops;
  bool metrics = true;
  bool tensorboard = true;
  std::optional<std::string> prometheus;
  std::vector<std::int64_t> trace_steps;
  static void describe(Fields<LogConfig>& f);
};

struct DebugConfig {
  std::optional<std::int64_t> inject_nan_step;
  bool immediate_streams = false;
  bool nvtx = false;
  static void describe(Fields<DebugConfig>& f);
};

}  // namespace moesaic::config
