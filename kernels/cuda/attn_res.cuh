#pragma once
// What both directions of the attention over depth share. The sources' pointers travel as a kernel argument.
#include <vector>

#include "kernels/cuda/vectors.cuh"
#include "kernels/ops/attn_res.h"

namespace moesaic::cuda {

constexpr int kAttnResMaxSources = 512;
// The one-pass kernels: bf16, columns in 16-byte accesses, a row in the registers of one block.
constexpr int kOnePassSources = 32;
constexpr std::int64_t kOnePassTokens = std::int64_t{1} << 30;
constexpr int kOnePassVector = 8;
constexpr int kOnePassChunks = 4;  // accesses per thread and row
constexpr int kOnePassThreads = 256;
constexpr std::int64_t kOnePassColumns =
    std::int64_t{kOnePassVector} * kOnePassChunks * kOnePassThreads;

template <class T, int Max>
struct SourcePointers {
  const T* v[Max];
};

template <class T, int Max>
SourcePointers<device_t<T>, Max> source_pointers(const std::vector<ConstTensorView>& sources) {
  SourcePointers<device_t<T>, Max> pointers{};
  for (std::size_t i = 0; i < sources.size(); ++i)
    pointers.v[i] = device_data<T>(sources[i]);
  return pointers;
}

/// Whether sizes and places fit the one-pass kernels.
template <class View>
bool fits_one_pass(const std::vector<View>& views, std::int64_t d) {
  bool fits = views.size() <= kOnePassSources && d % kOnePassVector == 0 && d <= kOnePassColumns;
  for (const auto& view : views)
    fits = fits && is_aligned(view.data(), 16);
  return fits;
}
/// Threads of a one-pass block: as few as hold a row.
inline unsigned one_pass_threads(std::int64_t d) {
  const std::int64_t per_thread = std::int64_t{kOnePassVector} * kOnePassChunks;
  return static_cast<unsigned>((d + per_thread * kWarp - 1) / (per_thread * kWarp) * kWarp);
}

using RawVec = Vec<__nv_bfloat16, kOnePassVector>;

/// The accesses of one thread to a row of `vectors` accesses; what lies beyond the row is zero.
__device__ __forceinline__ void load_row(RawVec (&to)[kOnePassChunks],
                                         const __nv_bfloat16* row,
                                         int vectors) {
#pragma unroll
  for (int k = 0; k < kOnePassChunks; ++k) {
    const int at = static_cast<int>(threadIdx.x + k * blockDim.x);
    to[k] = at < vectors ? load<kOnePassVector>(row + at * kOnePassVector) : RawVec{};
  }
}

/// query (.) norm in shared memory, 2 x `vectors`: two planes, so that lanes meet no bank conflicts. Each thread writes the
/// accesses that load_row() gives it.
template <class W>
__device__ __forceinline__ void fold_query(float4* planes,
                                           const W* query,
                                           const W* norm,
                                           int vectors) {
  for (int at = static_cast<int>(threadIdx.x); at < vectors; at += static_cast<int>(blockDim.x)) {
    const auto q = load<kOnePassVector>(query + at * kOnePassVector);
    const auto w = load<kOnePassVector>(norm + at * kOnePassVector);
    float om[kOnePassVector];
#pragma unroll
    for (int j = 0; j < kOnePassVector; ++j)
      om[j] = widen<float>(q.v[j]) * widen<float>(w.v[j]);
    planes[at] = {om[0], om[1], om[2], om[3]};
    planes[vectors + at] = {om[4], om[5], om[6], om[7]};
  }
}
__device__ __forceinline__ void read_planes(float (&to)[kOnePassVector],
                                            const float4* planes,
                                            int vectors,
                                            int at) {
  const float4 low = planes[at], high = planes[vectors + at];
  to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
  to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

}  // namespace moesaic::cuda
