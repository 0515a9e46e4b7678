// dk and dv of attention on tensor cores. A block owns 128 keys of one head and walks the tiles of 64
// query rows that see them, which begin at the first of the document's tokens that is a query.
// Everything is transposed: keys are the rows of the logits, so that probabilities and ds, in
// registers, are the left operands of dv += p^T d_o and dk += ds^T q.
#include "kernels/cuda/attention_tiled.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kQueries = 64;  // of a tile
constexpr int kStages = 3;
constexpr int kWordsPerRow = kBlockRows / 32;  // of the selection, over the block's keys

// What consumers need of a tile's query rows beside q and d_o.
struct RowData {
  float log_sum[kQueries], delta[kQueries];
  std::uint32_t words[kQueries][kWordsPerRow];
};

template <int Dr>
struct Shared {
  static constexpr int kChannels = kHeadWidth + Dr;
  static constexpr int kKey = tile_bytes(kBlockRows, kChannels);
  static constexpr int kValue = tile_bytes(kBlockRows, kHeadWidth);
  static constexpr int kQuery = tile_bytes(kQueries, kChannels);
  static constexpr int kGradient = tile_bytes(kQueries, kHeadWidth);
  static constexpr int kStages0 = kKey + kValue;
  static constexpr int kRows0 = kStages0 + kStages * (kQuery + kGradient);
  static constexpr int kTiles0 = kRows0 + kStages * static_cast<int>(sizeof(RowData));
  static constexpr std::size_t kFixed = kTiles0;

  unsigned char* base;
  __device__ unsigned char* key() const { return base; }
  __device__ unsigned char* value() const { return base + kKey; }
  __device__ unsigned char* query(int stage) const {
    return base + kStages0 + stage * (kQuery + kGradient);
  }
  __device__ unsigned char* gradient(int stage) const { return query(stage) + kQuery; }
  __device__ RowData& rows(int stage) const {
    return reinterpret_cast<RowData*>(base + kRows0)[stage];
  }
  __device__ std::uint16_t* tiles() const {
    return reinterpret_cast<std::uint16_t*>(base + kTiles0);
  }
};

// The query rows of the document that a block's keys belong to.
struct Queries {
  int position;  // in the document, of the first one; its end where there are none
  int row;       // of the first one
  int count;
  __device__ Queries(const TiledProblem& p, const QueryBlock& keys)
      : position(min(max(p.first() - keys.begin, 0), keys.end - keys.begin)),
        row(keys.begin + position - p.first()),
        count(keys.end - keys.begin - position) {}
};

// Which of the blocks of query rows begins with `row`; one of them does.
__device__ __forceinline__ int block_with_row(const QueryBlocks& blocks, int row) {
  int low = 0, high = *blocks.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (blocks.list[middle].row <= row ? low : high) = middle;
  }
  return low;
}

struct Barriers {
  std::uint64_t key, full[kStages], empty[kStages];
};

