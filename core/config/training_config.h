#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/config/enums.h"

// What is trained on, how long and how: sections run, data, train, optimizer. Meanings:
// training_config.cpp.
namespace moesaic::config {

template <class S>
class Fields;

struct RunConfig {
  std::string dir;  ///< filled by load_config: runs/<name of the file>
  std::int64_t seed = 1;
  DeviceChoice device = DeviceChoice::automatic;
  PrecisionChoice precision = PrecisionChoice::automatic;
  bool deterministic = true;
  std::int64_t threads = 1;
  std::optional<double> max_minutes;
  static void describe(Fields<RunConfig>& f);
};

/// One entry of data.train or data.valid; a plain path stands for an entry without weight and format.
struct DataFileConfig {
  std::string path;
  std::optional<double> weight;
  std::optional<DataFormat> format;
  static void describe(Fields<DataFileConfig>& f);
};

struct DataConfig {
  std::vector<DataFileConfig> train;
  std::vector<DataFileConfig> valid;
  std::optional<std::string> tokenizer;
  DataFormat format = DataFormat::automatic;
  TokenDtype token_dtype = TokenDtype::u16;
  std::optional<std::int64_t> end_of_text;
  std::int64_t sequence_length = 0;
  static void describe(Fields<DataConfig>& f);
};

/// Scale of the learning rate of the parameters whose logical name matches.
struct LrScaleConfig {
  std::string pattern;
  double scale = 1;
  static void describe(Fields<LrScaleConfig>& f);
};

/// A stretch of the run; empty values are taken from data and optimizer.
struct PhaseConfig {
  std::int64_t until = 0;  ///< where not set, load_config derives it (phase_extent.h)
  std::optional<std::int64_t> until_tokens;
  std::optional<std::int64_t> sequence_length;
  std::optional<std::int64_t> global_batch_size;  ///< sequences
  std::optional<std::int64_t> micro_batch_size;   ///< sequences
  std::optional<LrSchedule> lr_schedule;
  std::optional<double> lr;
  std::optional<double> lr_min;
  std::optional<std::int64_t> warmup_steps;
  SparseStage sparse_stage = SparseStage::sparse;
  std::vector<std::string> freeze;
  std::vector<LrScaleConfig> lr_scale;
  static void describe(Fields<PhaseConfig>& f);
};

struct TrainConfig {
  std::int64_t steps = 0;  ///< where not set, load_config derives it (phase_extent.h)
  std::optional<std::int64_t> tokens;
  std::int64_t global_batch_size = 0;  ///< sequences; where not set, derived
  std::optional<std::int64_t> global_batch_tokens;
  std::int64_t micro_batch_size = 1;  ///< sequences
  std::int64_t eval_every = 0;        ///< steps; 0 = at the end only
  std::int64_t eval_batches = 8;      ///< global batches per evaluation
  std::vector<PhaseConfig> phases;
  std::int64_t max_bad_steps = 10;
  std::int64_t head_chunk_rows = 1024;
  static void describe(Fields<TrainConfig>& f);
};

struct OptimizerConfig {
  OptimizerName name = OptimizerName::adamw;
  double lr = 0;
  double lr_min = 0;
  LrSchedule lr_schedule = LrSchedule::cosine;
  std::int64_t warmup_steps = 0;
  std::int64_t decay_steps = 0;
  DecayShape decay_shape = DecayShape::linear;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double clip_grad_norm = 1.0;  ///< 0 = no clipping
  double muon_momentum = 0.95;
  bool muon_nesterov = true;
  bool muon_per_head = true;
  std::int64_t ns_steps = 5;
  MuonProducts ns_products = MuonProducts::automatic;
  std::optional<double> qk_clip_tau;
  std::optional<double> ema_decay;
  Untouched untouched = Untouched::dense;
  MasterWeights master = MasterWeights::f32;
  static void describe(Fields<OptimizerConfig>& f);
};

}  // namespace moesaic::config
