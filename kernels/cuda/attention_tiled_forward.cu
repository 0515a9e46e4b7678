// Attention forward on tensor cores. A block owns 128 query rows of one head and walks their key tiles
// from the last to the first; the products of the next tile's logits run while this tile's
// probabilities are formed. Probabilities stay in registers as the operand of the second product.
#include "kernels/cuda/attention_tiled.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kKeys = 128;  // of a tile
constexpr int kStages = 2;

template <int Dr>
struct Shared {
  static constexpr int kChannels = kHeadWidth + Dr;
  static constexpr int kQuery = tile_bytes(kBlockRows, kChannels);
  static constexpr int kKey = tile_bytes(kKeys, kChannels);
  static constexpr int kValue = tile_bytes(kKeys, kHeadWidth);
  static constexpr int kKeys0 = kQuery;
  static constexpr int kValues0 = kKeys0 + kStages * kKey;
  static constexpr int kTiles0 = kValues0 + kStages * kValue;
  static constexpr std::size_t kFixed = kTiles0;

  unsigned char* base;
  __device__ unsigned char* query() const { return base; }
  __device__ unsigned char* key(int stage) const { return base + kKeys0 + stage * kKey; }
  __device__ unsigned char* value(int stage) const { return base + kValues0 + stage * kValue; }
  __device__ std::uint16_t* tiles() const {
    return reinterpret_cast<std::uint16_t*>(base + kTiles0);
  }
};

struct Barriers {
  std::uint64_t query, key_full[kStages], key_empty[kStages], value_full[kStages],
      value_empty[kStages];
};

template <int Dr>
__device__ void produce(const Shared<Dr>& shared,
                        Barriers& barriers,
                        const TiledMaps& maps,
                        const QueryBlock& block,
                        const TileList& tiles,
                        int h) {
  constexpr int kColumnBlock = kKeys * kRowBytes;
  mbarrier_arrive_expect(&barriers.query, Shared<Dr>::kQuery);
#pragma unroll
  for (int c = 0; c < Shared<Dr>::kChannels / kChannelBlock; ++c)
    tma_load_3d(shared.query() + c * kBlockRows * kRowBytes,
                &maps.q,
                &barriers.query,
                c * kChannelBlock,
                h,
                block.row);
  Ring<kStages> ring;
  for (int i = tiles.count - 1; i >= 0; --i, ring.advance()) {
    const int row = block.begin + tiles[i] * kKeys, s = ring.stage;
    mbarrier_wait(&barriers.key_empty[s], ring.parity ^ 1U);
    mbarrier_arrive_expect(&barriers.key_full[s], Shared<Dr>::kKey);
#pragma unroll
    for (int c = 0; c < kHeadWidth / kChannelBlock; ++c)
      tma_load_3d(shared.key(s) + c * kColumnBlock,
                  &maps.kvb,
                  &barriers.key_full[s],
                  c * kChannelBlock,
                  h,
                  row);
    if constexpr (Dr > 0)
      tma_load_2d(shared.key(s) + kHeadWidth / kChannelBlock * kColumnBlock,
                  &maps.kr,
                  &barriers.key_full[s],
                  0,
                  row);
    mbarrier_wait(&barriers.value_empty[s], ring.parity ^ 1U);
    mbarrier_arrive_expect(&barriers.value_full[s], Shared<Dr>::kValue);
#pragma unroll
    for (int c = 0; c < kHeadWidth / kChannelBlock; ++c)
      tma_load_3d(shared.value(s) + c * kColumnBlock,
                  &maps.kvb,
                  &barriers.value_full[s],
                  kHeadWidth + c * kChannelBlock,
                  h,
                  row);
  }
}

// A consumer thread's two rows: r = 0, 1 are 8 rows apart.
struct Softmax {
  float largest[2] = {-INFINITY, -INFINITY};  // of the unscaled logits
  float total[2] = {0, 0};                    // of this thread's columns
  /// Folds a tile of unscaled logits in: they become probabilities against the new maximum; `shrink`
  /// is what the sums so far must be multiplied by.
  __device__ __forceinline__ void fold(float (&s)[kKeys / 2], float (&shrink)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float seen = s[2 * r];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
        seen = fmaxf(seen, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      seen = fmaxf(largest[r], quad_max(seen));
      // Nothing seen yet: exp2(-inf - 0) = 0.
      const float base = seen == -INFINITY ? 0.0F : seen * scale;
      shrink[r] = exp2_approx(largest[r] * scale - base);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          x = exp2_approx(fmaf(x, scale, -base));
          sum += x;
        }
      }
      total[r] = total[r] * shrink[r] + sum;
      largest[r] = seen;
    }
  }
};