// One warp: lane 0 drives the copy engine, all copy the rows' statistics and selection.
template <int Dr, bool Selected>
__device__ void produce(const Shared<Dr>& shared,
                        Barriers& barriers,
                        const TiledMaps& maps,
                        const TiledProblem& p,
                        const TiledBackward& data,
                        const QueryBlock& block,
                        const Queries& queries,
                        const TileList& tiles,
                        int h) {
  constexpr int kHeadBlocks = kHeadWidth / kChannelBlock;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (lane == 0) {
    constexpr int kColumnBlock = kBlockRows * kRowBytes;
    mbarrier_arrive_expect(&barriers.key, Shared<Dr>::kKey + Shared<Dr>::kValue);
#pragma unroll
    for (int c = 0; c < kHeadBlocks; ++c) {
      tma_load_3d(shared.key() + c * kColumnBlock,
                  &maps.kvb,
                  &barriers.key,
                  c * kChannelBlock,
                  h,
                  block.row);
      tma_load_3d(shared.value() + c * kColumnBlock,
                  &maps.kvb,
                  &barriers.key,
                  kHeadWidth + c * kChannelBlock,
                  h,
                  block.row);
    }
    if constexpr (Dr > 0)
      tma_load_2d(shared.key() + kHeadBlocks * kColumnBlock, &maps.kr, &barriers.key, 0, block.row);
  }
  Ring<kStages> ring;
  for (int i = 0; i < tiles.count; ++i, ring.advance()) {
    const int s = ring.stage, t = tiles[i] * kQueries, row = queries.row + t;
    mbarrier_wait(&barriers.empty[s], ring.parity ^ 1U);
    RowData& rows = shared.rows(s);
#pragma unroll
    for (int r = lane; r < kQueries; r += kWarp) {
      const bool inside = t + r < queries.count;
      const std::int64_t at = std::int64_t{h} * p.queries + row + r;
      rows.log_sum[r] = inside ? data.log_sum[at] : INFINITY;
      rows.delta[r] = inside ? data.delta[at] : 0.0F;
      if constexpr (Selected) {
        const auto* words =
            p.bits.words + std::int64_t{row + r} * p.bits.per_row + (block.row - block.begin) / 32;
        *reinterpret_cast<uint4*>(rows.words[r]) =
            inside ? *reinterpret_cast<const uint4*>(words) : uint4{0, 0, 0, 0};
      }
    }
    // Every lane says that its part of the rows' data is there.
    if (lane != 0) {
      mbarrier_arrive(&barriers.full[s]);
      continue;
    }
    constexpr int kColumnBlock = kQueries * kRowBytes;
    mbarrier_arrive_expect(&barriers.full[s], Shared<Dr>::kQuery + Shared<Dr>::kGradient);
#pragma unroll
    for (int c = 0; c < Shared<Dr>::kChannels / kChannelBlock; ++c)
      tma_load_3d(shared.query(s) + c * kColumnBlock,
                  &maps.q,
                  &barriers.full[s],
                  c * kChannelBlock,
                  h,
                  row);
#pragma unroll
    for (int c = 0; c < kHeadBlocks; ++c)
      tma_load_3d(shared.gradient(s) + c * kColumnBlock,
                  &maps.d_o,
                  &barriers.full[s],
                  c * kChannelBlock,
                  h,
                  row);
  }
}

// Logits become probabilities, zero where the query (column) does not see the key (row). `hidden`:
// query columns 8 j + e below it do not see the thread's first key.
template <bool Selected>
__device__ __forceinline__ void probabilities(float (&s)[kQueries / 2],
                                              const RowData& rows,
                                              int column,
                                              float scale,
                                              int word,
                                              int bit,
                                              int hidden,
                                              bool all_visible) {
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 log_sum = *reinterpret_cast<const float2*>(rows.log_sum + 8 * j + column);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      std::uint32_t bits = 0;
      if constexpr (Selected) bits = rows.words[8 * j + column + e][word] >> bit;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float& x = s[4 * j + 2 * r + e];
        x = exp2_approx(fmaf(x, scale, -(e == 0 ? log_sum.x : log_sum.y)));
        if constexpr (Selected) {
          if ((bits & (1U << (8 * r))) == 0) x = 0;
        }
      }
    }
  }
  if constexpr (!Selected) {
    if (all_visible) return;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < hidden + 8 * r) s[4 * j + 2 * r + e] = 0;
  }
}

__device__ __forceinline__ float low_half(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_half(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000U);
}
// dp becomes ds = p (dp - delta). Where p = 0 the rows are known to be finite, or zeroed.
__device__ __forceinline__ void to_ds(float (&dp)[kQueries / 2],
                                      const std::uint32_t (&p)[kQueries / 16][4],
                                      const RowData& rows,
                                      int column) {
#pragma unroll
  for (int j = 0; j < kQueries / 8; ++j) {
    const float2 delta = *reinterpret_cast<const float2*>(rows.delta + 8 * j + column);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t pair = p[j / 2][j % 2 * 2 + r];
      float* x = dp + 4 * j + 2 * r;
      x[0] = low_half(pair) * (x[0] - delta.x);
      x[1] = high_half(pair) * (x[1] - delta.y);
    }
  }
}

