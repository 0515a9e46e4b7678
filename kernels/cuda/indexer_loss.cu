// IndexerLoss. The kernels here take any size and type; those of indexer_tiled.h take over for the sizes of large models. A block of queries at a time: target and index scores of all its pairs go
// to scratch (tiles of 64 x 64, heads in a loop), rows turn them into the loss and dI, and two kernels make the gradients
// from dI and recomputed dots: dqi and dw by (query tile, head), dki by (key tile, group of heads). A sum over queries or
// keys runs in their order, one pair at a time: its bits do not depend on tiles, blocks of queries, or other documents.
#include <cmath>

#include "kernels/cuda/indexer_scores.cuh"
#include "kernels/cuda/indexer_tiled.h"
#include "kernels/ops/indexer.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr std::int64_t kScratchBudget = std::int64_t{256} << 20;
constexpr int kRowThreads = 256;
constexpr std::int64_t kKeyBlocks = 512;  // of dki: about so many blocks of threads

template <class A, class T>
struct LossArgs {
  IndexerInputs<A, T> indexer;
  const T* q = nullptr;
  const T* kvb = nullptr;
  const T* kr = nullptr;
  const A* lse = nullptr;
  int heads = 0, dn = 0, dr = 0, kvb_width = 0;
  A scale = 1;
  QueryKeys see;
  SelectionWords selection;
  std::int64_t first = 0, rows = 0;  // the queries of this block
  A* target = nullptr;               // [rows, keys]
  A* index = nullptr;                // [rows, keys]: scores, then dI

  __device__ __forceinline__ std::int64_t row_end(std::int64_t row) const {
    return min(first + rows, row + kTile);
  }
  __device__ __forceinline__ bool sees(std::int64_t t, std::int64_t s) const {
    return s >= see.begins[t] && s <= see.position(t) && selection.holds(t, s);
  }
  /// Whether any query of [row, row_end) sees a key of [key, key + kTile). All threads call it.
  __device__ __forceinline__ bool tile_seen(std::int64_t row,
                                            std::int64_t end,
                                            std::int64_t key) const {
    if (key > see.position(end - 1) || key + kTile <= see.begins[row]) return false;
    if (selection.words == nullptr) return true;
    bool any = false;
    for (std::int64_t i = threadIdx.x; i < 2 * (end - row); i += blockDim.x) {
      const std::int64_t word = key / 32 + i % 2;
      any = any || (word < selection.per_row &&
                    selection.words[(row + i / 2 - first) * selection.per_row + word] != 0);
    }
    return __syncthreads_or(any) != 0;
  }
};

// target = sum_h exp(logit_h - lse_h), index = scores (unless they are there), both of seen pairs only.
template <class A, class T>
__global__ void __launch_bounds__(kTileThreads)
    pairs_kernel(LossArgs<A, T> args, bool with_target, bool with_scores) {
  __shared__ TileMemory<A> memory;
  const std::int64_t row = args.first + std::int64_t{blockIdx.y} * kTile,
                     key = std::int64_t{blockIdx.x} * kTile, end = args.row_end(row),
                     keys = args.see.keys;
  if (!args.tile_seen(row, end, key)) return;
  A target[kTilePer][kTilePer] = {}, index[kTilePer][kTilePer] = {};
  for (int head = 0; with_target && head < args.heads; ++head) {
    A dots[kTilePer][kTilePer] = {};
    tile_dots(
        dots,
        args.dn + args.dr,
        [&](int r, int c) {
          const std::int64_t t = row + r;
          return t < end ? widen<A>(args.q[(t * args.heads + head) * (args.dn + args.dr) + c])
                         : A(0);
        },
        [&](int s, int c) {
          if (key + s >= keys) return A(0);
          return widen<A>(c < args.dn
                              ? args.kvb[((key + s) * args.heads + head) * args.kvb_width + c]
                              : args.kr[(key + s) * args.dr + c - args.dn]);
        },
        memory);
#pragma unroll
    for (int i = 0; i < kTilePer; ++i) {
      const std::int64_t t = row + tile_row(i);
      const A lse = t < end ? args.lse[head * args.see.queries + t] : A(0);
#pragma unroll
      for (int j = 0; j < kTilePer; ++j) {
        // Hidden pairs may lie far above lse: no exponential of them.
        if (t < end && args.sees(t, key + tile_column(j)))
          target[i][j] += exp(dots[i][j] * args.scale - lse);
      }
    }
  }
  if (with_scores) index_scores(index, args.indexer, row, end, key, keys, memory);
#pragma unroll
  for (int i = 0; i < kTilePer; ++i) {
    const std::int64_t t = row + tile_row(i);
#pragma unroll
    for (int j = 0; j < kTilePer; ++j) {
      const std::int64_t s = key + tile_column(j);
      if (t >= end || !args.sees(t, s)) continue;
      if (with_target) args.target[(t - args.first) * keys + s] = target[i][j];
      if (with_scores) args.index[(t - args.first) * keys + s] = index[i][j];
    }
  }
}

