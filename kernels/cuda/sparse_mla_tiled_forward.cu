// Sparse MLA forward on tensor cores. One warpgroup gathers tiles of 64 keys into a ring of two; two form the logits of
// their 32 keys each, exchange the largest, write their probabilities to shared memory, and then add the values of their
// 256 channels each over all 64 keys. The gather, at what the second-level cache delivers, takes longer than the products:
// so a tile's products need not overlap with the next tile's, which would hold both stages of the ring.
#include "kernels/cuda/sparse_mla_tiled.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kStages = 2;
constexpr int kGroups = 2;  // that multiply
constexpr int kThreads = 128 * (kGroups + 1), kConsumers = 128 * kGroups;
constexpr int kOwnKeys = kGatherKeys / kGroups, kOwnChannels = kLatent / kGroups;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kBarrier = 1;

struct Shared {
  alignas(1024) unsigned char q[kWidthBytes], kv[kStages][kWidthBytes], p[kColumnBlock];
  float row[kGroups][kGatherRows];  // what the warpgroups tell each other
  std::uint64_t query, full[kStages], empty[kStages];
};
static_assert(sizeof(Shared) + kGatherSlack <= 227 * 1024);

__device__ __forceinline__ float quad_largest(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}
__device__ __forceinline__ float quad_total(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

__device__ void produce(Shared& s, const __nv_bfloat16* kv, const GatherBlock& block) {
  for (int i = 0; i < block.tiles; ++i) {
    const int stage = i % kStages;
    mbarrier_wait(&s.empty[stage], static_cast<std::uint32_t>(i / kStages % 2) ^ 1U);
    gather_tile<128>(s.kv[stage], kv, block.list + i * kGatherKeys, static_cast<int>(threadIdx.x));
    cp_async_arrive(&s.full[stage]);
  }
}

// A thread's two rows, r = 0, 1, are 8 apart; of its warpgroup's 32 keys it has columns 8 j + column + e.
__device__ void consume(Shared& s,
                        const GatherProblem& p,
                        const GatherOutputs& out,
                        const GatherBlock& block) {
  const int group = static_cast<int>(threadIdx.x) / 128 - 1,
            lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) % 128 / kWarp;
  const int r0 = warp * 16 + lane / 4, column = lane % 4 * 2;
  const float scale = p.scale * kLog2OfE;
  const GatherRow rows[2] = {{p, block, r0}, {p, block, r0 + 8}};
  const std::uint32_t bits[2] = {rows[0].bit(), rows[1].bit()};
  const std::uint64_t q = swizzled_descriptor<Major::k>(s.q),
                      probabilities = swizzled_descriptor<Major::k>(s.p);
  float o[kOwnChannels / 2] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};

  if (block.tiles > 0) mbarrier_wait(&s.query, 0);
  for (int i = 0; i < block.tiles; ++i) {
    const int stage = i % kStages;
    uint2 entries[kOwnKeys / 8];
#pragma unroll
    for (int j = 0; j < kOwnKeys / 8; ++j)
      entries[j] = *reinterpret_cast<const uint2*>(block.list + i * kGatherKeys + group * kOwnKeys +
                                                   8 * j + column);
    mbarrier_wait(&s.full[stage], static_cast<std::uint32_t>(i / kStages % 2));
    fence_proxy_async();
    float x[kOwnKeys / 2];
    wgmma_fence();
    gather_logits<kWidthBlocks, kOwnKeys>(x,
                                          q,
                                          swizzled_descriptor<Major::k>(s.kv[stage]) +
                                              descriptor_step(group * kOwnKeys * kGatherRowBytes));
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(x);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float seen = -INFINITY;
#pragma unroll
      for (int j = 0; j < kOwnKeys / 8; ++j) {
        float* y = x + 4 * j + 2 * r;
        if ((entries[j].x & bits[r]) == 0) y[0] = -INFINITY;
        if ((entries[j].y & bits[r]) == 0) y[1] = -INFINITY;
        seen = fmaxf(seen, fmaxf(y[0], y[1]));
      }
      seen = quad_largest(seen);
      if (column == 0) s.row[group][r0 + 8 * r] = seen;
    }
    named_barrier_sync(kBarrier, kConsumers);
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = r0 + 8 * r;
      const float seen = fmaxf(largest[r], fmaxf(s.row[0][row], s.row[1][row]));
      const float base = seen == -INFINITY ? 0.0F : seen * scale;  // nothing seen yet: all zero
      shrink[r] = fast_exp2(largest[r] * scale - base);
      largest[r] = seen;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kOwnKeys / 8; ++j) {
        float* y = x + 4 * j + 2 * r;
        y[0] = fast_exp2(fmaf(y[0], scale, -base));
        y[1] = fast_exp2(fmaf(y[1], scale, -base));
        sum += y[0] + y[1];
        const auto at = static_cast<std::uint32_t>(row * kGatherRowBytes +
                                                   2 * (group * kOwnKeys + 8 * j + column));
        *reinterpret_cast<std::uint32_t*>(s.p + swizzled_128(at)) = pack_bf16(y[0], y[1]);
      }
      total[r] = total[r] * shrink[r] + sum;
    }
