// Index scores on tensor cores. A warpgroup keeps two blocks of 64 keys in registers, as the left operand; the 64 heads of
// one query after another pass through shared memory as the right one (a ring that the copy engine fills). A result
// row is a key, its 64 columns are the heads: relu, weight and the sum over heads happen in the accumulators, and no
// product leaves the chip. The order of a pair's sum does not depend on where the pair stands.
#include <cmath>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/indexer_tiled.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kHeads = 64, kDim = 128, kSteps = kDim / 16;
constexpr int kGroups = 2;                     // consumer warpgroups
constexpr int kBlocks = 2;                     // of 64 keys per warpgroup
constexpr int kKeys = kGroups * kBlocks * 64;  // per block of threads
constexpr int kQueries =
    128;  // per block of threads: many short blocks even out the causal triangle
constexpr int kStages = 5;
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kHalf = kHeads * 64 * 2;  // bytes of 64 channels of a query

struct Stage {
  alignas(
      1024) unsigned char q[2 * kHalf];  // channels 0 … 63, then 64 … 127; 128-byte rows, swizzled
};
struct Shared {
  Stage stages[kStages];
  alignas(16) float w[kStages][kHeads];
  std::uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + 1024;  // to align by hand

struct Args {
  float* scores;
  const __nv_bfloat16* ki;
  const void* w;
  bool wide_w;
  QueryKeys see;
  std::int64_t first, rows, more_than;
  float factor;
};

// Calls f(t, begin) for the queries of [from, to) that need scores of some of the keys [key, key + kKeys), in order. A
// whole warp calls it.
template <class F>
__device__ __forceinline__ void for_queries(
    const Args& a, std::int64_t key, std::int64_t from, std::int64_t to, F&& f) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t base = from; base < to; base += kWarp) {
    const std::int64_t mine = base + lane;
    std::int32_t begin = 0;
    bool wanted = false;
    if (mine < to) {
      begin = a.see.begins[mine];
      const std::int64_t last = a.see.position(mine);
      wanted = begin < key + kKeys && last >= key && last + 1 - begin > a.more_than;
    }
    for (unsigned set = __ballot_sync(0xffffffffU, wanted); set != 0; set &= set - 1) {
      const int i = __ffs(static_cast<int>(set)) - 1;
      f(base + i, __shfl_sync(0xffffffffU, begin, i));
    }
  }
}

__device__ void produce(const CUtensorMap& map,
                        const Args& a,
                        Shared& s,
                        std::int64_t key,
                        std::int64_t from,
                        std::int64_t to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int stage = 0;
  std::uint32_t parity = 1;  // the first round finds every stage free
  for_queries(a, key, from, to, [&](std::int64_t t, std::int32_t) {
    mbarrier_wait(&s.empty[stage], parity);
#pragma unroll
    for (int j = lane; j < kHeads; j += kWarp) {
      const std::int64_t i = t * kHeads + j;
      s.w[stage][j] =
          a.factor * (a.wide_w ? static_cast<const float*>(a.w)[i]
                               : __bfloat162float(static_cast<const __nv_bfloat16*>(a.w)[i]));
    }
    // Every lane says that its weights are there.
    if (lane != 0) {
      mbarrier_arrive(&s.full[stage]);
    } else {
      mbarrier_arrive_expect(&s.full[stage], 2 * kHalf);
      const int row = static_cast<int>(t);
      tma_load_3d(s.stages[stage].q, &map, &s.full[stage], 0, 0, row);
      tma_load_3d(s.stages[stage].q + kHalf, &map, &s.full[stage], 64, 0, row);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  });
}

// Rows 16 w + g and + 8 of the block of 64 keys from `key` on, as the left operand of every step.
__device__ __forceinline__ void load_keys(std::uint32_t (&a)[kSteps][4],
                                          const Args& args,
                                          std::int64_t key) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t s = key + 16 * warp + lane / 4 + 8 * half;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const auto* p = args.ki + s * kDim + 16 * step + 8 * high + 2 * (lane % 4);
        a[step][half + 2 * high] =
            s < args.see.keys ? *reinterpret_cast<const std::uint32_t*>(p) : 0U;
      }
    }
  }
}

// The sums over heads of rows g and g + 8, in every lane of the quad.
__device__ __forceinline__ void sum_heads(float (&sums)[2],
                                          const float (&dots)[kHeads / 2],
                                          const float* w) {
  const int q = static_cast<int>(threadIdx.x) % 4;
  sums[0] = sums[1] = 0;
#pragma unroll
  for (int j = 0; j < kHeads / 8; ++j) {
    const float2 weight = *reinterpret_cast<const float2*>(w + 8 * j + 2 * q);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float a = dots[4 * j + 2 * half], b = dots[4 * j + 2 * half + 1];
      sums[half] += weight.x * (a < 0 ? 0 : a);
      sums[half] += weight.y * (b < 0 ? 0 : b);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sums[half] += __shfl_xor_sync(0xffffffffU, sums[half], 1);
    sums[half] += __shfl_xor_sync(0xffffffffU, sums[half], 2);
  }
}

