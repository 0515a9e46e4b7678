// IndexerSelect: the scores of a block of queries go to scratch tile by tile, then one block of threads per query chooses
// (radix_select.cuh). Tiles that no query needs, because it sees at most k keys or none of the tile's, are left out.
#include <cmath>

#include "kernels/cuda/indexer_scores.cuh"
#include "kernels/cuda/indexer_tiled.h"
#include "kernels/cuda/radix_select.cuh"
#include "kernels/ops/indexer.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr std::int64_t kScratchBudget = std::int64_t{128} << 20;

// Queries [first, first + rows); scores [rows, keys] in absolute key columns, visible pairs only.
template <class A, class T>
__global__ void __launch_bounds__(kTileThreads) scores_kernel(A* scores,
                                                              IndexerInputs<A, T> in,
                                                              QueryKeys see,
                                                              std::int64_t first,
                                                              std::int64_t rows,
                                                              std::int64_t more_than) {
  __shared__ TileMemory<A> memory;
  const std::int64_t row = first + std::int64_t{blockIdx.y} * kTile,
                     key = std::int64_t{blockIdx.x} * kTile,
                     row_end = min(first + rows, row + kTile);
  if (key > see.position(row_end - 1) || key + kTile <= see.begins[row]) return;
  const std::int64_t mine = row + threadIdx.x;
  const bool wanted = threadIdx.x < kTile && mine < row_end && see.visible(mine) > more_than;
  if (__syncthreads_or(wanted) == 0) return;
  A sums[kTilePer][kTilePer];
  index_scores(sums, in, row, row_end, key, see.keys, memory);
#pragma unroll
  for (int i = 0; i < kTilePer; ++i) {
    const std::int64_t t = row + tile_row(i);
    if (t >= row_end) continue;
    const std::int64_t begin = see.begins[t], last = see.position(t);
#pragma unroll
    for (int j = 0; j < kTilePer; ++j) {
      const std::int64_t s = key + tile_column(j);
      if (s >= begin && s <= last) scores[(t - first) * see.keys + s] = sums[i][j];
    }
  }
}

// One block per query of [first, first + rows).
template <class A>
__global__ void __launch_bounds__(kMaxSelectThreads) choose_kernel(std::int32_t* selected,
                                                                   const A* scores,
                                                                   QueryKeys see,
                                                                   std::int64_t first,
                                                                   std::int64_t rows,
                                                                   int k) {
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const std::int64_t t = first + r;
    const std::int32_t begin = see.begins[t];
    const int visible = static_cast<int>(see.visible(t)), count = min(k, visible);
    std::int32_t* out = selected + t * k;
    if (visible <= k) {
      for (int i = threadIdx.x; i < count; i += blockDim.x)
        out[i] = begin + i;
    } else {
      const A* row = scores + r * see.keys + begin;
      const auto bar = find_bar(row, visible, k);
      collect(row, visible, k, bar, [&](int position, auto, int index) {
        out[position] = begin + index;
      });
    }
    for (int i = count + static_cast<int>(threadIdx.x); i < k; i += blockDim.x)
      out[i] = -1;
    __syncthreads();  // the next row writes the shared arrays again
  }
}

template <class A, class T>
void scores_plain(const CudaContext& context,
                  A* scores,
                  const IndexerInputs<A, T>& in,
                  const QueryKeys& see,
                  std::int64_t first,
                  std::int64_t rows,
                  std::int64_t more_than) {
  constexpr std::int64_t kMaxRows = std::int64_t{65535} * kTile;  // of one grid
  const auto key_tiles = static_cast<unsigned>((see.keys + kTile - 1) / kTile);
  for (std::int64_t done = 0; done < rows; done += kMaxRows) {
    const std::int64_t part = std::min(rows - done, kMaxRows);
    scores_kernel<<<dim3(key_tiles, static_cast<unsigned>((part + kTile - 1) / kTile)),
                    kTileThreads,
                    0,
                    native_stream(context)>>>(
        scores + done * see.keys, in, see, first + done, part, more_than);
    check_launch("kernel indexer_select: scores");
  }
}

// The queries that are worked on begin with a whole tile.
std::int64_t first_of(const IndexerSelect& op) {
  return op.query_begin / kTile * kTile;
}

bool use_tiled(const CudaContext& context, const IndexerSelect& op) {
  return may_specialise(context) && scores_tiled_takes(op.qi, op.ki, op.w);
}

template <class A, class T>
void select(CudaContext& context, const IndexerSelect& op, TensorView begins, TensorView scratch) {
  const QueryKeys see{op.qi.dim(0), op.ki.dim(0), begins.as<std::int32_t>()};
  const bool choosing = op.given.empty(), all_wanted = !op.scores.empty();
  const auto in = indexer_inputs<A, T>(op);
  const bool tiled = use_tiled(context, op);
  const TensorView scores = all_wanted ? op.scores : scratch;
  const auto stream = native_stream(context);
  launch_document_begins(context, begins, op.cu_seqlens, see.keys);
  if (all_wanted) zero_tensor(op.scores, context.stream);
  const std::int64_t at_a_time = scores.dim(0);
  for (std::int64_t first = first_of(op); first < op.last_query(); first += at_a_time) {
    const std::int64_t rows = std::min(at_a_time, op.last_query() - first);
    if (tiled) {
      scores_tiled(context,
                   scores.as<float>(),
                   op.qi,
                   op.ki,
                   op.w,
                   see,
                   first,
                   rows,
                   all_wanted ? 0 : op.selected.dim(1));
    } else {
      scores_plain(
          context, scores.as<A>(), in, see, first, rows, all_wanted ? 0 : op.selected.dim(1));
    }
    if (!choosing) continue;
    choose_kernel<<<grid_for(context, rows, 16), kMaxSelectThreads, 0, stream>>>(
        op.selected.as<std::int32_t>(),
        scores.as<A>(),
        see,
        first,
        rows,
        static_cast<int>(op.selected.dim(1)));
    check_launch("kernel indexer_select: choice");
  }
}

}  // namespace

void launch(CudaContext& context, const IndexerSelect& op) {
  if (op.qi.dim(0) == 0) return;
  const bool choosing = op.given.empty(), all_wanted = !op.scores.empty();
  const DType stats = op.qi.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const std::int64_t queries = op.qi.dim(0), keys = op.ki.dim(0);
  const Arena::Mark mark(context.scratch);
  const TensorView begins = context.scratch.take({queries}, DType::i32, "indexer documents");
  TensorView scores;
  if (choosing && !all_wanted) {
    const std::int64_t rows = rows_at_a_time(op.last_query() - first_of(op),
                                             keys,
                                             static_cast<std::int64_t>(byte_size(stats)),
                                             kScratchBudget);
    scores = context.scratch.take({rows, keys}, stats, "indexer scores");
  }
  report_path(context, op, use_tiled(context, op) ? "tiled" : "plain");
  if (is_dry(context)) return;
  if (!choosing) copy_tensor(op.selected, op.given, context.stream);
  if (!choosing && !all_wanted) return;
  dispatch_float(op.qi.dtype(),
                 [&]<class T>(TypeTag<T>) { select<acc_t<T>, T>(context, op, begins, scores); });
}

}  // namespace moesaic