#pragma unroll
    for (int j = 0; j < kOwnChannels / 2; ++j)
      o[j] *= shrink[j % 4 / 2];
    fence_proxy_async();
    named_barrier_sync(kBarrier, kConsumers);
    const std::uint64_t values = swizzled_descriptor<Major::mn>(
        s.kv[stage] + group * (kOwnChannels / kGatherColumns) * kColumnBlock, kColumnBlock);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGatherKeys / 16; ++k)
      wgmma_ss<Major::k, Major::mn>(o,
                                    probabilities + descriptor_step(k * 32),
                                    values + descriptor_step(k * 16 * kGatherRowBytes),
                                    true);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(o);
    mbarrier_arrive(&s.empty[stage]);
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] = quad_total(total[r]);
    if (column == 0) s.row[group][r0 + 8 * r] = total[r];
  }
  named_barrier_sync(kBarrier, kConsumers);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = s.row[0][r0 + 8 * r] + s.row[1][r0 + 8 * r];
    if (!rows[r].exists) continue;
    const std::int64_t t = block.queries.row + rows[r].query;
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
    __nv_bfloat16* to =
        out.o + (t * p.heads + rows[r].head) * kLatent + group * kOwnChannels + column;
#pragma unroll
    for (int j = 0; j < kOwnChannels / 8; ++j)
      *reinterpret_cast<std::uint32_t*>(to + 8 * j) =
          pack_bf16(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
    if (group != 0 || column != 0) continue;
    const std::int64_t at = std::int64_t{rows[r].head} * p.queries + t;
    out.lse[at] = sum == 0.0F ? -INFINITY : largest[r] * p.scale + logf(sum);
    out.maxima[at] = largest[r] * p.scale;
  }
}

// grid (parts of the heads, blocks of queries): neighbours gather the same rows.
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q,
                   const __nv_bfloat16* kv,
                   const __grid_constant__ GatherProblem p,
                   const GatherOutputs out) {
  const int index = static_cast<int>(blockIdx.x) / p.head_parts;
  if (index >= *p.blocks.count) return;
  auto& s = *reinterpret_cast<Shared*>(gather_memory());
  const GatherBlock block(p, index, static_cast<int>(blockIdx.x) % p.head_parts);
  if (threadIdx.x == 0) {
    mbarrier_init(&s.query, 1);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&s.full[i], 128);
      mbarrier_init(&s.empty[i], kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x == 0 && block.tiles > 0) {
      mbarrier_arrive_expect(&s.query, kWidthBytes);
      load_query_rows(s.q, &q, &s.query, kWidthBlocks, block.first_row(p));
    }
    produce(s, kv, block);
  } else {
    set_max_registers_up<kConsumerRegisters>();
    consume(s, p, out, block);
  }
}

}  // namespace

void gather_forward(cudaStream_t stream,
                    const GatherProblem& problem,
                    const SparseMlaForward& op,
                    const GatherOutputs& outputs) {
  constexpr std::size_t kBytes = sizeof(Shared) + kGatherSlack;
  const CUtensorMap q = make_tensor_map(
      op.q.data(),
      DType::bf16,
      {{kGatherWidth, op.q.dim(0) * op.q.dim(1)}, {kGatherWidth}, {kGatherColumns, kGatherRows}});
  allow_shared_memory(forward_kernel, kBytes);
  forward_kernel<<<static_cast<unsigned>(problem.blocks.bound * problem.head_parts),
                   kThreads,
                   kBytes,
                   stream>>>(
      q, reinterpret_cast<const __nv_bfloat16*>(op.kv.data()), problem, outputs);
  check_launch("kernel sparse_mla_forward (tiled)");
}

}  // namespace moesaic::cuda