// Which keys of a tile a thread's rows see.
template <bool Selected>
struct RowMask {
  int position = 0;                    // of row 0, in the document
  const std::uint32_t* words[2] = {};  // of the two rows
  uint4 tile[2] = {};
  __device__ __forceinline__ void fetch(int t) {
    if constexpr (Selected) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        tile[r] = *reinterpret_cast<const uint4*>(words[r] + t * (kKeys / 32));
    }
  }
  __device__ __forceinline__ void hide(float (&s)[kKeys / 2],
                                       int t,
                                       int column,
                                       int group_position) {
    if constexpr (Selected) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t w[4] = {
            tile[r].x >> column, tile[r].y >> column, tile[r].z >> column, tile[r].w >> column};
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if ((w[j / 4] & (1U << (8 * (j % 4) + e))) == 0) s[4 * j + 2 * r + e] = -INFINITY;
      }
    } else {
      if (t * kKeys + kKeys - 1 <= group_position) return;  // all visible to the whole warpgroup
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int visible = position + 8 * r - t * kKeys - column;  // columns 8 j + e <= visible
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (8 * j + e > visible) s[4 * j + 2 * r + e] = -INFINITY;
      }
    }
  }
};

template <int Dr, bool Selected>
__device__ void consume(const Shared<Dr>& shared,
                        Barriers& barriers,
                        float* maxima_of_warps,
                        const TiledProblem& p,
                        const TiledForwardOutputs& out,
                        const QueryBlock& block,
                        const TileList& tiles,
                        int h,
                        int block_index) {
  constexpr int kChannels = Shared<Dr>::kChannels;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1,
            lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) % 128 / kWarp;
  const int r0 = group * kGroupRows + warp * 16 + lane / 4, column = lane % 4 * 2;
  const int first = p.first() + block.row - block.begin;  // position of the block's row 0
  const int keys = block.end - block.begin;
  const float scale = p.scale * kLog2E;

  RowMask<Selected> mask;
  mask.position = first + r0;
  if constexpr (Selected) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      mask.words[r] =
          p.bits.words + (block.row + min(r0 + 8 * r, block.count - 1)) * p.bits.per_row;
  }
  const std::uint64_t q =
      swizzled_descriptor<Major::k>(shared.query() + group * kGroupRows * kRowBytes);
  float o[kHeadWidth / 2] = {}, s[kKeys / 2];
  std::uint32_t probabilities[kKeys / 16][4];
  Softmax softmax;
  float shrink[2];
  Ring<kStages> keys_ring, values_ring;

  const auto logits = [&] {
    mbarrier_wait(&barriers.key_full[keys_ring.stage], keys_ring.parity);
    wgmma_fence();
    product_nt<kChannels, kBlockRows, kKeys>(
        s, q, swizzled_descriptor<Major::k>(shared.key(keys_ring.stage)));
    wgmma_commit();
  };
  const auto wait_value = [&](int t) {
    mbarrier_wait(&barriers.value_full[values_ring.stage], values_ring.parity);
    if (keys - t * kKeys < kKeys) {
      clear_rows(
          shared.value(values_ring.stage), kHeadWidth / kChannelBlock, kKeys, keys - t * kKeys);
      publish_cleared_rows();
    }
  };
  const auto add_values = [&] {
    wgmma_fence();
    product_rn<kKeys, kHeadWidth>(
        o,
        probabilities,
        swizzled_descriptor<Major::mn>(shared.value(values_ring.stage), kKeys * kRowBytes));
    wgmma_commit();
  };
  const auto release = [&](std::uint64_t* empty, Ring<kStages>& ring) {
    if (lane == 0) mbarrier_arrive(&empty[ring.stage]);
    ring.advance();
  };

  // The warpgroups take turns at issuing products, so that one forms probabilities meanwhile.
  if (group == 1) named_barrier_arrive(kTurnBarrier, kConsumerThreads);
  if (tiles.count > 0) {
    int t = tiles[tiles.count - 1];
    mbarrier_wait(&barriers.query, 0);
    mask.fetch(t);
    logits();
    wgmma_wait<0>();
    pin_registers(s);
    release(barriers.key_empty, keys_ring);
    mask.hide(s, t, column, first + group * kGroupRows);
    softmax.fold(s, shrink, scale);
    to_fragments<kKeys>(probabilities, s);
    for (int i = tiles.count - 2; i >= 0; --i) {
      const int next = tiles[i];
      mask.fetch(next);
      wait_value(t);
      named_barrier_sync(kTurnBarrier + group, kConsumerThreads);
      logits();
      add_values();
      named_barrier_arrive(kTurnBarrier + 1 - group, kConsumerThreads);
      t = next;
      wgmma_wait<1>();
      pin_registers(s);
      release(barriers.key_empty, keys_ring);
      mask.hide(s, t, column, first + group * kGroupRows);
      softmax.fold(s, shrink, scale);
      wgmma_wait<0>();
      pin_registers(o);
      release(barriers.value_empty, values_ring);
#pragma unroll
      for (int j = 0; j < kHeadWidth / 2; ++j)
        o[j] *= shrink[j % 4 / 2];
      to_fragments<kKeys>(probabilities, s);
    }
    wait_value(t);
    add_values();
    wgmma_wait<0>();
    pin_registers(o);
  }

  if (group == 0) named_barrier_sync(kTurnBarrier, kConsumerThreads);
  float largest = -INFINITY;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float total = quad_sum(softmax.total[r]);
    if (r0 + 8 * r >= block.count) continue;
    const std::int64_t row = block.row + r0 + 8 * r;
    const float inverse = total == 0.0F ? 0.0F : 1.0F / total;
    float* to = out.o + (row * p.heads + h) * kHeadWidth + column;
