// Attention backward for any sizes, as two kernels without atomics: one owns a block of query rows and
// walks its keys (dq), one owns a tile of keys and walks the query rows that see it (dk, dv). Both
// compute the probabilities again. dk of the shared key part is kept per head and summed afterwards.
#include "kernels/cuda/attention_plain.cuh"

namespace moesaic::cuda {
namespace {

template <class A, class T, class G>
struct BackwardArgs {
  PlainInputs<T> in;
  QueryBlocks blocks;      // of queries
  QueryBlocks key_blocks;  // of keys; the same ones where there are as many queries
  SelectionBits bits;
  const G* d_o;
  const A *delta, *log_sum;  // [H, Tq]
  T *dq, *dkvb;
  A* dkr;  // [H, Tk, dr]
  A scale;
  __device__ HeadRows<G> d_out(std::int64_t h) const {
    return {d_o + h * in.size.dv, in.size.heads * in.size.dv, in.size.dv, nullptr, 0};
  }
};

template <class A>
__device__ void clear(A* sum, int ld) {
  for (int i = threadIdx.x; i < PlainTile<A>::kRows * ld; i += PlainTile<A>::kThreads)
    sum[i] = 0;
}

template <class A, class T, class G>
__global__ void __launch_bounds__(PlainTile<A>::kThreads) dq_kernel(BackwardArgs<A, T, G> args) {
  using Tile = PlainTile<A>;
  if (blockIdx.x >= *args.blocks.count) return;
  extern __shared__ __align__(16) unsigned char shared[];
  A* const buffers = reinterpret_cast<A*>(shared);
  A* const ds = buffers + 2 * Tile::kOperand;
  A* const sum = ds + Tile::kOperand;

  const AttentionSizes& size = args.in.size;
  const QueryBlock block = args.blocks.list[blockIdx.x];
  const std::int64_t h = blockIdx.y;
  const ColumnRange columns(size.dqk(), Tile::kColumns);
  const int ld = padded<A>(columns.end - columns.begin);
  const int position = static_cast<int>(size.first()) + block.row - block.begin,
            last = position + block.count - 1;
  const PlainThread<A> me;
  clear(sum, ld);
  A delta[4], log_sum[4];
  const A keep[4] = {1, 1, 1, 1};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool inside = me.row(i) < block.count;
    const std::int64_t at = h * size.queries + block.row + me.row(i);
    delta[i] = inside ? args.delta[at] : A(0);
    log_sum[i] = inside ? args.log_sum[at] : A(INFINITY);
  }
  for (int s = 0; s <= last; s += Tile::kRows) {
    if (!any_visible<A>(args.bits, block.row, block.count, last, s)) continue;
    const int keys = min(Tile::kRows, block.end - block.begin - s);
    A p[4][4], dp[4][4];
    dot_tile(p,
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
    dot_tile(dp,
             buffers,
             args.d_out(h),
             block.row,
             block.count,
             A(1),
             args.in.value(h),
             block.begin + s,
             keys,
             A(1),
             size.dv);
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int r = me.row(i), key = me.column(j);
        const bool seen = r < block.count && key < keys &&
                          args.bits.visible(block.row + r, position + r, s + key);
        p[i][j] = seen ? exp(p[i][j] - log_sum[i]) * (dp[i][j] - delta[i]) : A(0);
      }
    store_square(ds, p);
    add_weighted_rows(sum,
                      ld,
                      keep,
                      ds,
                      buffers,
                      args.in.key(h),
                      block.begin + s,
                      keys,
                      columns.begin,
                      columns.end,
                      A(1));
  }
  __syncthreads();
  for (int r = me.y; r < block.count; r += Tile::kSide)
    for (std::int64_t c = columns.begin + me.x; c < columns.end; c += Tile::kSide)
      args.dq[((block.row + r) * size.heads + h) * size.dqk() + c] =
          round_to<T>(sum[r * ld + c - columns.begin] * args.scale);
}

// Channels of dk, then of dv, are one row of dqk + dv; a block owns some of them.
template <class A, class T, class G>
__global__ void __launch_bounds__(PlainTile<A>::kThreads) dkv_kernel(BackwardArgs<A, T, G> args) {
  using Tile = PlainTile<A>;
  if (blockIdx.x >= *args.key_blocks.count) return;
  extern __shared__ __align__(16) unsigned char shared[];
  A* const buffers = reinterpret_cast<A*>(shared);
  A* const p_t = buffers + 2 * Tile::kOperand;  // [keys][queries]
  A* const ds_t = p_t + Tile::kOperand;
  A* const sum = ds_t + Tile::kOperand;

  const AttentionSizes& size = args.in.size;
  const QueryBlock block = args.key_blocks.list[blockIdx.x];
  const std::int64_t h = blockIdx.y, dqk = size.dqk();
  const ColumnRange columns(dqk + size.dv, Tile::kColumns);
  const std::int64_t k_begin = min(columns.begin, dqk), k_end = min(columns.end, dqk),
                     v_begin = max(columns.begin, dqk) - dqk, v_end = max(columns.end, dqk) - dqk;
  const int k_ld = padded<A>(k_end - k_begin), v_ld = padded<A>(v_end - v_begin);
  A* const sum_v = sum + Tile::kRows * k_ld;
  const int key_0 = block.row - block.begin, length = block.end - block.begin;
  const PlainThread<A> me;
  clear(sum, k_ld);
  clear(sum_v, v_ld);
  const A keep[4] = {1, 1, 1, 1};
  // Queries stand at positions from `first` on; those before the keys see none of them.
  const int first = static_cast<int>(size.first());
  for (int t = max(key_0, first - block.begin); t < length; t += Tile::kRows) {
    const int rows = min(Tile::kRows, length - t);
    const std::int64_t row = block.begin + t - first;
    if (!any_visible<A>(args.bits, row, rows, t + rows - 1, key_0)) continue;
    A p[4][4], dp[4][4];
    dot_tile(p,
             buffers,
             args.in.key(h),
             block.row,
             block.count,
             A(1),
             args.in.query(h),
             row,
             rows,
             args.scale,
             dqk);
    dot_tile(dp,
             buffers,
             args.in.value(h),
             block.row,
             block.count,
             A(1),
             args.d_out(h),
             row,
             rows,
             A(1),
             size.dv);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = me.column(j);
      const std::int64_t at = h * size.queries + row + r;
      const A delta = r < rows ? args.delta[at] : A(0);
      const A log_sum = r < rows ? args.log_sum[at] : A(INFINITY);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = me.row(i);
        const bool seen =
            r < rows && key < block.count && args.bits.visible(row + r, t + r, key_0 + key);
        p[i][j] = seen ? exp(p[i][j] - log_sum) : A(0);
        dp[i][j] = seen ? p[i][j] * (dp[i][j] - delta) : A(0);
      }
    }
    store_square(p_t, p);
    store_square(ds_t, dp);
    __syncthreads();
    if (k_begin < k_end)
      add_weighted_rows(
          sum, k_ld, keep, ds_t, buffers, args.in.query(h), row, rows, k_begin, k_end, args.scale);
    if (v_begin < v_end)
      add_weighted_rows(
          sum_v, v_ld, keep, p_t, buffers, args.d_out(h), row, rows, v_begin, v_end, A(1));
  }
  __syncthreads();
  for (int r = me.y; r < block.count; r += Tile::kSide) {
    const std::int64_t row = block.row + r;
    T* const kvb = args.dkvb + (row * size.heads + h) * size.dkv();
    for (std::int64_t c = k_begin + me.x; c < k_end; c += Tile::kSide) {
      const A x = sum[r * k_ld + c - k_begin];
      if (c < size.dn) {
        kvb[c] = round_to<T>(x);
      } else {
        args.dkr[(h * size.keys + row) * size.dr + c - size.dn] = x;
      }
    }
    for (std::int64_t c = v_begin + me.x; c < v_end; c += Tile::kSide)
      kvb[size.dn + c] = round_to<T>(sum_v[r * v_ld + c - v_begin]);
  }
}

