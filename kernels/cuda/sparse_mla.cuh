#pragma once
// What the sparse MLA kernels share: sizes, the largest logits, the row statistics of the backward, and the sums of the
// keys' gradients, whose bits do not depend on the order in which queries arrive.
#include <cstdint>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/ops/sparse_mla.h"

namespace moesaic::cuda {

struct SparseMlaSizes {
  std::int64_t queries = 0, keys = 0, heads = 0, width = 0, dc = 0, k = 0, documents = 0;
};
template <class Op>
SparseMlaSizes sparse_mla_sizes(const Op& op) {
  return {op.q.dim(0),
          op.kv.dim(0),
          op.q.dim(1),
          op.q.dim(2),
          op.o.dim(2),
          op.selected.dim(1),
          op.cu_seqlens.dim(0) - 1};
}

/// max_logit[h] = max over the rows of maxima [H, Tq], combined with what it holds when `accumulate`.
void combine_row_maxima(cudaStream_t stream,
                        TensorView max_logit,
                        ConstTensorView maxima,
                        bool accumulate);

/// Device memory. Contributions are counted in units of 2^-exponent.
struct KeySumState {
  std::uint32_t
      largest_norm;  ///< bits of the largest |kv(s)[:dc]|; NaN is larger than every number
  std::int32_t exponent;
  std::int32_t overflow;  ///< not 0: dkv becomes NaN
};

/// Where kernels add what queries contribute to the keys' gradients (argument at SparseMlaBackward).
template <class A>
struct KeySumsView {
  void* sums;  ///< [Tk, width]: i64, or A with float atomics
  KeySumState* state;
  const A* bounds;  ///< [T]: no query's contribution to an element is larger than twice this
  bool integer;

  __device__ __forceinline__ void flag() const { state->overflow = 1; }
};

/// x 2^exponent to the nearest integer.
struct KeySumScale {
  double wide;
  float low, high;  // the product of two floats, as their own range is too small
  __device__ explicit KeySumScale(int exponent)
      : wide(ldexp(1.0, exponent)),
        low(ldexpf(1.0F, exponent / 2)),
        high(ldexpf(1.0F, exponent - exponent / 2)) {}
  __device__ __forceinline__ long long units(float x) const {
    return __float2ll_rn(x * low * high);
  }
  __device__ __forceinline__ long long units(double x) const { return __double2ll_rn(x * wide); }
};
__device__ __forceinline__ void add_units(void* sums, std::int64_t at, long long n) {
  atomicAdd(static_cast<unsigned long long*>(sums) + at, static_cast<unsigned long long>(n));
}

/// Scratch of a backward pass, taken before a dry run returns.
struct KeySumsMemory {
  TensorView state, bounds, delta, log_sum, sums;
  static KeySumsMemory take(Arena& scratch, const SparseMlaBackward& op);
};
/// Fills delta = <d_o, o> and the log-sum-exp times `log_sum_factor` (+inf for rows without keys), both [H, T] in the
/// statistics type; the bounds, the unit, and zeros for the sums.
void prepare_key_sums(cudaStream_t stream,
                      const KeySumsMemory& memory,
                      const SparseMlaBackward& op,
                      double log_sum_factor);
template <class A>
KeySumsView<A> key_sums_view(const KeySumsMemory& memory, const SparseMlaBackward& op) {
  return {memory.sums.data(),
          reinterpret_cast<KeySumState*>(memory.state.data()),
          memory.bounds.as<A>(),
          op.key_sums == KeySums::integer};
}
/// dkv from the sums.
void finish_key_sums(cudaStream_t stream, const KeySumsMemory& memory, const SparseMlaBackward& op);

/// The plain kernels: any sizes and dtypes.
void sparse_mla_plain(CudaContext& context, const SparseMlaForward& op);
void sparse_mla_plain(CudaContext& context, const SparseMlaBackward& op);

}  // namespace moesaic::cuda
