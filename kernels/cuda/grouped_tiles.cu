#include <cstdio>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/grouped_tiles.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

struct ListArgs {
  const std::int32_t* offsets;
  const std::int32_t* slots;
  std::int32_t experts;
  std::int64_t rows_bound, num_slots;
  TileRule rule;
  GroupTile* tiles;
  std::int32_t* num_tiles;
};

__device__ __forceinline__ void check_expert(
    const ListArgs& a, int e, std::int32_t begin, std::int32_t end, std::int32_t slot) {
  const bool inside = 0 <= begin && begin <= end && end <= a.rows_bound;
  if (inside && (begin == end || (0 <= slot && slot < a.num_slots))) return;
  printf("grouped linear: expert %d has rows [%d, %d) of %lld and slot %d of %lld\n",
         e,
         begin,
         end,
         static_cast<long long>(a.rows_bound),
         slot,
         static_cast<long long>(a.num_slots));
  __trap();
}

// Sum over the threads before this one, and over all.
__device__ __forceinline__ int exclusive_sum(int x, int& total) {
  __shared__ int of_warp[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  int upto = x;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffU, upto, offset);
    if (lane >= offset) upto += other;
  }
  if (lane == kWarp - 1) of_warp[warp] = upto;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += of_warp[w];
    total += of_warp[w];
  }
  __syncthreads();  // the next chunk of experts writes of_warp again
  return before + upto - x;
}

__global__ void __launch_bounds__(kThreads) list_kernel(ListArgs a) {
  int listed = 0;
  for (int base = 0; base < a.experts; base += kThreads) {
    const int e = base + static_cast<int>(threadIdx.x);
    std::int32_t begin = 0, rows = 0, slot = 0;
    if (e < a.experts) {
      begin = a.offsets[e];
      const std::int32_t end = a.offsets[e + 1];
      slot = a.slots[e];
      check_expert(a, e, begin, end, slot);
      rows = end - begin;
    }
    const std::int32_t count = (rows + a.rule.max_rows - 1) / a.rule.max_rows;
    int total;
    const int first = listed + exclusive_sum(count, total);
    listed += total;
    if (count == 0) continue;
    const std::int32_t step = a.rule.rows_step,
                       each = ((rows + count - 1) / count + step - 1) / step * step;
    for (std::int32_t i = 0; i < count; ++i) {
      a.tiles[first + i] = {begin + i * each, min(each, rows - i * each), slot, first, count, {}};
    }
  }
  if (threadIdx.x == 0) *a.num_tiles = listed;
}

std::int64_t tile_bound(std::int64_t experts, std::int64_t rows_bound, const TileRule& rule) {
  return experts + rows_bound / rule.max_rows;
}

}  // namespace

TensorView take_tile_scratch(CudaContext& context,
                             const ConstTensorView& slot_of_expert,
                             std::int64_t rows_bound,
                             const TileRule& rule) {
  const std::int64_t tiles = tile_bound(slot_of_expert.dim(0), rows_bound, rule);
  return context.scratch.take({(tiles + 1) * static_cast<std::int64_t>(sizeof(GroupTile))},
                              DType::u8,
                              "grouped_gemm.tiles");
}

GroupTiles make_tiles(CudaContext& context,
                      const TensorView& scratch,
                      const ConstTensorView& offsets,
                      const ConstTensorView& slot_of_expert,
                      std::int64_t rows_bound,
                      std::int64_t num_slots,
                      const TileRule& rule) {
  MOESAIC_CHECK(rows_bound < kAllRows, "too many rows for 32-bit row numbers");
  const std::int64_t experts = slot_of_expert.dim(0);
  auto* count =
      reinterpret_cast<std::int32_t*>(scratch.data());  // before the list, in a tile's place
  auto* tiles = reinterpret_cast<GroupTile*>(scratch.data()) + 1;
  const ListArgs args{offsets.as<std::int32_t>(),
                      slot_of_expert.as<std::int32_t>(),
                      static_cast<std::int32_t>(experts),
                      rows_bound,
                      num_slots,
                      rule,
                      tiles,
                      count};
  list_kernel<<<1, kThreads, 0, native_stream(context)>>>(args);
  check_launch("grouped_tiles");
  return {tiles, count, tile_bound(experts, rows_bound, rule), rule.max_rows};
}

}  // namespace moesaic::cuda
