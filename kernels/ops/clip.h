#pragma once
#include "kernels/ops/op.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

/// partials[i] = sum of x[i]^2, in f64.
///
///   partials  [n] f64, overwritten: one per parameter, or one per member of a family of experts
///   x         n times the same number of elements, any shape (a whole tensor with n = 1); f64 |
///   f32 | bf16
///   index     [n] i32, each element once, or empty. When given, sum i goes to partials[index[i]],
///   partials may have more than n elements, and those that are not named keep their values
///
/// Sums run over fixed blocks of 4096 elements, then over the blocks in order. A partial is not
/// finite exactly when an element of x[i] is not finite, or when the sum is beyond f64.
struct SumOfSquares {
  static constexpr const char* kName = "sum_of_squares";
  TensorView partials;
  ConstTensorView x;
  ConstTensorView index = {};

  std::int64_t sums() const { return index.empty() ? partials.dim(0) : index.dim(0); }
  void check() const;
  OpCost cost() const;
};

/// norm = sqrt(sum of partials, in order);  clip_factor <- min(1, limit / (norm + 1e-6)), 1 without
/// a limit; skip <- 1 when norm is not finite (clip_factor is then 0), else skip stays as it is.
///
///   scalars   [kNumStepScalars], master dtype: slots clip_factor and skip
///   norm      one f64 element, overwritten: the norm before clipping
///   partials  [n] f64, in declaration order;  limit 0 = no clipping
/// Source: SPEC 7.5.
struct ClipFactor {
  static constexpr const char* kName = "clip_factor";
  TensorView scalars;
  TensorView norm;
  ConstTensorView partials;
  double limit = 1.0;

  void check() const;
  OpCost cost() const;
};

/// average <- decay average + (1 - decay) w; with skip != 0 in `scalars` nothing is written.
///
///   average, w  one shape and type, f64 | f32
///   remainder   the same shape, u16, or empty. When given, w is bf16 and the two are an f32 tensor
///   (core/base/split_float.h)
///   scalars [kNumStepScalars], master dtype, empty =
///   never skip
struct MovingAverage {
  static constexpr const char* kName = "moving_average";
  TensorView average;
  ConstTensorView w;
  ConstTensorView remainder = {};
  ConstTensorView scalars;
  double decay = 0.999;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const SumOfSquares& op);
void launch(CpuContext& context, const ClipFactor& op);
void launch(CpuContext& context, const MovingAverage& op);
void launch(CudaContext& context, const SumOfSquares& op);
void launch(CudaContext& context, const ClipFactor& op);
void launch(CudaContext& context, const MovingAverage& op);

}  // namespace moesaic
