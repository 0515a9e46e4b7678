// Sparse MLA backward on tensor cores. Three warpgroups; per tile of 64 gathered keys
//   two of them form p and ds of 32 keys each, into shared memory,
//   all add ds kv to their 192 channels of dq, which stay in registers; then the tile's place is free, and all issue the
//   copies of the next one,
//   all form the tile's share of dkv, (64 channels, 64 keys) at a time, q^T ds + d_o^T p summed over the block's rows by
//   the tensor cores, and add it to the sums.
// The last part sets the pace: 64 x 576 additions of 8 bytes per tile, however many heads there are. So all rows that a
// block owns are summed before anything is added.
#include "kernels/cuda/sparse_mla_tiled.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kGroups = 3;
constexpr int kThreads = 128 * kGroups;
constexpr int kOwnKeys = 32;  // of a tile, for the first two warpgroups
constexpr int kOwnBlocks = kWidthBlocks / kGroups, kOwnChannels = kOwnBlocks * kGatherColumns;
static_assert(kWidthBlocks % kGroups == 0);

struct Shared {
  alignas(1024) unsigned char q[kWidthBytes], d_o[kLatentBytes], kv[kWidthBytes];
  alignas(1024) unsigned char p[kColumnBlock], ds[kColumnBlock];
  float log_sum[kGatherRows], delta[kGatherRows];
  std::uint32_t bits[kGatherRows], entries[2][kGatherKeys];
  float limit;  // of what the block adds to an element of the sums
  KeySumScale scale;
  std::uint64_t query, full;
};
static_assert(sizeof(Shared) + kGatherSlack <= 227 * 1024);

struct Args {
  const __nv_bfloat16* kv;
  __nv_bfloat16* dq;
  const float *delta, *log_sum;  // [H, T]; log_sum in base 2
  KeySumsView<float> sums;
};

// Keeps the compiler from forming, before the loop over tiles, what follows from x: it would stay in registers that dq needs.
__device__ __forceinline__ int forgotten(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// All threads; everybody has read what lies in its place.
__device__ __forceinline__ void start_tile(Shared& s,
                                           const __nv_bfloat16* kv,
                                           const GatherBlock& block,
                                           int tile) {
  const std::uint32_t* entries = block.list + tile * kGatherKeys;
  if (threadIdx.x < kGatherKeys) s.entries[tile % 2][threadIdx.x] = entries[threadIdx.x];
  gather_tile<kThreads>(s.kv, kv, entries, forgotten(static_cast<int>(threadIdx.x)));
  cp_async_arrive(&s.full);
}

// p and scale ds of the warpgroup's keys, as bf16 to shared memory.
__device__ __forceinline__ void probabilities(Shared& s,
                                              const GatherProblem& p,
                                              const std::uint32_t* entries,
                                              int group,
                                              int r0,
                                              int column) {
  const auto from = descriptor_step(group * kOwnKeys * kGatherRowBytes);
  const std::uint64_t kv = swizzled_descriptor<Major::k>(s.kv) + from;
  float x[kOwnKeys / 2], dp[kOwnKeys / 2];
  wgmma_fence();
  gather_logits<kWidthBlocks, kOwnKeys>(x, swizzled_descriptor<Major::k>(s.q), kv);
  gather_logits<kLatentBlocks, kOwnKeys>(dp, swizzled_descriptor<Major::k>(s.d_o), kv);
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(x);
  pin_registers(dp);
  const float scale = p.scale * kLog2OfE;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = r0 + 8 * r;
    const float log_sum = s.log_sum[row], delta = s.delta[row];
    const std::uint32_t bit = s.bits[row];
#pragma unroll
    for (int j = 0; j < kOwnKeys / 8; ++j) {
      float y[2], dy[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * j + 2 * r + e;
        const bool seen = (entries[group * kOwnKeys + 8 * j + column + e] & bit) != 0;
        y[e] = seen ? fast_exp2(fmaf(x[i], scale, -log_sum)) : 0.0F;
        dy[e] = seen ? y[e] * (dp[i] - delta) * p.scale : 0.0F;
      }
      const std::uint32_t at = swizzled_128(static_cast<std::uint32_t>(
          row * kGatherRowBytes + 2 * (group * kOwnKeys + 8 * j + column)));
      *reinterpret_cast<std::uint32_t*>(s.p + at) = pack_bf16(y[0], y[1]);
      *reinterpret_cast<std::uint32_t*>(s.ds + at) = pack_bf16(dy[0], dy[1]);
    }
  }
}

