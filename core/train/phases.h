#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/config/config.h"
#include "core/nn/parameter_store.h"
#include "core/train/lr_schedule.h"

namespace moesaic {

/// A stretch of training with one sequence length, learning-rate schedule and set of trained parameters.
struct Phase {
  int index = 0;
  std::int64_t begin = 0;  ///< steps before it
  std::int64_t until = 0;  ///< its last step
  std::int64_t sequence_length = 0;
  std::int64_t global_batch_size = 0;  ///< sequences per step, over all ranks
  std::int64_t micro_batch_size = 0;   ///< sequences that pass the model at once on a rank
  std::int64_t pieces = 1;             ///< that layers work off a micro-batch in
  LrSchedule schedule;
  bool own_schedule =
      false;           ///< the schedule counts from the phase's first step, else from the run's
  bool sparse = true;  ///< sparse attention; else the indexer's dense warm-up
  std::vector<std::string> freeze;
  std::vector<std::pair<std::string, double>> lr_scale;

  std::int64_t micro_batch_tokens() const { return sequence_length * micro_batch_size; }
  std::int64_t piece_tokens() const { return micro_batch_tokens() / pieces; }
  std::int64_t step_tokens() const { return sequence_length * global_batch_size; }
  /// Micro-batches of one of `ranks` ranks in a step.
  std::int64_t micro_batches(int ranks) const {
    return global_batch_size / ranks / micro_batch_size;
  }
  /// Passes through the layers: of every piece of them.
  std::int64_t passes(int ranks) const { return micro_batches(ranks) * pieces; }
  double learning_rate(std::int64_t step) const {
    return schedule.at(own_schedule ? step - begin : step);
  }
};

/// train.phases resolved; one phase for the whole run when there are none.
std::vector<Phase> make_phases(const config::Config& config);
/// The phase of a step (steps count from 1).
const Phase& phase_of(const std::vector<Phase>& phases, std::int64_t step);

/// Whether `phase` trains the parameter: not frozen by name, and in the dense warm-up only the indexer (SPEC 3.4).
bool trains(const Phase& phase, const ParameterSpec& spec);
/// One flag per parameter: trained in some phase.
std::vector<char> ever_trained(const std::vector<Phase>& phases, const ParameterStore& params);

}  // namespace moesaic