template <class A>
__device__ A block_max(A x) {
  __shared__ A partial[kRowThreads / kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    x = max(x, __shfl_xor_sync(0xffffffffU, x, offset));
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (int i = 0; i < kRowThreads / kWarp; ++i)
    x = max(x, partial[i]);
  __syncthreads();
  return x;
}

// One block per query: its KL, and index becomes dI = weight / tokens (softmax(index) - target / sum), 0 where hidden and
// for queries before `counted`.
template <class A, class T>
__global__ void __launch_bounds__(kRowThreads) rows_kernel(LossArgs<A, T> args,
                                                           A* kl,
                                                           std::int64_t counted,
                                                           double weight,
                                                           const void* tokens,
                                                           bool wide_tokens) {
  const double divisor = tokens == nullptr ? 1.0
                         : wide_tokens     ? *static_cast<const double*>(tokens)
                                       : static_cast<double>(*static_cast<const float*>(tokens));
  const A factor = static_cast<A>(weight / divisor), nothing = -static_cast<A>(INFINITY);
  for (std::int64_t r = blockIdx.x; r < args.rows; r += gridDim.x) {
    const std::int64_t t = args.first + r, begin = args.see.begins[t], n = args.see.visible(t);
    A* index = args.index + r * args.see.keys + begin;
    const A* target = args.target + r * args.see.keys + begin;
    const auto seen = [&](std::int64_t c) { return args.selection.holds(t, begin + c); };
    A total = 0, largest = nothing, exp_total = 0, loss = 0;
    for (std::int64_t c = threadIdx.x; c < n; c += kRowThreads) {
      if (!seen(c)) continue;
      total += target[c];
      largest = max(largest, index[c]);
    }
    total = row_sum<kRowThreads>(total);
    largest = block_max(largest);
    const bool keys = t >= counted && total > A(0) && largest != nothing;
    for (std::int64_t c = threadIdx.x; c < n; c += kRowThreads) {
      if (keys && seen(c)) exp_total += exp(index[c] - largest);
    }
    const A log_sum = largest + log(row_sum<kRowThreads>(exp_total)), inverse = A(1) / total;
    for (std::int64_t c = threadIdx.x; c < n; c += kRowThreads) {
      A d = 0;
      if (keys && seen(c)) {
        const A p = target[c] * inverse, log_q = index[c] - log_sum;
        if (p > A(0)) loss += p * (log(p) - log_q);
        d = factor * (exp(log_q) - p);
      }
      index[c] = d;
    }
    loss = row_sum<kRowThreads>(loss);
    if (threadIdx.x == 0) kl[t] = keys || total == total || t < counted ? loss : total;
  }
}

template <class A>
struct GradientMemory {
  TileMemory<A> tiles;
  A pairs[kTile][kTile + 1];
};

// dots -> da of a tile, into memory.pairs; with dw, first dI relu(dot) there and its sums over the keys, in order.
template <class A, class T>
__device__ void pair_gradients(GradientMemory<A>& memory,
                               const LossArgs<A, T>& args,
                               const A (&dots)[kTilePer][kTilePer],
                               int head,
                               std::int64_t row,
                               std::int64_t end,
                               std::int64_t key,
                               A* dw) {
  A d_index[kTilePer][kTilePer];
#pragma unroll
  for (int i = 0; i < kTilePer; ++i) {
    const std::int64_t t = row + tile_row(i);
#pragma unroll
    for (int j = 0; j < kTilePer; ++j) {
      const std::int64_t s = key + tile_column(j);
      const bool seen = t < end && s >= args.see.begins[t] && s <= args.see.position(t);
      d_index[i][j] = seen ? args.index[(t - args.first) * args.see.keys + s] : A(0);
      if (dw != nullptr)
        memory.pairs[tile_row(i)][tile_column(j)] = seen ? d_index[i][j] * relu(dots[i][j]) : A(0);
    }
  }
  if (dw != nullptr) {
    __syncthreads();
    if (threadIdx.x < kTile) {
      for (int s = 0; s < kTile; ++s)
        *dw += memory.pairs[threadIdx.x][s];
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kTilePer; ++i) {
    const std::int64_t t = row + tile_row(i);
    const A weight = t < end ? args.indexer.weight(t, head) : A(0);
#pragma unroll
    for (int j = 0; j < kTilePer; ++j)
      memory.pairs[tile_row(i)][tile_column(j)] = dots[i][j] > A(0) ? weight * d_index[i][j] : A(0);
  }
  __syncthreads();
}

// grid (query tiles, heads, tiles of dim): dqi of 64 queries, one head and 64 channels; dw where the channels are the first.
template <class A, class T, class W>
__global__ void __launch_bounds__(kTileThreads)
    query_gradient_kernel(LossArgs<A, T> args, T* dqi, W* dw) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& memory = *reinterpret_cast<GradientMemory<A>*>(shared);
  const std::int64_t row = args.first + std::int64_t{blockIdx.x} * kTile, end = args.row_end(row);
  const int head = static_cast<int>(blockIdx.y), channel = static_cast<int>(blockIdx.z) * kTile,
            dim = args.indexer.dim;
  A sum[kTilePer][kTilePer] = {}, my_dw = 0;
  for (std::int64_t key = args.see.begins[row] / kTile * kTile; key <= args.see.position(end - 1);
       key += kTile) {
    if (!args.tile_seen(row, end, key)) continue;
    A dots[kTilePer][kTilePer];
    index_dots(dots, args.indexer, head, row, end, key, args.see.keys, memory.tiles);
    pair_gradients(memory, args, dots, head, row, end, key, channel == 0 ? &my_dw : nullptr);
    tile_dots(
        sum,
        kTile,
        [&](int r, int s) { return memory.pairs[r][s]; },
        [&](int c, int s) {
          return key + s < args.see.keys && channel + c < dim
                     ? args.indexer.key(key + s, channel + c)
                     : A(0);
        },
        memory.tiles);
  }
#pragma unroll
  for (int i = 0; i < kTilePer; ++i) {
    const std::int64_t t = row + tile_row(i);
#pragma unroll
    for (int j = 0; j < kTilePer; ++j) {
      const int c = channel + tile_column(j);
      if (t < end && c < dim)
        dqi[(t * args.indexer.heads + head) * dim + c] = round_to<T>(sum[i][j]);
    }
  }
  const std::int64_t t = row + threadIdx.x;
  if (channel == 0 && threadIdx.x < kTile && t < end)
    dw[t * args.indexer.heads + head] = round_to<W>(args.indexer.factor * my_dw);
}

// grid (key tiles, groups of heads, tiles of dim): parts[group] += over the block's queries in order, heads of the group.
template <class A, class T>
__global__ void __launch_bounds__(kTileThreads)
    key_gradient_kernel(LossArgs<A, T> args, A* parts, int heads_per_group, bool fresh) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& memory = *reinterpret_cast<GradientMemory<A>*>(shared);
  const std::int64_t key = std::int64_t{blockIdx.x} * kTile, keys = args.see.keys,
                     last = args.first + args.rows;
  const int channel = static_cast<int>(blockIdx.z) * kTile, dim = args.indexer.dim,
            head_begin = static_cast<int>(blockIdx.y) * heads_per_group,
            head_end = min(args.indexer.heads, head_begin + heads_per_group);
  A* part = parts + std::int64_t{blockIdx.y} * keys * dim;
  A sum[kTilePer][kTilePer] = {};
#pragma unroll
  for (int i = 0; i < kTilePer; ++i)
#pragma unroll
    for (int j = 0; j < kTilePer; ++j) {
      const std::int64_t s = key + tile_row(i);
      const int c = channel + tile_column(j);
      if (!fresh && s < keys && c < dim) sum[i][j] = part[s * dim + c];
    }
  const std::int64_t before = max(std::int64_t{0}, key - args.see.position(args.first)) / kTile *
                              kTile;  // queries that see no such key
  for (std::int64_t row = args.first + before; row < last; row += kTile) {
    const std::int64_t end = args.row_end(row);
    if (args.see.begins[row] >= key + kTile) break;
    if (!args.tile_seen(row, end, key)) continue;
    for (int head = head_begin; head < head_end; ++head) {
      A dots[kTilePer][kTilePer];
      index_dots(dots, args.indexer, head, row, end, key, keys, memory.tiles);
      pair_gradients<A, T>(memory, args, dots, head, row, end, key, nullptr);
      tile_dots(
          sum,
          kTile,
          [&](int s, int r) { return memory.pairs[r][s]; },
          [&](int c, int r) {
            return row + r < end && channel + c < dim
                       ? args.indexer.query(row + r, head, channel + c)
                       : A(0);
          },
          memory.tiles);
    }
  }
#pragma unroll
  for (int i = 0; i < kTilePer; ++i)
#pragma unroll
    for (int j = 0; j < kTilePer; ++j) {
      const std::int64_t s = key + tile_row(i);
      const int c = channel + tile_column(j);
      if (s < keys && c < dim) part[s * dim + c] = sum[i][j];
    }
}

