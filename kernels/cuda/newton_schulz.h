#pragma once
// The iteration of Muon on a group of equal matrices.
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic::cuda {

/// Matrices [rows, cols], rows <= cols, that go through the iteration together.
struct NewtonSchulzShape {
  std::int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;
  bool split = false;  ///< f32 products from bf16 halves

  /// How many matrices make a group: a function of the members above, so that the algorithms of the
  /// products, and with them the bits, do not depend on how many there are.
  std::int64_t group() const;
  /// f32 matrices whose rows lie 16 bytes apart.
  static bool can_split(std::int64_t rows, std::int64_t cols, DType dtype);
};

/// Scratch of one group. Matrix i of `x` starts at element i rows cols.
struct NewtonSchulzWorkspace {
  NewtonSchulzShape shape;
  TensorView x, other;             // [count, rows, cols]
  TensorView gram, polynomial;     // [count, rows, rows]
  TensorView x_high, x_low;        // [count, rows, cols] bf16, split only
  TensorView gram_high, gram_low;  // [count, rows, rows] bf16, split only
  TensorView polynomial_high, polynomial_low;
  TensorView sums;  // [count, parts] f64
  TensorView blas;

  /// For groups of up to `count` matrices.
  static NewtonSchulzWorkspace take(Arena& arena,
                                    const NewtonSchulzShape& shape,
                                    std::int64_t count);
};

/// Enqueues X / (|X|_F + 1e-7) and `iterations` steps on the first `count` matrices of ws.x; returns where
/// the results are. Not for dry streams.
TensorView newton_schulz(CudaContext& context,
                         const NewtonSchulzWorkspace& ws,
                         std::int64_t count,
                         int iterations);

}  // namespace moesaic::cuda