#pragma unroll
    for (int j = 0; j < kHeadWidth / 8; ++j)
      *reinterpret_cast<float2*>(to + 8 * j) =
          float2{o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse};
    if (column == 0)
      out.lse[std::int64_t{h} * p.queries + row] =
          total == 0.0F ? -INFINITY : softmax.largest[r] * p.scale + logf(total);
    largest = fmaxf(largest, softmax.largest[r]);
  }
  if (out.maxima == nullptr) return;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, offset));
  if (lane == 0) maxima_of_warps[group * 4 + warp] = largest;
  named_barrier_sync(kReduceBarrier, kConsumerThreads);
  if (group != 0 || warp != 0 || lane != 0) return;
#pragma unroll
  for (int i = 0; i < kConsumerWarps; ++i)
    largest = fmaxf(largest, maxima_of_warps[i]);
  out.maxima[std::int64_t{h} * p.blocks.bound + block_index] = largest * p.scale;
}

template <int Dr, bool Selected>
__global__ void __launch_bounds__(kTiledThreads, 1)
    forward_kernel(const __grid_constant__ TiledMaps maps,
                   const __grid_constant__ TiledProblem p,
                   const __grid_constant__ TiledForwardOutputs out) {
  // Blocks with most keys first.
  const int index = *p.blocks.count - 1 - static_cast<int>(blockIdx.x);
  if (index < 0) return;
  __shared__ Barriers barriers;
  __shared__ float maxima_of_warps[kConsumerWarps];
  __shared__ int listed;
  const Shared<Dr> shared{aligned_shared()};
  const QueryBlock block = p.blocks.list[index];
  const int h = static_cast<int>(blockIdx.y);
  // One past the last position of the block, in tiles.
  const int end = (p.first() + block.row + block.count - block.begin + kKeys - 1) / kKeys;
  if (threadIdx.x == 0) {
    mbarrier_init(&barriers.query, 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&barriers.key_full[s], 1);
      mbarrier_init(&barriers.value_full[s], 1);
      mbarrier_init(&barriers.key_empty[s], kConsumerWarps);
      mbarrier_init(&barriers.value_empty[s], kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  TileList tiles{nullptr, end};
  if constexpr (Selected) {
    if (threadIdx.x < kWarp) {
      constexpr int kParts = kKeys / kHalfTile;
      const std::uint8_t* flags = p.flags.flags + 2 * index * p.flags.per_row;
      list_tiles(shared.tiles(), &listed, end, [&](int t) {
        bool any = false;
#pragma unroll
        for (int i = 0; i < kParts; ++i)
          any |= (flags[t * kParts + i] | flags[p.flags.per_row + t * kParts + i]) != 0;
        return any;
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
    consume<Dr, Selected>(shared, barriers, maxima_of_warps, p, out, block, tiles, h, index);
  }
}

template <int Dr, bool Selected>
void launch_forward(cudaStream_t stream,
                    const TiledMaps& maps,
                    const TiledProblem& problem,
                    const TiledForwardOutputs& outputs) {
  const std::size_t bytes =
      Shared<Dr>::kFixed + kSharedSlack +
      (Selected
           ? sizeof(std::uint16_t) * static_cast<std::size_t>((problem.keys + kKeys - 1) / kKeys)
           : 0);
  allow_shared_memory(forward_kernel<Dr, Selected>, bytes);
  const dim3 grid(static_cast<unsigned>(problem.blocks.bound),
                  static_cast<unsigned>(problem.heads));
  forward_kernel<Dr, Selected><<<grid, kTiledThreads, bytes, stream>>>(maps, problem, outputs);
  check_launch("kernel attention_forward (tiled)");
}

}  // namespace

void tiled_forward(cudaStream_t stream,
                   const TiledProblem& problem,
                   const AttentionForward& op,
                   const TiledForwardOutputs& outputs) {
  const bool shared_key = op.q.dim(2) > kHeadWidth, selected = problem.bits.words != nullptr;
  TiledMaps maps{};
  maps.q = head_map(op.q, kBlockRows);
  maps.kvb = head_map(op.kvb, kKeys);
  if (shared_key) maps.kr = head_map(op.kr, kKeys);
  if (shared_key && selected) return launch_forward<64, true>(stream, maps, problem, outputs);
  if (shared_key) return launch_forward<64, false>(stream, maps, problem, outputs);
  if (selected) return launch_forward<0, true>(stream, maps, problem, outputs);
  launch_forward<0, false>(stream, maps, problem, outputs);
}

}  // namespace moesaic::cuda
