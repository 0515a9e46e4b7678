// Gradients of the index scores on tensor cores, from dI = d loss / d score. Both kernels make the dots of 64 heads x 64
// keys of one query again, turn them into da = w dI 1[dot > 0] in the accumulators, and multiply those as the left operand:
//   keys     a warpgroup owns 64 keys and walks over queries:   dk += da^T q
//   queries  a warpgroup owns a query and walks over its keys:  dq += da k,  dw = sum of dI relu(dot)
// Sums run in the order of queries (keys).
#include <cmath>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/indexer_tiled.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kHeads = 64, kDim = 128, kSteps = kDim / 16;
constexpr int kGroups = 2;  // consumer warpgroups
constexpr int kKeys = 64;   // per warpgroup, and per tile of the other kernel
constexpr int kStages = 5;
constexpr int kThreads = 128 * (kGroups + 1);
constexpr int kHalf = 64 * 64 * 2;  // bytes of 64 channels of 64 rows

struct Stage {
  alignas(
      1024) unsigned char rows[2 *
                               kHalf];  // channels 0 … 63, then 64 … 127; 128-byte rows, swizzled
};
struct Shared {
  Stage stages[kStages];
  alignas(16) float w[kStages][kHeads];
  std::uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + 1024;  // to align by hand

struct Args {
  const __nv_bfloat16* qi;
  const __nv_bfloat16* ki;
  const void* w;
  bool wide_w;
  float factor;
  const float* d_index;  // [rows, keys]
  QueryKeys see;
  SelectionWords selection;
  std::int64_t first, rows;
  float* parts;  // [chunks, keys, kDim]
  bool fresh;    // parts hold nothing yet
  std::int64_t chunk_queries;
  __nv_bfloat16* dqi;
  void* dw;

  __device__ __forceinline__ float weight(std::int64_t t, int head) const {
    const std::int64_t i = t * kHeads + head;
    return factor * (wide_w ? static_cast<const float*>(w)[i]
                            : __bfloat162float(static_cast<const __nv_bfloat16*>(w)[i]));
  }
  __device__ __forceinline__ float d(std::int64_t t, std::int64_t begin, std::int64_t s) const {
    return s >= begin && s <= see.position(t) ? d_index[(t - first) * see.keys + s] : 0;
  }
};

struct Ring {
  int stage = 0;
  std::uint32_t parity;
  __device__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// `producers`: threads that arrive when a stage is full.
__device__ Shared& shared_memory(unsigned char* raw, std::uint32_t producers) {
  auto& s =
      *reinterpret_cast<Shared*>((reinterpret_cast<std::uintptr_t>(raw) + 1023) / 1024 * 1024);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&s.full[i], producers);
      mbarrier_init(&s.empty[i], 128 * kGroups);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  return s;
}

// Calls f(i) for those of [from, to) for which wanted(i), in order. A whole warp calls it; each lane asks for one of 32.
template <class Wanted, class F>
__device__ __forceinline__ void for_wanted(std::int64_t from,
                                           std::int64_t to,
                                           const Wanted& wanted,
                                           F&& f) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t base = from; base < to; base += kWarp) {
    const bool mine = base + lane < to && wanted(base + lane);
    for (unsigned set = __ballot_sync(0xffffffffU, mine); set != 0; set &= set - 1)
      f(base + __ffs(static_cast<int>(set)) - 1);
  }
}

// Rows 16 w + g and + 8 of 64 rows of kDim, as the left operand of every step; rows from `valid` on are 0.
__device__ __forceinline__ void load_left(std::uint32_t (&a)[kSteps][4],
                                          const __nv_bfloat16* rows,
                                          std::int64_t valid) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp % 4;
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i % 2),
              column = 16 * (i / 4) + 8 * (i / 2 % 2) + 2 * (lane % 4);
    a[i / 4][i % 4] =
        row < valid ? *reinterpret_cast<const std::uint32_t*>(rows + row * kDim + column) : 0U;
  }
}

