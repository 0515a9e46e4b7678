#pragma once
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic {

enum class InitialKind : std::uint8_t {
  zeros,
  ones,
  normal,            ///< normal, std `a`, mean `b`, redrawn outside 3 std
  uniform,           ///< in [a, b]
  log_uniform,       ///< log of a number uniform in [a, b] (A_log of Kimi-Linear)
  inverse_softplus,  ///< dt + log(1 - e^-dt), dt = max(1e-4, e^u), u uniform in [log a, log b] (dt_bias)
};

/// y[i] = a random number that depends on (kind, a, b, key, index of i in the whole tensor) alone, drawn in f64 by integer and exact operations and
/// rounded to the type of y (f64 | f32 | bf16, the last by way of f32): the same bits on every backend, in any layout.
/// `copy`, optional, of the same shape, gets the same numbers in its own type. `remainder`, optional, u16 of the same
/// shape next to a y of bf16: the two get the numbers as f32 (core/base/split_float.h), and
/// there is no copy. When y is a block of a tensor, `whole` (of the same rank) is the shape of that tensor and `begin` where
/// the block starts in it; indices count row-major in the whole. An empty `whole`: y is all.
struct InitialValues {
  static constexpr const char* kName = "initial_values";
  TensorView y{};
  TensorView copy{};
  TensorView remainder{};
  InitialKind kind = InitialKind::normal;
  double a = 1.0;
  double b = 0.0;
  std::uint64_t key = 0;
  Shape whole = {};
  Shape begin = {};

  /// Where the elements of y lie in the whole: y as the fewest strided dimensions, innermost first.
  struct Index {
    int rank = 0;
    std::uint64_t first = 0;
    std::uint64_t extent[Shape::kMaxRank] = {}, stride[Shape::kMaxRank] = {};
  };
  Index index() const;
  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const InitialValues& op);
void launch(CudaContext& context, const InitialValues& op);

}  // namespace moesaic
