#pragma once
#include "core/base/tensor.h"

namespace moesaic {

/// Slots of the one small tensor [kNumStepScalars] of statistics type that holds what changes from
/// step to step. Ops read it on the device, so that a step neither needs a host decision nor new
/// kernel arguments.
enum class StepScalar : int {
  learning_rate,       ///< of the schedule, before a parameter's lr_scale
  weight_decay_scale,  ///< multiplies every parameter's weight_decay
  bias_correction1,    ///< 1 - beta1^t, t = updates including this one
  bias_correction2,    ///< 1 - beta2^t
  clip_factor,         ///< min(1, limit / (norm + 1e-6)); multiplies every gradient
  skip,                ///< not 0: optimizers change nothing in this step
  loss_divisor,        ///< sum of the target weights (valid targets) of the global batch
  mtp_divisor,         ///< the same for the targets two tokens further
  tokens,              ///< all tokens of the global batch
  documents,           ///< documents with at least one token in the global batch
  step,                ///< number of this step, from 1
  count_               // number of slots
};
constexpr int kNumStepScalars = static_cast<int>(StepScalar::count_);
constexpr int index_of(StepScalar slot) noexcept {
  return static_cast<int>(slot);
}

/// The one-element view of a slot, or an empty view of an empty tensor (an op's default then holds).
inline ConstTensorView step_scalar(const ConstTensorView& scalars, StepScalar slot) {
  return scalars.empty() ? ConstTensorView() : scalars.rows(index_of(slot), index_of(slot) + 1);
}

/// The host's values of the slots.
struct StepScalars {
  double learning_rate = 0;
  double weight_decay_scale = 1;
  double bias_correction1 = 1;
  double bias_correction2 = 1;
  double clip_factor = 1;
  double skip = 0;
  double loss_divisor = 1;
  double mtp_divisor = 1;
  double tokens = 1;
  double documents = 1;
  double step = 0;

  /// Writes all slots to `host`, [kNumStepScalars], f64 | f32, host memory; at once, no stream.
  void write(TensorView host) const;
};

/// 1 - beta^t without cancellation for beta near 1.
double bias_correction(double beta, double t);

/// Throws InternalError unless `scalars` is such a tensor of `dtype`. Used by the check() of ops.
void check_step_scalars(const ConstTensorView& scalars, DType dtype);

}  // namespace moesaic
