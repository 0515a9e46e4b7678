// Attention forward for any sizes: one block per (query block, head), keys in tiles, running softmax
// in the statistics type. The output's sums live in shared memory; outputs wider than fit are cut by
// channels over the grid, and every part computes the logits again.
#include "kernels/cuda/attention_plain.cuh"

namespace moesaic::cuda {
namespace {

template <class A, class T>
struct ForwardArgs {
  PlainInputs<T> in;
  QueryBlocks blocks;
  SelectionBits bits;
  A* o;
  A* lse;
  A* maxima;  // [H, blocks.bound]
  A scale;
};

// The running softmax of a thread's 4 rows; the kSide threads of a row hold the same values.
template <class A>
struct RunningSoftmax {
  A largest[4], total[4], shrink[4];
  __device__ RunningSoftmax() {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      largest[i] = -INFINITY, total[i] = 0, shrink[i] = 1;
  }
  /// Folds a tile of logits in; they become exp(logit - largest).
  __device__ void fold(A (&logit)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      A seen = max(max(logit[i][0], logit[i][1]), max(logit[i][2], logit[i][3]));
#pragma unroll
      for (int offset = PlainTile<A>::kSide / 2; offset > 0; offset /= 2)
        seen = max(seen, __shfl_xor_sync(0xffffffffU, seen, offset));
      seen = max(seen, largest[i]);
      // While no key has been seen, exp(-inf - 0) = 0; a logit of NaN stays one.
      const A base = seen == -INFINITY ? A(0) : seen;
      shrink[i] = exp(largest[i] - base);
      A sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        logit[i][j] = exp(logit[i][j] - base);
        sum += logit[i][j];
      }
#pragma unroll
      for (int offset = PlainTile<A>::kSide / 2; offset > 0; offset /= 2)
        sum += __shfl_xor_sync(0xffffffffU, sum, offset);
      total[i] = total[i] * shrink[i] + sum;
      largest[i] = seen;
    }
  }
};

template <class A>
__device__ A largest_of_block(const RunningSoftmax<A>& softmax, int count, A* buffer) {
  const PlainThread<A> me;
  if (me.x == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      buffer[me.row(i)] = me.row(i) < count ? softmax.largest[i] : A(-INFINITY);
  }
  __syncthreads();
  A largest = -INFINITY;
  for (int i = 0; i < PlainTile<A>::kRows; ++i)
    largest = max(largest, buffer[i]);
  return largest;
}

template <class A, class T>
__global__ void __launch_bounds__(PlainTile<A>::kThreads) forward_kernel(ForwardArgs<A, T> args) {
  using Tile = PlainTile<A>;
  if (blockIdx.x >= *args.blocks.count) return;
  extern __shared__ __align__(16) unsigned char shared[];
  A* const buffers = reinterpret_cast<A*>(shared);
  A* const weights = buffers + 2 * Tile::kOperand;
  A* const sum = weights + Tile::kOperand;

  const AttentionSizes& size = args.in.size;
  const QueryBlock block = args.blocks.list[blockIdx.x];
  const std::int64_t h = blockIdx.y;
  const ColumnRange columns(size.dv, Tile::kColumns);
  const int ld = padded<A>(columns.end - columns.begin);
  const int position =
      static_cast<int>(size.first()) + block.row - block.begin;  // of its first row
  const int last = position + block.count - 1;
  const PlainThread<A> me;
  for (int i = threadIdx.x; i < Tile::kRows * ld; i += Tile::kThreads)
    sum[i] = 0;

  RunningSoftmax<A> softmax;
  for (int s = 0; s <= last; s += Tile::kRows) {
    if (!any_visible<A>(args.bits, block.row, block.count, last, s)) continue;
    const int keys = min(Tile::kRows, block.end - block.begin - s);
    A logit[4][4];
    dot_tile(logit,
             buffers,
             args.in.query(h),
             block.row,
             block.count,
             args.scale,
             args.in.key(h),
             block.begin + s,
             keys,
             A(1),
             size.dqk());
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = me.row(i), key = me.column(j);
        if (r >= block.count || key >= keys ||
            !args.bits.visible(block.row + r, position + r, s + key))
          logit[i][j] = -INFINITY;
      }
    softmax.fold(logit);
    store_square(weights, logit);
    add_weighted_rows(sum,
                      ld,
                      softmax.shrink,
                      weights,
                      buffers,
                      args.in.value(h),
                      block.begin + s,
                      keys,
                      columns.begin,
                      columns.end,
                      A(1));
  }
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    const int r = me.row(i);
    if (r >= block.count) continue;
    const std::int64_t row = block.row + r;
    const A total = softmax.total[i], inverse = total == A(0) ? A(0) : A(1) / total;
    for (std::int64_t c = columns.begin + me.x; c < columns.end; c += Tile::kSide)
      args.o[(row * size.heads + h) * size.dv + c] = sum[r * ld + c - columns.begin] * inverse;
    if (me.x == 0 && blockIdx.z == 0)
      args.lse[h * size.queries + row] =
          total == A(0) ? A(-INFINITY) : softmax.largest[i] + log(total);
  }
  if (args.maxima == nullptr || blockIdx.z != 0) return;
  const A largest = largest_of_block(softmax, block.count, buffers);
  if (threadIdx.x == 0) args.maxima[h * args.blocks.bound + blockIdx.x] = largest;
}

template <class T>
void forward(CudaContext& context, const AttentionForward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  using Tile = PlainTile<A>;
  const AttentionSizes size = attention_sizes(op);
  const Arena::Mark mark(context.scratch);
  const auto memory = QueryBlocksMemory::take(context.scratch, size, Tile::kRows);
  const TensorView words = take_selection_bits(context.scratch, size, op.selected);
  const TensorView maxima =
      context.scratch.take({size.heads, memory.list.dim(0)}, dtype_of<A>, "attention maxima");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  const QueryBlocks blocks = memory.blocks();
  list_query_blocks(stream, blocks, size, op.cu_seqlens, Tile::kRows);
  const ForwardArgs<A, D> args{{size,
                                reinterpret_cast<const D*>(op.q.as<T>()),
                                reinterpret_cast<const D*>(op.kvb.as<T>()),
                                reinterpret_cast<const D*>(op.kr.as<T>())},
                               blocks,
                               fill_selection_bits(stream, words, size, op.cu_seqlens, op.selected),
                               op.o.as<A>(),
                               op.lse.as<A>(),
                               op.max_logit.empty() ? nullptr : maxima.as<A>(),
                               static_cast<A>(op.scale)};
  const std::int64_t columns = std::min<std::int64_t>(size.dv, Tile::kColumns);
  const std::size_t bytes =
      sizeof(A) * static_cast<std::size_t>(3 * Tile::kOperand + Tile::kRows * padded<A>(columns));
  if (size.queries > 0 && size.heads > 0) {
    allow_shared_memory(forward_kernel<A, D>, bytes);
    const dim3 grid(static_cast<unsigned>(blocks.bound),
                    static_cast<unsigned>(size.heads),
                    static_cast<unsigned>(plain_column_blocks(size.dv, Tile::kColumns)));
    forward_kernel<A, D><<<grid, Tile::kThreads, bytes, stream>>>(args);
    check_launch("kernel attention_forward (plain)");
  }
  if (!op.max_logit.empty() && size.heads > 0)
    combine_max_logits(
        stream, op.max_logit.as<A>(), maxima.as<A>(), blocks, size.heads, op.accumulate_max);
}

}  // namespace

void attention_plain(CudaContext& context, const AttentionForward& op) {
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { forward<T>(context, op); });
}

}  // namespace moesaic::cuda
