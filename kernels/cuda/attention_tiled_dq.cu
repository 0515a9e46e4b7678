// dq of attention on tensor cores. A block owns 128 query rows of one head and walks tiles of 64 keys:
// logits and dp again, ds = p (dp - delta) stays in registers as the operand of dq += ds k.
#include "kernels/cuda/attention_tiled.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kKeys = 64;  // of a tile
constexpr int kStages = 3;

template <int Dr>
struct Shared {
  static constexpr int kChannels = kHeadWidth + Dr;
  static constexpr int kQuery = tile_bytes(kBlockRows, kChannels);
  static constexpr int kGradient = tile_bytes(kBlockRows, kHeadWidth);
  static constexpr int kKey = tile_bytes(kKeys, kChannels);
  static constexpr int kValue = tile_bytes(kKeys, kHeadWidth);
  static constexpr int kStages0 = kQuery + kGradient;
  static constexpr int kTiles0 = kStages0 + kStages * (kKey + kValue);
  static constexpr std::size_t kFixed = kTiles0;

  unsigned char* base;
  __device__ unsigned char* query() const { return base; }
  __device__ unsigned char* gradient() const { return base + kQuery; }
  __device__ unsigned char* key(int stage) const {
    return base + kStages0 + stage * (kKey + kValue);
  }
  __device__ unsigned char* value(int stage) const { return key(stage) + kKey; }
  __device__ std::uint16_t* tiles() const {
    return reinterpret_cast<std::uint16_t*>(base + kTiles0);
  }
};

struct Barriers {
  std::uint64_t query, full[kStages], empty[kStages];
};

template <int Dr>
__device__ void produce(const Shared<Dr>& shared,
                        Barriers& barriers,
                        const TiledMaps& maps,
                        const QueryBlock& block,
                        const TileList& tiles,
                        int h) {
  constexpr int kColumnBlock = kKeys * kRowBytes, kHeadBlocks = kHeadWidth / kChannelBlock;
  mbarrier_arrive_expect(&barriers.query, Shared<Dr>::kQuery + Shared<Dr>::kGradient);
#pragma unroll
  for (int c = 0; c < Shared<Dr>::kChannels / kChannelBlock; ++c)
    tma_load_3d(shared.query() + c * kBlockRows * kRowBytes,
                &maps.q,
                &barriers.query,
                c * kChannelBlock,
                h,
                block.row);
#pragma unroll
  for (int c = 0; c < kHeadBlocks; ++c)
    tma_load_3d(shared.gradient() + c * kBlockRows * kRowBytes,
                &maps.d_o,
                &barriers.query,
                c * kChannelBlock,
                h,
                block.row);
  Ring<kStages> ring;
  for (int i = 0; i < tiles.count; ++i, ring.advance()) {
    const int row = block.begin + tiles[i] * kKeys, s = ring.stage;
    mbarrier_wait(&barriers.empty[s], ring.parity ^ 1U);
    mbarrier_arrive_expect(&barriers.full[s], Shared<Dr>::kKey + Shared<Dr>::kValue);
#pragma unroll
    for (int c = 0; c < kHeadBlocks; ++c) {
      tma_load_3d(shared.key(s) + c * kColumnBlock,
                  &maps.kvb,
                  &barriers.full[s],
                  c * kChannelBlock,
                  h,
                  row);
      tma_load_3d(shared.value(s) + c * kColumnBlock,
                  &maps.kvb,
                  &barriers.full[s],
                  kHeadWidth + c * kChannelBlock,
                  h,
                  row);
    }
    if constexpr (Dr > 0)
      tma_load_2d(shared.key(s) + kHeadBlocks * kColumnBlock, &maps.kr, &barriers.full[s], 0, row);
  }
}

// A consumer thread's two rows, 8 apart.
struct Rows {
  float log_sum[2], delta[2];
};

// Logits become probabilities, not yet hidden.
__device__ __forceinline__ void probabilities(float (&s)[kKeys / 2],
                                              const Rows& rows,
                                              float scale) {
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[4 * j + 2 * r + e];
        x = exp2_approx(fmaf(x, scale, -rows.log_sum[r]));
      }
}
// s, the probabilities, become ds = p (dp - delta), zero where a row does not see the key. Row 0 sees
// columns 8 j + e up to `visible`.
template <bool Selected>
__device__ __forceinline__ void to_ds(float (&s)[kKeys / 2],
                                      const float (&dp)[kKeys / 2],
                                      const Rows& rows,
                                      const uint2 (&words)[2],
                                      int visible,
                                      bool all_visible) {
#pragma unroll
  for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = 4 * j + 2 * r + e;
        s[i] *= dp[i] - rows.delta[r];
        if constexpr (Selected) {
          if (((j < 4 ? words[r].x : words[r].y) & (1U << (8 * (j % 4) + e))) == 0) s[i] = 0;
        }
      }
  if constexpr (!Selected) {
    if (all_visible) return;
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e > visible + 8 * r) s[4 * j + 2 * r + e] = 0;
  }
}

