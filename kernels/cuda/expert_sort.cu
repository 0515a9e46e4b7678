// Three kernels: ranks and counts within tiles of assignments, sums of the counts over tiles, sums
// over experts. Integers only, and no atomics: the place of an assignment is a function of the
// input.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/expert_sort.h"
#include "kernels/cuda/launch.h"

namespace moesaic::cuda {
namespace {

constexpr int kSegments = 32;       // parts of the tiles that a column of counts is summed in
constexpr int kScanThreads = 1024;  // of the one block that sums over experts

// Every thread compares its expert with all others of the tile; the last one of an expert writes
// its count. The other counts of the tile have been set to zero.
__global__ void __launch_bounds__(kSortTile) rank_kernel(std::int32_t* rank,
                                                         std::int32_t* counts,
                                                         const std::int32_t* topk,
                                                         const std::uint8_t* kept,
                                                         const std::int32_t* token_count,
                                                         std::int64_t k,
                                                         std::int64_t assignments,
                                                         std::int64_t experts) {
  __shared__ __align__(16) std::int32_t tile[kSortTile];
  const std::int64_t a = std::int64_t{blockIdx.x} * kSortTile + threadIdx.x;
  std::int32_t expert = -1;
  const bool counts_at_all = token_count == nullptr || a < *token_count * k;
  if (a < assignments && counts_at_all) {
    expert = topk[a];
    MOESAIC_DEVICE_CHECK(-1 <= expert && expert < experts, "topk holds a number that is no expert");
    if (kept != nullptr && kept[a] == 0) expert = -1;
  }
  tile[threadIdx.x] = expert;
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  const unsigned peers = __match_any_sync(0xffffffffU, expert);
  int before = __popc(peers & ((1U << lane) - 1U));
  int after = __popc(peers >> lane) - 1;
  const auto* quads = reinterpret_cast<const int4*>(tile);
  constexpr int kQuadsPerWarp = kWarp / 4;
  for (int w = 0; w < kSortTile / kWarp; ++w) {
    if (w == warp) continue;
    int equal = 0;
#pragma unroll
    for (int q = 0; q < kQuadsPerWarp; ++q) {
      const int4 v = quads[w * kQuadsPerWarp + q];
      equal += (v.x == expert) + (v.y == expert) + (v.z == expert) + (v.w == expert);
    }
    if (w < warp) {
      before += equal;
    } else {
      after += equal;
    }
  }
  if (a >= assignments) return;
  rank[a] = expert < 0 ? -1 : before;
  if (expert >= 0 && after == 0) counts[std::int64_t{blockIdx.x} * experts + expert] = before + 1;
}

// counts [tiles, experts] <- what earlier tiles hold of the expert;  offsets[expert + 1] <- its
// total.
__global__ void __launch_bounds__(kWarp* kSegments) sum_tiles_kernel(std::int32_t* counts,
                                                                     std::int32_t* offsets,
                                                                     std::int64_t tiles,
                                                                     std::int64_t experts) {
  __shared__ std::int32_t sums[kSegments][kWarp + 1];
  const std::int64_t expert = std::int64_t{blockIdx.x} * kWarp + threadIdx.x;
  const std::int64_t per_segment = (tiles + kSegments - 1) / kSegments;
  const std::int64_t begin = threadIdx.y * per_segment, end = min(tiles, begin + per_segment);
  std::int32_t sum = 0;
  if (expert < experts) {
#pragma unroll 8
    for (std::int64_t i = begin; i < end; ++i)
      sum += counts[i * experts + expert];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (expert >= experts) return;
  std::int32_t before = 0;
  for (unsigned s = 0; s < threadIdx.y; ++s)
    before += sums[s][threadIdx.x];
#pragma unroll 8
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int32_t own = counts[i * experts + expert];
    counts[i * experts + expert] = before;
    before += own;
  }
  if (threadIdx.y == kSegments - 1) offsets[expert + 1] = before;
}

// offsets [experts + 1]: from totals (from element 1 on) to their running sum. One block.
__global__ void __launch_bounds__(kScanThreads)
    sum_experts_kernel(std::int32_t* offsets, std::int64_t experts) {
  __shared__ std::int32_t warps[kScanThreads / kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const unsigned lane = threadIdx.x % kWarp;
  std::int32_t carry = 0;
  if (threadIdx.x == 0) offsets[0] = 0;
  for (std::int64_t begin = 0; begin < experts; begin += kScanThreads) {
    const std::int64_t e = begin + threadIdx.x;
    std::int32_t sum = e < experts ? offsets[e + 1] : 0;
#pragma unroll
    for (unsigned offset = 1; offset < kWarp; offset *= 2) {
      const std::int32_t other = __shfl_up_sync(0xffffffffU, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (lane == kWarp - 1) warps[warp] = sum;
    __syncthreads();
    std::int32_t before = carry;
    for (int w = 0; w < kScanThreads / kWarp; ++w) {
      if (w < warp) before += warps[w];
      carry += warps[w];
    }
    if (e < experts) offsets[e + 1] = before + sum;
    __syncthreads();  // the next round writes warps again
  }
}

std::int64_t tiles_of(std::int64_t assignments) {
  return (assignments + kSortTile - 1) / kSortTile;
}

}  // namespace

TensorView take_sort_scratch(Arena& arena, std::int64_t assignments, std::int64_t experts) {
  return arena.take({tiles_of(assignments), experts}, DType::i32, "expert_sort.counts");
}

ExpertSort sort_by_expert(CudaContext& context,
                          TensorView rank,
                          TensorView offsets,
                          TensorView scratch,
                          const ConstTensorView& topk,
                          const ConstTensorView& kept,
                          const ConstTensorView& token_count) {
  const std::int64_t experts = offsets.dim(0) - 1, assignments = topk.numel(),
                     tiles = tiles_of(assignments);
  const auto stream = native_stream(context);
  const ExpertSort sort{
      rank.as<std::int32_t>(), scratch.as<std::int32_t>(), offsets.as<std::int32_t>(), experts};
  if (assignments > 0) {
    zero_tensor(scratch, context.stream);
    rank_kernel<<<static_cast<unsigned>(tiles), kSortTile, 0, stream>>>(
        sort.rank,
        sort.before,
        topk.as<std::int32_t>(),
        kept.as<std::uint8_t>(),
        token_count.as<std::int32_t>(),
        topk.dim(1),
        assignments,
        experts);
    check_launch("kernel expert_sort: ranks");
  }
  sum_tiles_kernel<<<static_cast<unsigned>((experts + kWarp - 1) / kWarp),
                     dim3(kWarp, kSegments),
                     0,
                     stream>>>(sort.before, sort.offsets, tiles, experts);
  check_launch("kernel expert_sort: sums over tiles");
  sum_experts_kernel<<<1, kScanThreads, 0, stream>>>(sort.offsets, experts);
  check_launch("kernel expert_sort: sums over experts");
  return sort;
}

}  // namespace moesaic::cuda
