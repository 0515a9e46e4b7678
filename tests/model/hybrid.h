#pragma once
// A small hybrid model with everything in it (KDA, latent and sparse attention with rotation,
// latent mixtures of experts, attention residuals, MTP) and one training step of two micro-batches,
// whose results are compared bit by bit.
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/model/model.h"
#include "kernels/backend.h"

namespace moesaic::test {

constexpr std::int64_t kTokens = 37;

ModelOptions hybrid_options();

/// Values that leave no part of the model without effect: the pseudo-queries of the depth mix start
/// at zero otherwise.
void fill_zero_parameters(ParameterStore& params);

struct StepPlan {
  ModelOptions options = hybrid_options();
  Precision precision = kF32;
  RecomputePolicy policy;
  WeightGradients::Mode weight_gradients = WeightGradients::Mode::at_once;
  bool interleaved = false;  ///< both forward passes before both backward passes
  bool poisoned = false;     ///< NaN in all memory that holds nothing yet
  Stream::Mode mode = Stream::Mode::worker;
  int threads = 1;
  double perturbation =
      0;  ///< f64 only: all weights are moved by this times a fixed random direction
  std::size_t transient_bytes = std::size_t{32} << 20;  ///< 0 = measure (dry streams only)
  std::size_t scratch_bytes = std::size_t{32} << 20;
};

struct StepResult {
  std::vector<std::byte> gradients, losses, buffers, hidden;
  std::size_t transient_high_water = 0, scratch_high_water = 0, slot_bytes = 0;
  int replays = 0;
  std::vector<std::string> saved_in_vain;  ///< by the layers' backward
  double objective = 0;  ///< f64 only: cross-entropy, MTP, balance and router losses as trained
  double slope = 0;      ///< f64 only: its derivative along the direction, from the gradients
};

StepResult run_step(const StepPlan& plan);
/// Requires the same bits in all results.
void require_same(const StepResult& a, const StepResult& b);

}  // namespace moesaic::test
