#pragma once
#include "kernels/ops/op.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

/// StepScalars of every member of a family: rows[e] = scalars, except that skip is 1 where counts[e] = 0. Updates that
/// read row e leave an expert without tokens alone, without a decision of the host.
///
///   rows    [E, kNumStepScalars]  f64 | f32, overwritten
///   scalars [kNumStepScalars]     the same type
///   counts  [E]                   i64 | i32, of the whole step
///   numbers [E]                   i32, or empty. When given, counts may have another length, and row e goes by
///                                 counts[numbers[e]]
struct MemberScalars {
  static constexpr const char* kName = "member_scalars";
  TensorView rows;
  ConstTensorView scalars;
  ConstTensorView counts;
  ConstTensorView numbers = {};

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const MemberScalars& op);
void launch(CudaContext& context, const MemberScalars& op);

}  // namespace moesaic