__device__ void consume(
    const Args& a, Shared& s, std::int64_t key, std::int64_t from, std::int64_t to) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp % 4,
            group = static_cast<int>(threadIdx.x) / 128 - 1;
  const std::int64_t mine = key + group * kBlocks * 64;
  std::uint32_t keys[kBlocks][kSteps][4];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b)
    load_keys(keys[b], a, mine + 64 * b);
  int stage = 0;
  std::uint32_t parity = 0;
  for_queries(a, key, from, to, [&](std::int64_t t, std::int32_t begin) {
    mbarrier_wait(&s.full[stage], parity);
    float dots[kBlocks][kHeads / 2];
    const auto q = swizzled_descriptor<Major::k>(s.stages[stage].q);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        wgmma_rs<Major::k>(dots[b],
                           keys[b][step],
                           q + descriptor_step(step / 4 * kHalf + step % 4 * 32),
                           step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      pin_registers(dots[b]);
    float* row = a.scores + (t - a.first) * a.see.keys;
    const std::int64_t last = a.see.position(t);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      float sums[2];
      sum_heads(sums, dots[b], s.w[stage]);
      const std::int64_t k = mine + 64 * b + 16 * warp + lane / 4 + 8 * (lane % 2);
      if (lane % 4 < 2 && k >= begin && k <= last) row[k] = lane % 2 == 0 ? sums[0] : sums[1];
    }
    mbarrier_arrive(&s.empty[stage]);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  });
}

// grid (blocks of keys, blocks of queries)
__global__ void __launch_bounds__(kThreads, 1)
    scores_kernel(const __grid_constant__ CUtensorMap map, Args a) {
  extern __shared__ unsigned char raw[];
  auto& s =
      *reinterpret_cast<Shared*>((reinterpret_cast<std::uintptr_t>(raw) + 1023) / 1024 * 1024);
  const std::int64_t key = std::int64_t{blockIdx.x} * kKeys;
  const std::int64_t first = a.first + std::int64_t{blockIdx.y} * kQueries,
                     to = min(a.first + a.rows, first + kQueries),
                     from = max(
                         first,
                         key - (a.see.keys - a.see.queries));  // earlier ones see none of the keys
  if (from >= to || a.see.begins[from] >= key + kKeys) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&s.full[i], kWarp);
      mbarrier_init(&s.empty[i], 128 * kGroups);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kWarp) {
    produce(map, a, s, key, from, to);
  } else if (threadIdx.x >= 128) {
    consume(a, s, key, from, to);
  }
}

}  // namespace

bool scores_tiled_takes(const ConstTensorView& qi,
                        const ConstTensorView& ki,
                        const ConstTensorView& w) {
  return qi.dtype() == DType::bf16 && qi.dim(1) == kHeads && qi.dim(2) == kDim &&
         can_map(qi.data(), kDim, DType::bf16) && is_aligned(ki.data(), 16) &&
         (w.dtype() == DType::f32 || w.dtype() == DType::bf16) && ki.dim(0) < (1LL << 31);
}

void scores_tiled(const CudaContext& context,
                  float* scores,
                  const ConstTensorView& qi,
                  const ConstTensorView& ki,
                  const ConstTensorView& w,
                  const QueryKeys& see,
                  std::int64_t first,
                  std::int64_t rows,
                  std::int64_t more_than) {
  const CUtensorMap map = make_tensor_map(qi.data(),
                                          DType::bf16,
                                          {.sizes = {kDim, kHeads, see.queries},
                                           .strides = {kDim, kHeads * kDim},
                                           .box = {64, kHeads, 1}});
  const Args args{scores,
                  reinterpret_cast<const __nv_bfloat16*>(ki.as<bf16>()),
                  w.data(),
                  w.dtype() == DType::f32,
                  see,
                  first,
                  rows,
                  more_than,
                  static_cast<float>(1.0 / std::sqrt(static_cast<double>(kHeads * kDim)))};
  MOESAIC_CUDA_CALL(cudaFuncSetAttribute(
      scores_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const dim3 grid(static_cast<unsigned>((see.keys + kKeys - 1) / kKeys),
                  static_cast<unsigned>((rows + kQueries - 1) / kQueries));
  scores_kernel<<<grid, kThreads, kSharedBytes, native_stream(context)>>>(map, args);
  check_launch("kernel indexer scores, tiled");
}

}  // namespace moesaic::cuda