template <class A>
std::size_t shared_bytes(int squares, std::int64_t width) {
  using Tile = PlainTile<A>;
  // dk and dv are padded one by one
  const std::int64_t columns = std::min<std::int64_t>(width, Tile::kColumns) + Tile::kVector;
  return sizeof(A) * static_cast<std::size_t>((2 + squares) * Tile::kOperand +
                                              Tile::kRows * padded<A>(columns));
}

template <class A, class T, class G>
void launch_kernels(cudaStream_t stream, const BackwardArgs<A, T, G>& args) {
  using Tile = PlainTile<A>;
  const AttentionSizes& size = args.in.size;
  const auto grid = [&](const QueryBlocks& blocks, std::int64_t width) {
    return dim3(static_cast<unsigned>(blocks.bound),
                static_cast<unsigned>(size.heads),
                static_cast<unsigned>(plain_column_blocks(width, Tile::kColumns)));
  };
  const std::size_t dq_bytes = shared_bytes<A>(1, size.dqk()),
                    dkv_bytes = shared_bytes<A>(2, size.dqk() + size.dv);
  allow_shared_memory(dq_kernel<A, T, G>, dq_bytes);
  dq_kernel<A, T, G><<<grid(args.blocks, size.dqk()), Tile::kThreads, dq_bytes, stream>>>(args);
  check_launch("kernel attention_backward (plain): dq");
  allow_shared_memory(dkv_kernel<A, T, G>, dkv_bytes);
  dkv_kernel<A, T, G>
      <<<grid(args.key_blocks, size.dqk() + size.dv), Tile::kThreads, dkv_bytes, stream>>>(args);
  check_launch("kernel attention_backward (plain): dk, dv");
}