// dots = left (64 x kDim) times the 64 rows of the stage, transposed.
__device__ __forceinline__ void multiply(float (&dots)[32],
                                         const std::uint32_t (&left)[kSteps][4],
                                         const Stage& stage) {
  const auto right = swizzled_descriptor<Major::k>(stage.rows);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
    wgmma_rs<Major::k>(
        dots,
        left[step],
        right + descriptor_step(static_cast<std::uint32_t>(step / 4 * kHalf + step % 4 * 32)),
        step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(dots);
}

// sum (64 x kDim) += da (64 x 64, in the layout of dots) times the rows of the stage.
__device__ __forceinline__ void accumulate(float (&sum)[64],
                                           const float (&da)[32],
                                           const Stage& stage) {
  std::uint32_t left[4][4];
#pragma unroll
  for (int i = 0; i < 16; ++i)
    left[i / 4][i % 4] = pack_bf16(da[2 * i], da[2 * i + 1]);
  const auto right = swizzled_descriptor<Major::mn>(stage.rows, kHalf);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma_rs<Major::mn>(
        sum, left[step], right + descriptor_step(static_cast<std::uint32_t>(step) * 2048), true);
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(sum);
}

// grid (blocks of kGroups x 64 keys, chunks of the queries [first, first + rows)): parts[chunk] += for the chunk's queries.
__global__ void __launch_bounds__(kThreads, 1)
    keys_kernel(const __grid_constant__ CUtensorMap queries, Args a) {
  extern __shared__ unsigned char raw[];
  auto& s = shared_memory(raw, kWarp);
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp % 4;
  const std::int64_t block = std::int64_t{blockIdx.x} * kGroups * kKeys,
                     chunk = a.first + std::int64_t{blockIdx.y} * a.chunk_queries,
                     seeing = block - a.see.position(0),  // earlier queries see none of the keys
      from = max(chunk, seeing), to = min(a.first + a.rows, chunk + a.chunk_queries);
  // Nearly all blocks of packed documents: no query of the chunk sees these keys, and the part keeps its sum.
  if (!a.fresh && (from >= to || a.see.begins[from] >= block + kGroups * kKeys)) return;
  const auto wanted = [&](std::int64_t t) {
    if (a.see.begins[t] >= block + kGroups * kKeys || a.see.position(t) < block) return false;
    if (a.selection.words == nullptr) return true;
    bool any = false;
    for (std::int64_t word = block / 32; word < block / 32 + kGroups * kKeys / 32; ++word)
      any = any || (word < a.selection.per_row &&
                    a.selection.words[(t - a.first) * a.selection.per_row + word] != 0);
    return any;
  };
  if (threadIdx.x < 128) {
    set_max_registers_down<40>();
    if (threadIdx.x >= kWarp) return;
    Ring ring{0, 1};
    for_wanted(from, to, wanted, [&](std::int64_t t) {
      mbarrier_wait(&s.empty[ring.stage], ring.parity);
      for (int j = lane; j < kHeads; j += kWarp)
        s.w[ring.stage][j] = a.weight(t, j);
      // Every lane says that its weights are there.
      if (lane != 0) {
        mbarrier_arrive(&s.full[ring.stage]);
      } else {
        mbarrier_arrive_expect(&s.full[ring.stage], 2 * kHalf);
        auto* rows = s.stages[ring.stage].rows;
        tma_load_3d(rows, &queries, &s.full[ring.stage], 0, 0, static_cast<int>(t));
        tma_load_3d(rows + kHalf, &queries, &s.full[ring.stage], 64, 0, static_cast<int>(t));
      }
      ring.next();
    });
  } else {
    set_max_registers_up<232>();
    const std::int64_t mine = block + (static_cast<std::int64_t>(threadIdx.x) / 128 - 1) * kKeys,
                       row = mine + 16 * warp + lane / 4;
    std::uint32_t left[kSteps][4];
    load_left(left, a.ki + mine * kDim, a.see.keys - mine);
    float sum[64];
    float* part = a.parts + std::int64_t{blockIdx.y} * a.see.keys * kDim;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const std::int64_t key = row + 8 * (i / 2 % 2);
      sum[i] = !a.fresh && key < a.see.keys
                   ? part[key * kDim + 8 * (i / 4) + 2 * (lane % 4) + i % 2]
                   : 0;
    }
    Ring ring{0, 0};
    for_wanted(from, to, wanted, [&](std::int64_t t) {
      const std::int64_t begin = a.see.begins[t];
      const float d[2] = {a.d(t, begin, row), a.d(t, begin, row + 8)};
      mbarrier_wait(&s.full[ring.stage], ring.parity);
      float dots[32];
      multiply(dots, left, s.stages[ring.stage]);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 w = *reinterpret_cast<const float2*>(s.w[ring.stage] + 8 * j + 2 * (lane % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          dots[4 * j + i] = dots[4 * j + i] > 0 ? (i % 2 == 0 ? w.x : w.y) * d[i / 2] : 0;
      }
      accumulate(sum, dots, s.stages[ring.stage]);
      mbarrier_arrive(&s.empty[ring.stage]);
      ring.next();
    });
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const std::int64_t key = row + 8 * (i / 2 % 2);
      if (key < a.see.keys) part[key * kDim + 8 * (i / 4) + 2 * (lane % 4) + i % 2] = sum[i];
    }
  }
}

