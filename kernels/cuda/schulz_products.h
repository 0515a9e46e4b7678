#pragma once
// The products of Muon's iteration on bf16 matrices whose results are symmetric, or that multiply by a symmetric matrix: own
// tensor-core kernels, because a library forms both halves of a symmetric result.
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic::cuda {

/// Whether the kernels take iterates [rows, cols], rows <= cols: rows of whole 16-byte accesses, and rows enough for the
/// tiles (256 x 256 of a symmetric result). Beyond one tile they form 3/4 (two tiles), 5/8 (four), ... of the result.
bool can_multiply_schulz(std::int64_t rows, std::int64_t cols);

/// How many of `total` matrices should go together, `most` being allowed: as many as fill the multiprocessors evenly in all
/// products. It has no influence on bits.
std::int64_t schulz_group(const CudaContext& context,
                          std::int64_t rows,
                          std::int64_t cols,
                          std::int64_t total,
                          std::int64_t most);

/// d_i = alpha a_i a_i^T + beta c_i for i < count.
///
///   d  [count, m, m] bf16: tiles on and above the diagonal are formed, the others are their mirror images
///   a  [count, m, k] bf16, m and k multiples of 8
///   c  as d, symmetric; or empty (beta = 0). d must not overlap a or c
///
/// Sums in f32 in ascending order of k, rounded once: an element's bits depend on its operands only.
void multiply_symmetric(CudaContext& context,
                        const TensorView& d,
                        const ConstTensorView& a,
                        const ConstTensorView& c,
                        double alpha,
                        double beta,
                        std::int64_t count);

/// d_i = p_i x_i + beta x_i for i < count.
///
///   d, x  [count, m, n] bf16, not overlapping;  p  [count, m, m] bf16;  m and n multiples of 8
void multiply_wide(CudaContext& context,
                   const TensorView& d,
                   const ConstTensorView& p,
                   const ConstTensorView& x,
                   double beta,
                   std::int64_t count);

}  // namespace moesaic::cuda