template <int Dr, bool Selected>
__device__ void consume(const Shared<Dr>& shared,
                        Barriers& barriers,
                        const TiledProblem& p,
                        float* dkr,
                        __nv_bfloat16* dkvb,
                        const QueryBlock& block,
                        const Queries& queries,
                        const TileList& tiles,
                        int h) {
  constexpr int kChannels = Shared<Dr>::kChannels;
  const int group = static_cast<int>(threadIdx.x) / 128 - 1;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) % 128 / kWarp;
  const int r0 = group * kGroupRows + warp * 16 + lane / 4, column = lane % 4 * 2;
  // Keys are counted from the first query.
  const int key_0 = block.row - block.begin - queries.position;
  const float scale = p.scale * kLog2E;
  const std::uint64_t k =
      swizzled_descriptor<Major::k>(shared.key() + group * kGroupRows * kRowBytes);
  const std::uint64_t v =
      swizzled_descriptor<Major::k>(shared.value() + group * kGroupRows * kRowBytes);
  float dk[kChannels / 2] = {}, dv[kHeadWidth / 2] = {};
  Ring<kStages> ring;

  if (tiles.count > 0) mbarrier_wait(&barriers.key, 0);
  for (int i = 0; i < tiles.count; ++i) {
    const int t = tiles[i] * kQueries, stage = ring.stage;
    unsigned char *q = shared.query(stage), *d_o = shared.gradient(stage);
    const RowData& rows = shared.rows(stage);
    std::uint32_t p_t[kQueries / 16][4], ds_t[kQueries / 16][4];
    mbarrier_wait(&barriers.full[stage], ring.parity);
    if (queries.count - t < kQueries) {
      clear_rows(q, kChannels / kChannelBlock, kQueries, queries.count - t);
      clear_rows(d_o, kHeadWidth / kChannelBlock, kQueries, queries.count - t);
      publish_cleared_rows();
    }
    float s[kQueries / 2];
    wgmma_fence();
    product_nt<kChannels, kBlockRows, kQueries>(s, k, swizzled_descriptor<Major::k>(q));
    wgmma_commit();
    wgmma_wait<0>();
    pin_registers(s);
    probabilities<Selected>(s,
                            rows,
                            column,
                            scale,
                            group * 2 + warp / 2,
                            warp % 2 * 16 + lane / 4,
                            key_0 + r0 - t - column,
                            key_0 + group * kGroupRows + kGroupRows - 1 <= t);
    to_fragments<kQueries>(p_t, s);
    float dp[kQueries / 2];
    wgmma_fence();
    product_nt<kHeadWidth, kBlockRows, kQueries>(dp, v, swizzled_descriptor<Major::k>(d_o));
    wgmma_commit();
    product_rn<kQueries, kHeadWidth>(
        dv, p_t, swizzled_descriptor<Major::mn>(d_o, kQueries * kRowBytes));
    wgmma_commit();
    wgmma_wait<1>();
    pin_registers(dp);
    to_ds(dp, p_t, rows, column);
    to_fragments<kQueries>(ds_t, dp);
    wgmma_fence();
    product_rn<kQueries, kChannels>(
        dk, ds_t, swizzled_descriptor<Major::mn>(q, kQueries * kRowBytes));
    wgmma_commit();
    // Leaving dk's product in flight would cost more registers than there are.
    wgmma_wait<0>();
    pin_registers(dv);
    pin_registers(dk);
    // Every lane: the producer writes the rows' data again with ordinary stores.
    mbarrier_arrive(&barriers.empty[stage]);
    ring.advance();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r0 + 8 * r >= block.count) continue;
    const std::int64_t row = block.row + r0 + 8 * r;
    __nv_bfloat16* to = dkvb + (row * p.heads + h) * (2 * kHeadWidth) + column;
#pragma unroll
    for (int j = 0; j < kHeadWidth / 8; ++j) {
      const int at = 4 * j + 2 * r;
      *reinterpret_cast<std::uint32_t*>(to + 8 * j) =
          pack_bf16(dk[at] * p.scale, dk[at + 1] * p.scale);
      *reinterpret_cast<std::uint32_t*>(to + kHeadWidth + 8 * j) = pack_bf16(dv[at], dv[at + 1]);
    }
    if constexpr (Dr > 0) {
      float* to_shared = dkr + (std::int64_t{h} * p.keys + row) * Dr + column;
#pragma unroll
      for (int j = 0; j < Dr / 8; ++j) {
        const int at = 4 * (j + kHeadWidth / 8) + 2 * r;
        *reinterpret_cast<float2*>(to_shared + 8 * j) =
            float2{dk[at] * p.scale, dk[at + 1] * p.scale};
      }
    }
  }
}

