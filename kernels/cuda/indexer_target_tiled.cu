// The target of the indexer's loss on tensor cores: exp(logit - lse) of one head after another, summed over heads in the
// registers of 128 x 128 tiles of (query, key) pairs; no head's probabilities leave the chip.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/indexer_tiled.h"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/wgmma.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kWidth = 192, kOwn = 128;  // of a key: per head, then shared by the heads
constexpr int kRows = 128, kKeys = 128;
constexpr int kBox = 128 * 64 * 2;  // bytes of 64 channels of 128 rows
constexpr int kBoxes = kWidth / 64;
constexpr int kStages = 2;
constexpr int kGroups = kRows / 64;
constexpr int kThreads = 128 * (kGroups + 1);
constexpr float kLog2e = 1.4426950408889634F;

struct Stage {
  alignas(1024) unsigned char q[kBoxes][kBox], k[kBoxes][kBox];
};
struct Shared {
  Stage stages[kStages];
  std::uint64_t full[kStages], empty[kStages];
};
constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + 1024;  // to align by hand

struct Args {
  float* target;
  const float* lse;
  int heads;
  float scale;
  QueryKeys see;
  SelectionWords selection;
  std::int64_t first, rows;
};

// Heads in order; rows and keys beyond the data arrive as zeros.
__device__ void produce(const CUtensorMap& q,
                        const CUtensorMap& kvb,
                        const CUtensorMap& kr,
                        int heads,
                        Shared& s,
                        std::int64_t row,
                        std::int64_t key) {
  for (int head = 0; head < heads; ++head) {
    const int stage = head % kStages;
    mbarrier_wait(&s.empty[stage], static_cast<std::uint32_t>(head / kStages % 2) ^ 1U);
    auto& to = s.stages[stage];
    mbarrier_arrive_expect(&s.full[stage], 2 * kBoxes * kBox);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box)
      tma_load_3d(to.q[box], &q, &s.full[stage], 64 * box, head, static_cast<int>(row));
#pragma unroll
    for (int box = 0; box < kOwn / 64; ++box)
      tma_load_3d(to.k[box], &kvb, &s.full[stage], 64 * box, head, static_cast<int>(key));
    tma_load_2d(to.k[kOwn / 64], &kr, &s.full[stage], 0, static_cast<int>(key));
  }
}

__device__ void consume(const Args& a, Shared& s, std::int64_t row, std::int64_t key) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp % 4,
            group = static_cast<int>(threadIdx.x) / 128 - 1;
  const std::int64_t mine = row + 64 * group + 16 * warp + lane / 4, end = a.first + a.rows;
  float sums[kKeys / 2] = {};
  const float scale = a.scale * kLog2e;
  for (int head = 0; head < a.heads; ++head) {
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      lse[half] =
          mine + 8 * half < end ? a.lse[head * a.see.queries + mine + 8 * half] * kLog2e : 0;
    const int stage = head % kStages;
    mbarrier_wait(&s.full[stage], static_cast<std::uint32_t>(head / kStages % 2));
    const auto q = swizzled_descriptor<Major::k>(s.stages[stage].q) +
                   descriptor_step(static_cast<std::uint32_t>(group) * 64 * 128);
    const auto k = swizzled_descriptor<Major::k>(s.stages[stage].k);
    float dots[kKeys / 2];
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const auto at = descriptor_step(static_cast<std::uint32_t>(step / 4 * kBox + step % 4 * 32));
      wgmma_ss<Major::k, Major::k>(dots, q + at, k + at, step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(dots);
    mbarrier_arrive(&s.empty[stage]);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i)  // of hidden pairs it may be infinite; they are not stored
      sums[i] += exp2f(dots[i] * scale - lse[i / 2 % 2]);
  }
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    const std::int64_t t = mine + 8 * (i / 2 % 2), c = key + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    if (t < end && c >= a.see.begins[t] && c <= a.see.position(t) && a.selection.holds(t, c))
      a.target[(t - a.first) * a.see.keys + c] = sums[i];
  }
}