// (64 channels, 64 keys) of the tile's share of dkv: q^T ds, and d_o^T p where the channels are of the values too.
__device__ __forceinline__ void share_of_keys(float (&x)[kGatherKeys / 2],
                                              const Shared& s,
                                              int block) {
  const auto rows = [](const unsigned char* tile) {
    return swizzled_descriptor<Major::mn>(tile, kColumnBlock);
  };
  const std::uint64_t q = rows(s.q + block * kColumnBlock),
                      d_o = rows(s.d_o + block * kColumnBlock), ds = rows(s.ds), p = rows(s.p);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kGatherRows / 16; ++k) {
    const auto at = descriptor_step(k * 16 * kGatherRowBytes);
    wgmma_ss<Major::mn, Major::mn>(x, q + at, ds + at, k > 0);
  }
  if (block < kLatentBlocks) {
#pragma unroll
    for (int k = 0; k < kGatherRows / 16; ++k) {
      const auto at = descriptor_step(k * 16 * kGatherRowBytes);
      wgmma_ss<Major::mn, Major::mn>(x, d_o + at, p + at, true);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin_registers(x);
}

// Eight neighbouring lanes hold eight channels of one key: 64 bytes in a row.
template <bool Integer>
__device__ __forceinline__ bool add_to_sums(const float (&x)[kGatherKeys / 2],
                                            const Shared& s,
                                            const KeySumsView<float>& sums,
                                            const std::uint32_t* entries,
                                            int channel,
                                            int column) {
  bool fits = true;
  const KeySumScale scale = s.scale;
  const float limit = s.limit;
#pragma unroll
  for (int j = 0; j < kGatherKeys / 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // One after the other: all at once would not fit registers.
      const std::uint32_t entry =
          *static_cast<const volatile std::uint32_t*>(entries + 8 * j + column + e);
      if (entry == 0) continue;
      const std::int64_t at = key_of(entry) * kGatherWidth + channel;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float y = x[4 * j + 2 * h + e];
        fits = fits && fabsf(y) <= limit;
        if constexpr (Integer) {
          add_units(sums.sums, at + 8 * h, scale.units(y));
        } else {
          atomicAdd(static_cast<float*>(sums.sums) + at + 8 * h, y);
        }
      }
    }
  return fits;
}

template <bool Integer>
__device__ void work(Shared& s, const GatherProblem& p, const Args& a, const GatherBlock& block) {
  // By shuffle, so that the compiler knows it to be the same in a warp: wgmma stands behind conditions on it.
  const int group = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 128, 0),
            lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) % 128 / kWarp;
  const int r0 = warp * 16 + lane / 4, column = lane % 4 * 2;
  float dq[kOwnChannels / 2] = {};
  bool fits = true;

  for (int i = 0; i < block.tiles; ++i) {
    const std::uint32_t* entries = s.entries[i % 2];
    mbarrier_wait(&s.full, static_cast<std::uint32_t>(i % 2));
    fence_proxy_async();
    if (group < 2) {
      probabilities(s, p, entries, group, forgotten(r0), forgotten(column));
      fence_proxy_async();
    }
    __syncthreads();
    const std::uint64_t ds = swizzled_descriptor<Major::k>(s.ds);
    const std::uint64_t keys =
        swizzled_descriptor<Major::mn>(s.kv + group * kOwnBlocks * kColumnBlock, kColumnBlock);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kGatherKeys / 16; ++k)
      wgmma_ss<Major::k, Major::mn>(
          dq, ds + descriptor_step(k * 32), keys + descriptor_step(k * 16 * kGatherRowBytes), true);
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(dq);
    __syncthreads();
    if (i + 1 < block.tiles) start_tile(s, a.kv, block, i + 1);