template <class A, class T>
__global__ void add_parts_kernel(T* dki, const A* parts, std::int64_t n, int groups) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    A sum = parts[i];
    for (int g = 1; g < groups; ++g)
      sum += parts[g * n + i];
    dki[i] = round_to<T>(sum);
  }
}

// kl += the rows' values, in f64; one block.
template <class A>
__global__ void __launch_bounds__(kRowThreads)
    add_rows_kernel(A* kl, const A* rows, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += kRowThreads)
    sum += static_cast<double>(rows[i]);
  sum = row_sum<kRowThreads>(sum);
  if (threadIdx.x == 0) *kl = static_cast<A>(static_cast<double>(*kl) + sum);
}

// Which of the three parts run on tensor cores.
struct Paths {
  bool target = false, scores = false, gradients = false;
  const char* name() const {
    return target && scores ? "tiled"
           : target         ? "target tiled"
           : scores         ? "scores and gradients tiled"
                            : "plain";
  }
};
Paths paths_of(const CudaContext& context, const IndexerLoss& op) {
  const bool may = may_specialise(context), gradients = !op.dqi.empty();
  return {
      may && target_tiled_takes(op),
      may && scores_tiled_takes(op.qi, op.ki, op.w) && (!gradients || gradients_tiled_takes(op)),
      may && gradients && gradients_tiled_takes(op)};
}

