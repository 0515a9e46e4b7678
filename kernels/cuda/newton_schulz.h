#pragma once
// The iteration of Muon on a group of equal matrices.
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic::cuda {

/// What the products of the iteration work on: the dtype of the matrices; f32 as two bf16 halves; bf16,
/// to which everything is rounded on the way.
enum class SchulzProducts : std::uint8_t { plain, split, bf16 };

/// Matrices [rows, cols], rows <= cols, that go through the iteration together.
struct NewtonSchulzShape {
  std::int64_t rows = 0, cols = 0;
  DType dtype = DType::f32;
  SchulzProducts products = SchulzProducts::plain;

  /// How many matrices make a group: a function of the members above, so that the algorithms of the
  /// products, and with them the bits, do not depend on how many there are.
  std::int64_t group() const;
  /// The same or fewer: how many of `total` go together on this device. Fewer only where bits do not depend on it.
  std::int64_t group(const CudaContext& context, std::int64_t total) const;
  /// Whether the matrices can be rounded to bf16: f32, rows of whole 16-byte accesses, not small.
  bool suits_tensor_cores() const;
  /// Whether symmetric results are formed by half (schulz_products.h).
  bool halves_products() const;
};

/// Scratch of one group. Matrix i of `x` starts at element i rows cols.
struct NewtonSchulzWorkspace {
  NewtonSchulzShape shape;
  TensorView x;                 // [count, rows, cols]
  TensorView other;             // the same; not for bf16
  TensorView gram, polynomial;  // [count, rows, rows]; not for bf16
  TensorView x_high, x_low;     // [count, rows, cols] bf16; for bf16 the iterate and the next one
  TensorView gram_high, gram_low;  // [count, rows, rows] bf16; low only for split
  TensorView polynomial_high, polynomial_low;
  TensorView sums;  // [count, parts] f64
  TensorView blas;

  /// For groups of up to `count` matrices.
  static NewtonSchulzWorkspace take(Arena& arena,
                                    const NewtonSchulzShape& shape,
                                    std::int64_t count);
};

/// Enqueues X / (|X|_F + 1e-7) and `iterations` steps on the first `count` matrices of ws.x; returns where
/// the results are, with bf16 products as bf16, else in the dtype of the matrices. Not for dry streams.
TensorView newton_schulz(CudaContext& context,
                         const NewtonSchulzWorkspace& ws,
                         std::int64_t count,
                         int iterations);

}  // namespace moesaic::cuda