#pragma unroll 1
    for (int b = 0; b < kOwnBlocks; ++b) {
      const int channels = group * kOwnBlocks + b;
      float x[kGatherKeys / 2];
      share_of_keys(x, s, channels);
      if (b + 1 == kOwnBlocks) __syncthreads();  // nobody reads p and ds any more
      const int channel = channels * kGatherColumns + r0;
      fits &= add_to_sums<Integer>(x, s, a.sums, entries, channel, column);
    }
  }

  if (!fits) a.sums.flag();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const GatherRow row(p, block, r0 + 8 * r);
    if (!row.exists) continue;
    __nv_bfloat16* to =
        a.dq + ((block.queries.row + row.query) * std::int64_t{p.heads} + row.head) * kGatherWidth +
        group * kOwnChannels + column;
#pragma unroll
    for (int j = 0; j < kOwnChannels / 8; ++j)
      *reinterpret_cast<std::uint32_t*>(to + 8 * j) =
          pack_bf16(dq[4 * j + 2 * r], dq[4 * j + 2 * r + 1]);
  }
}

// grid (parts of the heads, blocks of queries): neighbours gather the same rows.
template <bool Integer>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ CUtensorMap q,
                    const __grid_constant__ CUtensorMap d_o,
                    const __grid_constant__ GatherProblem p,
                    const __grid_constant__ Args a) {
  const int index = static_cast<int>(blockIdx.x) / p.head_parts;
  if (index >= *p.blocks.count) return;
  auto& s = *reinterpret_cast<Shared*>(gather_memory());
  const GatherBlock block(p, index, static_cast<int>(blockIdx.x) % p.head_parts);
  if (threadIdx.x == 0) {
    mbarrier_init(&s.query, 1);
    mbarrier_init(&s.full, kThreads);
    fence_mbarrier_init();
  }
  if (threadIdx.x < kGatherRows) {
    const GatherRow row(p, block, static_cast<int>(threadIdx.x));
    const std::int64_t at = std::int64_t{row.head} * p.queries + block.queries.row + row.query;
    s.log_sum[threadIdx.x] = row.exists ? a.log_sum[at] : INFINITY;
    s.delta[threadIdx.x] = row.exists ? a.delta[at] : 0.0F;
    s.bits[threadIdx.x] = row.bit();
  }
  if (threadIdx.x == kThreads - 1) {
    s.scale = KeySumScale(a.sums.state->exponent);
    s.limit = 0;
    for (int i = 0; i < block.queries.count; ++i)
      s.limit += 2 * a.sums.bounds[block.queries.row + i];
  }
  __syncthreads();
  if (block.tiles > 0) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(&s.query, kWidthBytes + kLatentBytes);
      load_query_rows(s.q, &q, &s.query, kWidthBlocks, block.first_row(p));
      load_query_rows(s.d_o, &d_o, &s.query, kLatentBlocks, block.first_row(p));
    }
    start_tile(s, a.kv, block, 0);
    __syncthreads();
    mbarrier_wait(&s.query, 0);
  }
  work<Integer>(s, p, a, block);
}

}  // namespace

void gather_backward(cudaStream_t stream,
                     const GatherProblem& problem,
                     const SparseMlaBackward& op,
                     const KeySumsMemory& memory) {
  constexpr std::size_t kBytes = sizeof(Shared) + kGatherSlack;
  const auto map = [&](const ConstTensorView& x, std::int64_t width) {
    return make_tensor_map(x.data(),
                           DType::bf16,
                           {{width, x.dim(0) * x.dim(1)}, {width}, {kGatherColumns, kGatherRows}});
  };
  const CUtensorMap q = map(op.q, kGatherWidth), d_o = map(op.d_o, kLatent);
  const Args args{reinterpret_cast<const __nv_bfloat16*>(op.kv.data()),
                  reinterpret_cast<__nv_bfloat16*>(op.dq.data()),
                  memory.delta.as<float>(),
                  memory.log_sum.as<float>(),
                  key_sums_view<float>(memory, op)};
  const auto kernel =
      op.key_sums == KeySums::integer ? backward_kernel<true> : backward_kernel<false>;
  allow_shared_memory(kernel, kBytes);
  kernel<<<static_cast<unsigned>(problem.blocks.bound * problem.head_parts),
           kThreads,
           kBytes,
           stream>>>(q, d_o, problem, args);
  check_launch("kernel sparse_mla_backward (tiled)");
}

}  // namespace moesaic::cuda