// One block per kGroups neighbouring queries; both walk over the same tiles of 64 keys.
__global__ void __launch_bounds__(kThreads, 1)
    queries_kernel(const __grid_constant__ CUtensorMap keys, Args a) {
  extern __shared__ unsigned char raw[];
  auto& s = shared_memory(raw, 1);
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp % 4;
  const std::int64_t t0 = a.first +
                          std::int64_t{gridDim.x - 1 - blockIdx.x} * kGroups,  // the longest first

      end = min(a.first + a.rows, t0 + kGroups);
  const std::int64_t from = a.see.begins[t0] / kKeys, to = a.see.position(end - 1) / kKeys + 1;
  const auto wanted = [&](std::int64_t tile) {
    if (a.selection.words == nullptr) return true;
    bool any = false;
    for (std::int64_t t = t0; t < end; ++t) {
      for (std::int64_t word = tile * 2; word < tile * 2 + 2; ++word)
        any = any || (word < a.selection.per_row &&
                      a.selection.words[(t - a.first) * a.selection.per_row + word] != 0);
    }
    return any;
  };
  if (threadIdx.x < 128) {
    set_max_registers_down<40>();
    if (threadIdx.x >= kWarp) return;
    Ring ring{0, 1};
    for_wanted(from, to, wanted, [&](std::int64_t tile) {
      mbarrier_wait(&s.empty[ring.stage], ring.parity);
      if (lane == 0) {
        mbarrier_arrive_expect(&s.full[ring.stage], 2 * kHalf);
        auto* rows = s.stages[ring.stage].rows;
        tma_load_2d(rows, &keys, &s.full[ring.stage], 0, static_cast<int>(tile * kKeys));
        tma_load_2d(rows + kHalf, &keys, &s.full[ring.stage], 64, static_cast<int>(tile * kKeys));
      }
      ring.next();
    });
  } else {
    set_max_registers_up<232>();
    const std::int64_t t = t0 + static_cast<std::int64_t>(threadIdx.x) / 128 - 1;
    const bool live = t < end;
    const int head = 16 * warp + lane / 4;
    std::uint32_t left[kSteps][4];
    load_left(left, a.qi + t * kHeads * kDim, live ? kHeads : 0);
    const float w[2] = {live ? a.weight(t, head) : 0, live ? a.weight(t, head + 8) : 0};
    const std::int64_t begin = live ? a.see.begins[t] : 0;
    float sum[64] = {}, dw[2] = {};
    Ring ring{0, 0};
    for_wanted(from, to, wanted, [&](std::int64_t tile) {
      float d[16];
#pragma unroll
      for (int i = 0; i < 16; ++i)
        d[i] = live ? a.d(t, begin, tile * kKeys + 8 * (i / 2) + 2 * (lane % 4) + i % 2) : 0;
      mbarrier_wait(&s.full[ring.stage], ring.parity);
      float dots[32];
      multiply(dots, left, s.stages[ring.stage]);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int half = i / 2 % 2;
        const float mine = d[2 * (i / 4) + i % 2];
        dw[half] += dots[i] > 0 ? mine * dots[i] : 0;
        dots[i] = dots[i] > 0 ? w[half] * mine : 0;
      }
      accumulate(sum, dots, s.stages[ring.stage]);
      mbarrier_arrive(&s.empty[ring.stage]);
      ring.next();
    });
    if (!live) return;
    auto* out = a.dqi + t * kHeads * kDim;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      *reinterpret_cast<std::uint32_t*>(out + (head + 8 * (i % 2)) * kDim + 8 * (i / 2) +
                                        2 * (lane % 4)) = pack_bf16(sum[2 * i], sum[2 * i + 1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = dw[half];
      total += __shfl_xor_sync(0xffffffffU, total, 1);
      total += __shfl_xor_sync(0xffffffffU, total, 2);
      if (lane % 4 != 0) continue;
      const std::int64_t i = t * kHeads + head + 8 * half;
      if (a.wide_w) {
        static_cast<float*>(a.dw)[i] = a.factor * total;
      } else {
        static_cast<__nv_bfloat16*>(a.dw)[i] = __float2bfloat16_rn(a.factor * total);
      }
    }
  }
}

}  // namespace

