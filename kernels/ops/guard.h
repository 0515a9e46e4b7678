#pragma once
#include "kernels/ops/op.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

/// skip <- 1 and clip_factor <- 0 when any of `values` is not finite; else both stay as they are.
///
///   scalars [kNumStepScalars], values [n]   f64 | f32 each
///
/// The decision is made from reduced values, hence alike on all ranks. Source: SPEC 7.5.
struct GuardFinite {
  static constexpr const char* kName = "guard_finite";
  TensorView scalars;
  ConstTensorView values;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const GuardFinite& op);
void launch(CudaContext& context, const GuardFinite& op);

}  // namespace moesaic