template <int Dr, bool Selected>
__device__ void consume(const Shared<Dr>& shared,
                        Barriers& barriers,
                        const TiledProblem& p,
                        const TiledBackward& data,
                        __nv_bfloat16* dq_out,
                        const QueryBlock& block,
                        const TileList& tiles,
                        int h) {
  constexpr int kChannels = Shared<Dr>::kChannels;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) % 128 / kWarp;
  const int r0 = group * kGroupRows + warp * 16 + lane / 4, column = lane % 4 * 2;
  const int first = p.first() + block.row - block.begin;  // position of the block's row 0
  const int keys = block.end - block.begin;
  const float scale = p.scale * kLog2E;

  Rows rows;
  const std::uint32_t* bits[2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool inside = r0 + 8 * r < block.count;
    const std::int64_t row = block.row + (inside ? r0 + 8 * r : 0);
    rows.log_sum[r] = inside ? data.log_sum[std::int64_t{h} * p.queries + row] : INFINITY;
    rows.delta[r] = inside ? data.delta[std::int64_t{h} * p.queries + row] : 0.0F;
    if constexpr (Selected) bits[r] = p.bits.words + row * p.bits.per_row;
  }
  const std::uint64_t q =
      swizzled_descriptor<Major::k>(shared.query() + group * kGroupRows * kRowBytes);
  const std::uint64_t d_o =
      swizzled_descriptor<Major::k>(shared.gradient() + group * kGroupRows * kRowBytes);
  float dq[kChannels / 2] = {}, s[kKeys / 2], dp[kKeys / 2];
  std::uint32_t ds[kKeys / 16][4];
  Ring<kStages> ring;

  // The warpgroups take turns at issuing products, so that one forms ds meanwhile.
  if (group == 1) named_barrier_arrive(kTurnBarrier, kConsumerThreads);
  if (tiles.count > 0) mbarrier_wait(&barriers.query, 0);
  for (int i = 0; i < tiles.count; ++i) {
    const int t = tiles[i], stage = ring.stage;
    uint2 words[2] = {};
    if constexpr (Selected) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        words[r] = *reinterpret_cast<const uint2*>(bits[r] + t * (kKeys / 32));
        words[r] = {words[r].x >> column, words[r].y >> column};
      }
    }
    mbarrier_wait(&barriers.full[stage], ring.parity);
    if (keys - t * kKeys < kKeys) {
      clear_rows(shared.key(stage), kChannels / kChannelBlock, kKeys, keys - t * kKeys);
      publish_cleared_rows();
    }
    named_barrier_sync(kTurnBarrier + group, kConsumerThreads);
    wgmma_fence();
    product_nt<kChannels, kBlockRows, kKeys>(
        s, q, swizzled_descriptor<Major::k>(shared.key(stage)));
    wgmma_commit();
    product_nt<kHeadWidth, kBlockRows, kKeys>(
        dp, d_o, swizzled_descriptor<Major::k>(shared.value(stage)));
    wgmma_commit();
    named_barrier_arrive(kTurnBarrier + 1 - group, kConsumerThreads);
    wgmma_wait<1>();
    pin_registers(s);
    pin_registers(dq);
    if (i > 0 && lane == 0)  // the last tile's dq is done, too
      mbarrier_arrive(&barriers.empty[stage == 0 ? kStages - 1 : stage - 1]);
    probabilities(s, rows, scale);
    wgmma_wait<0>();
    pin_registers(dp);
    to_ds<Selected>(s,
                    dp,
                    rows,
                    words,
                    first + r0 - t * kKeys - column,
                    t * kKeys + kKeys - 1 <= first + group * kGroupRows);
    to_fragments<kKeys>(ds, s);
    wgmma_fence();
    product_rn<kKeys, kChannels>(
        dq, ds, swizzled_descriptor<Major::mn>(shared.key(stage), kKeys * kRowBytes));
    wgmma_commit();
    ring.advance();
  }
  if (group == 0) named_barrier_sync(kTurnBarrier, kConsumerThreads);
  wgmma_wait<0>();
  pin_registers(dq);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r0 + 8 * r >= block.count) continue;
    const std::int64_t row = block.row + r0 + 8 * r;
    __nv_bfloat16* to = dq_out + (row * p.heads + h) * kChannels + column;