// Whether any query of [row, end) sees a key of the tile; all threads call it.
__device__ bool tile_seen(const Args& a, std::int64_t row, std::int64_t end, std::int64_t key) {
  if (key > a.see.position(end - 1) || key + kKeys <= a.see.begins[row]) return false;
  if (a.selection.words == nullptr) return true;
  constexpr int kWords = kKeys / 32;
  bool any = false;
  for (std::int64_t i = threadIdx.x; i < kWords * (end - row); i += kThreads) {
    const std::int64_t word = key / 32 + i % kWords;
    any =
        any || (word < a.selection.per_row &&
                a.selection.words[(row + i / kWords - a.first) * a.selection.per_row + word] != 0);
  }
  return __syncthreads_or(any) != 0;
}

// grid (tiles of keys, tiles of queries)
__global__ void __launch_bounds__(kThreads, 1)
    target_kernel(const __grid_constant__ CUtensorMap q,
                  const __grid_constant__ CUtensorMap kvb,
                  const __grid_constant__ CUtensorMap kr,
                  Args a) {
  extern __shared__ unsigned char raw[];
  auto& s =
      *reinterpret_cast<Shared*>((reinterpret_cast<std::uintptr_t>(raw) + 1023) / 1024 * 1024);
  const std::int64_t key = std::int64_t{blockIdx.x} * kKeys,
                     row = a.first + std::int64_t{blockIdx.y} * kRows;
  if (!tile_seen(a, row, min(a.first + a.rows, row + kRows), key)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&s.full[i], 1);
      mbarrier_init(&s.empty[i], 128 * kGroups);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    produce(q, kvb, kr, a.heads, s, row, key);
  } else if (threadIdx.x >= 128) {
    consume(a, s, row, key);
  }
}

}  // namespace

bool target_tiled_takes(const IndexerLoss& op) {
  return op.q.dtype() == DType::bf16 && op.q.dim(2) == kWidth && op.dn == kOwn &&
         can_map(op.q.data(), kWidth, DType::bf16) &&
         can_map(op.kvb.data(), op.kvb.dim(2), DType::bf16) &&
         can_map(op.kr.data(), kWidth - kOwn, DType::bf16) &&
         op.kvb.dim(0) < (std::int64_t{1} << 31);
}

void target_tiled(const CudaContext& context,
                  float* target,
                  const IndexerLoss& op,
                  const QueryKeys& see,
                  const SelectionWords& selection,
                  std::int64_t first,
                  std::int64_t rows) {
  const std::int64_t heads = op.q.dim(1), keys = see.keys, width = op.kvb.dim(2);
  const auto rows_map = [&](const ConstTensorView& x, std::int64_t columns) {
    return make_tensor_map(x.data(),
                           DType::bf16,
                           {.sizes = {columns, heads, x.dim(0)},
                            .strides = {columns, heads * columns},
                            .box = {64, 1, 128}});
  };
  const CUtensorMap q = rows_map(op.q, kWidth), kvb = rows_map(op.kvb, width),
                    kr = make_tensor_map(op.kr.data(),
                                         DType::bf16,
                                         {.sizes = {kWidth - kOwn, keys},
                                          .strides = {kWidth - kOwn},
                                          .box = {64, 128}});
  const Args args{target,
                  op.lse.as<float>(),
                  static_cast<int>(heads),
                  static_cast<float>(op.scale),
                  see,
                  selection,
                  first,
                  rows};
  MOESAIC_CUDA_CALL(cudaFuncSetAttribute(
      target_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const dim3 grid(static_cast<unsigned>((keys + kKeys - 1) / kKeys),
                  static_cast<unsigned>((rows + kRows - 1) / kRows));
  target_kernel<<<grid, kThreads, kSharedBytes, native_stream(context)>>>(q, kvb, kr, args);
  check_launch("kernel indexer target, tiled");
}

}  // namespace moesaic::cuda