template <int Dr, bool Selected>
__global__ void __launch_bounds__(kTiledThreads, 1)
    dkv_kernel(const __grid_constant__ TiledMaps maps,
               const __grid_constant__ TiledProblem p,
               const TiledBackward data,
               __nv_bfloat16* dkvb) {
  // The first keys of a document are seen by most queries.
  const int index = static_cast<int>(blockIdx.x);
  if (index >= *p.key_blocks.count) return;
  __shared__ Barriers barriers;
  __shared__ int listed;
  const Shared<Dr> shared{aligned_shared()};
  const QueryBlock block = p.key_blocks.list[index];
  const Queries queries(p, block);
  const int h = static_cast<int>(blockIdx.y);
  const int key_0 = block.row - block.begin, begin = max(key_0 - queries.position, 0) / kQueries,
            count = max((queries.count + kQueries - 1) / kQueries - begin, 0);
  if (threadIdx.x == 0) {
    mbarrier_init(&barriers.key, 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&barriers.full[s], kWarp);
      mbarrier_init(&barriers.empty[s], kConsumerThreads);
    }
    fence_mbarrier_init();
  }
  TileList tiles{nullptr, count};
  if constexpr (Selected) {
    static_assert(kQueries == kHalfTile);
    if (threadIdx.x < kWarp) {
      // Blocks of a document follow each other, two tiles in each.
      const int row = count > 0 ? 2 * block_with_row(p.blocks, queries.row) + begin : 0;
      const std::uint8_t* flags = p.flags.flags + row * p.flags.per_row + key_0 / kQueries;
      list_tiles(shared.tiles(), &listed, count, [&](int i) {
        return (flags[i * p.flags.per_row] | flags[i * p.flags.per_row + 1]) != 0;
      });
    }
  }
  __syncthreads();
  if constexpr (Selected) tiles = {shared.tiles(), listed};
  tiles.offset = begin;
  if (threadIdx.x < kTiledThreads - kConsumerThreads) {
    set_max_registers_down<kProducerRegisters>();
    if (threadIdx.x < kWarp && tiles.count > 0)
      produce<Dr, Selected>(shared, barriers, maps, p, data, block, queries, tiles, h);
  } else {
    set_max_registers_up<kConsumerRegisters>();
    consume<Dr, Selected>(shared, barriers, p, data.dkr, dkvb, block, queries, tiles, h);
  }
}

template <int Dr, bool Selected>
void launch_dkv(cudaStream_t stream,
                const TiledMaps& maps,
                const TiledProblem& problem,
                const TiledBackward& data,
                TensorView dkvb) {
  const std::size_t list = static_cast<std::size_t>((problem.keys + kQueries - 1) / kQueries);
  const std::size_t bytes =
      Shared<Dr>::kFixed + kSharedSlack + (Selected ? sizeof(std::uint16_t) * list : 0);
  allow_shared_memory(dkv_kernel<Dr, Selected>, bytes);
  const dim3 grid(static_cast<unsigned>(problem.key_blocks.bound),
                  static_cast<unsigned>(problem.heads));
  dkv_kernel<Dr, Selected><<<grid, kTiledThreads, bytes, stream>>>(
      maps, problem, data, reinterpret_cast<__nv_bfloat16*>(dkvb.data()));
  check_launch("kernel attention_backward (tiled): dk, dv");
}

}  // namespace

void tiled_dkv(cudaStream_t stream,
               const TiledProblem& problem,
               const AttentionBackward& op,
               const TiledBackward& data) {
  const bool shared_key = op.q.dim(2) > kHeadWidth, selected = problem.bits.words != nullptr;
  TiledMaps maps{};
  maps.q = head_map(op.q, kQueries);
  maps.d_o = head_map(data.d_o, kQueries);
  maps.kvb = head_map(op.kvb, kBlockRows);
  if (shared_key) maps.kr = head_map(op.kr, kBlockRows);
  if (shared_key && selected) return launch_dkv<64, true>(stream, maps, problem, data, op.dkvb);
  if (shared_key) return launch_dkv<64, false>(stream, maps, problem, data, op.dkvb);
  if (selected) return launch_dkv<0, true>(stream, maps, problem, data, op.dkvb);
  launch_dkv<0, false>(stream, maps, problem, data, op.dkvb);
}

}  // namespace moesaic::cuda