template <class T>
void backward(CudaContext& context, const AttentionBackward& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const AttentionSizes size = attention_sizes(op);
  const Arena::Mark mark(context.scratch);
  AttentionSizes of_keys = size;  // as if every key were a query
  of_keys.queries = size.keys;
  const auto memory = QueryBlocksMemory::take(context.scratch, size, PlainTile<A>::kRows);
  const auto key_memory =
      size.first() == 0 ? memory
                        : QueryBlocksMemory::take(context.scratch, of_keys, PlainTile<A>::kRows);
  const TensorView words = take_selection_bits(context.scratch, size, op.selected);
  const TensorView delta =
      context.scratch.take({size.heads, size.queries}, dtype_of<A>, "attention delta");
  const TensorView log_sum =
      context.scratch.take({size.heads, size.queries}, dtype_of<A>, "attention log sums");
  const TensorView dkr =
      context.scratch.take({size.heads, size.keys, size.dr}, dtype_of<A>, "attention dkr per head");
  if (is_dry(context) || size.queries == 0 || size.heads == 0) return;
  const auto stream = native_stream(context);
  const QueryBlocks blocks = memory.blocks(), key_blocks = key_memory.blocks();
  list_query_blocks(stream, blocks, size, op.cu_seqlens, PlainTile<A>::kRows);
  if (size.first() != 0)
    list_query_blocks(stream, key_blocks, of_keys, op.cu_seqlens, PlainTile<A>::kRows);
  const SelectionBits bits = fill_selection_bits(stream, words, size, op.cu_seqlens, op.selected);
  backward_row_statistics(stream, delta.as<A>(), log_sum.as<A>(), nullptr, op, A(1));
  dispatch_weight<T>(op.d_o.dtype(), [&]<class G>(TypeTag<G>) {
    launch_kernels(
        stream,
        BackwardArgs<A, D, device_t<G>>{{size,
                                         reinterpret_cast<const D*>(op.q.as<T>()),
                                         reinterpret_cast<const D*>(op.kvb.as<T>()),
                                         reinterpret_cast<const D*>(op.kr.as<T>())},
                                        blocks,
                                        key_blocks,
                                        bits,
                                        reinterpret_cast<const device_t<G>*>(op.d_o.as<G>()),
                                        delta.as<A>(),
                                        log_sum.as<A>(),
                                        reinterpret_cast<D*>(op.dq.as<T>()),
                                        reinterpret_cast<D*>(op.dkvb.as<T>()),
                                        dkr.as<A>(),
                                        static_cast<A>(op.scale)});
  });
  if (size.dr > 0) sum_shared_key_gradient(stream, op.dkr, dkr.as<A>(), size);
}

}  // namespace

void attention_plain(CudaContext& context, const AttentionBackward& op) {
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { backward<T>(context, op); });
}

}  // namespace moesaic::cuda
