#pragma once
// Products of row-major matrices, one or a batch of equal ones, through cublasLt.
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic::cuda {

constexpr std::int64_t kBlasWorkspaceBytes = std::int64_t{32} << 20;
/// What multiply() wants of a stream's scratch.
TensorView take_blas_workspace(Arena& arena);

/// d_i = alpha op(a_i) op(b_i) + beta c_i,  op = identity or transpose, for matrices that lie `stride`
/// elements apart.
///
/// Every sum is formed in one order, by one thread block or, for weight gradients (a transposed) with a small result and a
/// long sum, in parts that a second kernel adds in order. The algorithm depends on the members of this struct except `batch`
/// and the data: the bits of a matrix do not depend on how many go together.
struct BlasProduct {
  struct Matrix {
    const void* data = nullptr;
    std::int64_t rows = 0, cols = 0;
    std::int64_t stride = 0;  ///< elements to the next matrix; 0 in a batch of one
    std::int64_t pitch = 0;   ///< elements to the next row; 0 = cols
  };
  Matrix a, b;
  DType input = DType::f32;  ///< of a and b
  void* d = nullptr;
  const void* c = nullptr;    ///< null with beta = 0; may be d; laid out as d
  std::int64_t d_stride = 0;  ///< of c and d
  std::int64_t d_pitch = 0;   ///< of c and d; 0 = n
  DType output = DType::f32;  ///< of c and d: the input's type, or its wider acc_t
  bool transpose_a = false, transpose_b = false;
  double alpha = 1, beta = 0;
  std::int64_t batch = 1;
  std::int64_t nominal_batch = 1;  ///< for which the algorithm is chosen

  std::int64_t m() const { return transpose_a ? a.cols : a.rows; }
  std::int64_t k() const { return transpose_a ? a.rows : a.cols; }
  std::int64_t n() const { return transpose_b ? b.rows : b.cols; }
};

/// Enqueues the product. f64 sums in f64, f32 and bf16 in f32 (never TF32). k must not be 0. Not for
/// dry streams.
void multiply(CudaContext& context, const BlasProduct& product, TensorView workspace);

}  // namespace moesaic::cuda