struct LossMemory {
  TensorView begins, words, target, index, kl, parts;
  std::int64_t first = 0;  // the queries that are worked on begin with a whole tile
  std::int64_t rows = 0;   // so many at a time
  int heads_per_group = 1, groups = 1;
};

LossMemory take_memory(Arena& scratch, const IndexerLoss& op, const Paths& paths) {
  const DType stats = op.qi.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const std::int64_t n = op.qi.dim(0), keys = op.ki.dim(0), heads = op.qi.dim(1),
                     dim = op.qi.dim(2);
  LossMemory m;
  m.first = op.query_begin / kTile * kTile;
  m.rows = rows_at_a_time(op.last_query() - m.first,
                          keys,
                          2 * static_cast<std::int64_t>(byte_size(stats)) + 1,
                          kScratchBudget);
  m.begins = scratch.take({n}, DType::i32, "indexer documents");
  if (!op.selected.empty())
    m.words = scratch.take({m.rows, (keys + 31) / 32}, DType::i32, "indexer selection");
  m.target = scratch.take({m.rows, keys}, stats, "indexer target");
  m.index = scratch.take({m.rows, keys}, stats, "indexer scores");
  m.kl = scratch.take({n}, stats, "indexer loss per query");
  if (!op.dqi.empty()) {
    const std::int64_t tiles = (keys + kTile - 1) / kTile;
    const std::int64_t groups = std::clamp<std::int64_t>(kKeyBlocks / tiles, 1, heads);
    m.heads_per_group = static_cast<int>((heads + groups - 1) / groups);
    m.groups = static_cast<int>((heads + m.heads_per_group - 1) / m.heads_per_group);
    if (paths.gradients) m.groups = static_cast<int>(gradient_chunks(keys));
    m.parts = scratch.take({m.groups, keys, dim}, stats, "indexer key gradients");
  }
  return m;
}