#pragma unroll
    for (int j = 0; j < kChannels / 8; ++j)
      *reinterpret_cast<std::uint32_t*>(to + 8 * j) =
          pack_bf16(dq[4 * j + 2 * r] * p.scale, dq[4 * j + 2 * r + 1] * p.scale);
  }
}

template <int Dr, bool Selected>
__global__ void __launch_bounds__(kTiledThreads, 1)
    dq_kernel(const __grid_constant__ TiledMaps maps,
              const __grid_constant__ TiledProblem p,
              const TiledBackward data,
              __nv_bfloat16* dq) {
  // Blocks with most keys first.
  const int index = *p.blocks.count - 1 - static_cast<int>(blockIdx.x);
  if (index < 0) return;
  __shared__ Barriers barriers;
  __shared__ int listed;
  const Shared<Dr> shared{aligned_shared()};
  const QueryBlock block = p.blocks.list[index];
  const int h = static_cast<int>(blockIdx.y);
  const int end = (p.first() + block.row + block.count - block.begin + kKeys - 1) / kKeys;
  if (threadIdx.x == 0) {
    mbarrier_init(&barriers.query, 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&barriers.full[s], 1);
      mbarrier_init(&barriers.empty[s], kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  TileList tiles{nullptr, end};
  if constexpr (Selected) {
    static_assert(kKeys == kHalfTile);
    if (threadIdx.x < kWarp) {
      const std::uint8_t* flags = p.flags.flags + 2 * index * p.flags.per_row;
      list_tiles(shared.tiles(), &listed, end, [&](int t) {
        return (flags[t] | flags[p.flags.per_row + t]) != 0;
      });
    }
  }
  __syncthreads();
  if constexpr (Selected) tiles = {shared.tiles(), listed};
  if (threadIdx.x < kTiledThreads - kConsumerThreads) {
    set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x == 0 && tiles.count > 0) produce(shared, barriers, maps, block, tiles, h);
  } else {
    set_max_registers_up<kConsumerRegisters>();
    consume<Dr, Selected>(shared, barriers, p, data, dq, block, tiles, h);
  }
}

template <int Dr, bool Selected>
void launch_dq(cudaStream_t stream,
               const TiledMaps& maps,
               const TiledProblem& problem,
               const TiledBackward& data,
               TensorView dq) {
  const std::size_t list = static_cast<std::size_t>((problem.keys + kKeys - 1) / kKeys);
  const std::size_t bytes =
      Shared<Dr>::kFixed + kSharedSlack + (Selected ? sizeof(std::uint16_t) * list : 0);
  allow_shared_memory(dq_kernel<Dr, Selected>, bytes);
  const dim3 grid(static_cast<unsigned>(problem.blocks.bound),
                  static_cast<unsigned>(problem.heads));
  dq_kernel<Dr, Selected><<<grid, kTiledThreads, bytes, stream>>>(
      maps, problem, data, reinterpret_cast<__nv_bfloat16*>(dq.data()));
  check_launch("kernel attention_backward (tiled): dq");
}

}  // namespace

void tiled_dq(cudaStream_t stream,
              const TiledProblem& problem,
              const AttentionBackward& op,
              const TiledBackward& data) {
  const bool shared_key = op.q.dim(2) > kHeadWidth, selected = problem.bits.words != nullptr;
  TiledMaps maps{};
  maps.q = head_map(op.q, kBlockRows);
  maps.d_o = head_map(data.d_o, kBlockRows);
  maps.kvb = head_map(op.kvb, kKeys);
  if (shared_key) maps.kr = head_map(op.kr, kKeys);
  if (shared_key && selected) return launch_dq<64, true>(stream, maps, problem, data, op.dq);
  if (shared_key) return launch_dq<64, false>(stream, maps, problem, data, op.dq);
  if (selected) return launch_dq<0, true>(stream, maps, problem, data, op.dq);
  launch_dq<0, false>(stream, maps, problem, data, op.dq);
}

}  // namespace moesaic::cuda