bool gradients_tiled_takes(const IndexerLoss& op) {
  return scores_tiled_takes(op.qi, op.ki, op.w) && can_map(op.ki.data(), kDim, DType::bf16) &&
         is_aligned(op.dqi.data(), 4);
}

std::int64_t gradient_chunks(std::int64_t keys) {
  constexpr std::int64_t kWanted = 1024,
                         kMaxChunks = 16;  // blocks of threads; at most 64 MiB of parts
  const std::int64_t blocks = (keys + kGroups * kKeys - 1) / (kGroups * kKeys);
  return std::clamp<std::int64_t>(kWanted / std::max<std::int64_t>(1, blocks), 1, kMaxChunks);
}

void gradients_tiled(const CudaContext& context,
                     const IndexerLoss& op,
                     float* parts,
                     const float* d_index,
                     const QueryKeys& see,
                     const SelectionWords& selection,
                     std::int64_t first,
                     std::int64_t rows,
                     std::int64_t rows_at_a_time,
                     bool fresh) {
  const std::int64_t n = see.keys, chunks = gradient_chunks(n);
  const Args args{.qi = reinterpret_cast<const __nv_bfloat16*>(op.qi.as<bf16>()),
                  .ki = reinterpret_cast<const __nv_bfloat16*>(op.ki.as<bf16>()),
                  .w = op.w.data(),
                  .wide_w = op.w.dtype() == DType::f32,
                  .factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(kHeads * kDim))),
                  .d_index = d_index,
                  .see = see,
                  .selection = selection,
                  .first = first,
                  .rows = rows,
                  .parts = parts,
                  .fresh = fresh,
                  .chunk_queries = (rows_at_a_time + chunks - 1) / chunks,
                  .dqi = reinterpret_cast<__nv_bfloat16*>(op.dqi.as<bf16>()),
                  .dw = op.dw.data()};
  const auto stream = native_stream(context);
  const CUtensorMap queries = make_tensor_map(op.qi.data(),
                                              DType::bf16,
                                              {.sizes = {kDim, kHeads, see.queries},
                                               .strides = {kDim, kHeads * kDim},
                                               .box = {64, kHeads, 1}});
  const CUtensorMap keys = make_tensor_map(
      op.ki.data(), DType::bf16, {.sizes = {kDim, n}, .strides = {kDim}, .box = {64, kKeys}});
  MOESAIC_CUDA_CALL(
      cudaFuncSetAttribute(keys_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  MOESAIC_CUDA_CALL(cudaFuncSetAttribute(
      queries_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  queries_kernel<<<static_cast<unsigned>((rows + kGroups - 1) / kGroups),
                   kThreads,
                   kSharedBytes,
                   stream>>>(keys, args);
  check_launch("kernel indexer_loss: gradient of the queries, tiled");
  const dim3 grid(static_cast<unsigned>((n + kGroups * kKeys - 1) / (kGroups * kKeys)),
                  static_cast<unsigned>(chunks));
  keys_kernel<<<grid, kThreads, kSharedBytes, stream>>>(queries, args);
  check_launch("kernel indexer_loss: gradient of the keys, tiled");
}

}  // namespace moesaic::cuda