template <class A, class T>
void gradients(CudaContext& context,
               const IndexerLoss& op,
               const LossMemory& m,
               const LossArgs<A, device_t<T>>& args) {
  using D = device_t<T>;
  const auto stream = native_stream(context);
  const auto channels = static_cast<unsigned>((op.qi.dim(2) + kTile - 1) / kTile);
  const auto tiles_of = [](std::int64_t n) {
    return static_cast<unsigned>((n + kTile - 1) / kTile);
  };
  constexpr int kShared = static_cast<int>(sizeof(GradientMemory<A>));
  const auto allow = [](const void* kernel) {
    MOESAIC_CUDA_CALL(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared));
  };
  auto* dqi = reinterpret_cast<D*>(op.dqi.as<T>());
  const dim3 queries(tiles_of(args.rows), static_cast<unsigned>(op.qi.dim(1)), channels);
  if (op.dw.dtype() == dtype_of<A>) {
    allow(reinterpret_cast<const void*>(&query_gradient_kernel<A, D, A>));
    query_gradient_kernel<<<queries, kTileThreads, kShared, stream>>>(args, dqi, op.dw.as<A>());
  } else {
    allow(reinterpret_cast<const void*>(&query_gradient_kernel<A, D, D>));
    query_gradient_kernel<<<queries, kTileThreads, kShared, stream>>>(
        args, dqi, reinterpret_cast<D*>(op.dw.as<T>()));
  }
  check_launch("kernel indexer_loss: gradient of the queries");
  allow(reinterpret_cast<const void*>(&key_gradient_kernel<A, D>));
  key_gradient_kernel<<<dim3(tiles_of(op.ki.dim(0)), static_cast<unsigned>(m.groups), channels),
                        kTileThreads,
                        kShared,
                        stream>>>(args, m.parts.as<A>(), m.heads_per_group, args.first == m.first);
  check_launch("kernel indexer_loss: gradient of the keys");
}

template <class A, class T>
void loss(CudaContext& context, const IndexerLoss& op, const LossMemory& m, const Paths& paths) {
  using D = device_t<T>;
  const std::int64_t n = op.qi.dim(0), keys = op.ki.dim(0);
  const auto stream = native_stream(context);
  LossArgs<A, D> args{.indexer = indexer_inputs<A, T>(op),
                      .q = reinterpret_cast<const D*>(op.q.as<T>()),
                      .kvb = reinterpret_cast<const D*>(op.kvb.as<T>()),
                      .kr = op.kr.empty() ? nullptr : reinterpret_cast<const D*>(op.kr.as<T>()),
                      .lse = op.lse.as<A>(),
                      .heads = static_cast<int>(op.q.dim(1)),
                      .dn = static_cast<int>(op.dn),
                      .dr = static_cast<int>(op.q.dim(2) - op.dn),
                      .kvb_width = static_cast<int>(op.kvb.dim(2)),
                      .scale = static_cast<A>(op.scale),
                      .see = {n, keys, m.begins.as<std::int32_t>()},
                      .target = m.target.as<A>(),
                      .index = m.index.as<A>()};
  launch_document_begins(context, m.begins, op.cu_seqlens, keys);
  if (op.last_query() - m.first < n) {  // what is not worked on
    const auto clear = [&](const TensorView& all) {
      if (!all.empty()) MOESAIC_CUDA_CALL(cudaMemsetAsync(all.data(), 0, all.bytes(), stream));
    };
    clear(m.kl);
    clear(op.dqi);
    clear(op.dw);
  }
  const auto key_tiles = static_cast<unsigned>((keys + kTile - 1) / kTile);
  for (std::int64_t first = m.first; first < op.last_query(); first += m.rows) {
    args.first = first;
    args.rows = std::min(m.rows, op.last_query() - first);
    if (!op.selected.empty()) {
      launch_selection_words(context, m.words, op.selected, args.see, first, args.rows);
      args.selection = {reinterpret_cast<const std::uint32_t*>(m.words.as<std::int32_t>()),
                        first,
                        m.words.dim(1)};
    }
    if (paths.target)
      target_tiled(context, m.target.as<float>(), op, args.see, args.selection, first, args.rows);
    if (paths.scores)
      scores_tiled(context, m.index.as<float>(), op.qi, op.ki, op.w, args.see, first, args.rows, 0);
    if (!paths.target || !paths.scores) {
      pairs_kernel<<<dim3(key_tiles, static_cast<unsigned>((args.rows + kTile - 1) / kTile)),
                     kTileThreads,
                     0,
                     stream>>>(args, !paths.target, !paths.scores);
      check_launch("kernel indexer_loss: targets and scores");
    }
    rows_kernel<<<grid_for(context, args.rows), kRowThreads, 0, stream>>>(
        args,
        m.kl.as<A>(),
        op.query_begin,
        op.weight,
        op.tokens.empty() ? nullptr : op.tokens.data(),
        op.tokens.dtype() == DType::f64);
    check_launch("kernel indexer_loss: rows");
    if (op.dqi.empty()) continue;
    if (paths.gradients) {
      gradients_tiled(context,
                      op,
                      m.parts.as<float>(),
                      m.index.as<float>(),
                      args.see,
                      args.selection,
                      first,
                      args.rows,
                      m.rows,
                      first == m.first);
    } else {
      gradients<A, T>(context, op, m, args);
    }
  }
  add_rows_kernel<<<1, kRowThreads, 0, stream>>>(op.kl.as<A>(), m.kl.as<A>(), n);
  check_launch("kernel indexer_loss: sum");
  if (op.dqi.empty()) return;
  add_parts_kernel<<<grid_for(context, (op.dki.numel() + kRowThreads - 1) / kRowThreads),
                     kRowThreads,
                     0,
                     stream>>>(
      reinterpret_cast<D*>(op.dki.as<T>()), m.parts.as<A>(), op.dki.numel(), m.groups);
  check_launch("kernel indexer_loss: key gradients");
}

}  // namespace

void launch(CudaContext& context, const IndexerLoss& op) {
  if (op.qi.dim(0) == 0) return;
  const Arena::Mark mark(context.scratch);
  const Paths paths = paths_of(context, op);
  const LossMemory memory = take_memory(context.scratch, op, paths);
  report_path(context, op, paths.name());
  if (is_dry(context)) return;
  dispatch_float(op.qi.dtype(),
                 [&]<class T>(TypeTag<T>) { loss<acc_t<T>, T>(context, op, memory, paths); });
}

}  // namespace moesaic
