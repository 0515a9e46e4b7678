// Embedding. Forward: rows are gathered. Backward: tokens are grouped by word, those of other blocks' words left out, in ascending order inside a word, with integer
// work only; then each word's row is summed in that order, a block per word and range of columns, so that every bit is that of
// a walk through the tokens.
#include "kernels/cuda/vectors.cuh"
#include "kernels/ops/embedding.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 128;
// Words are dealt out to owners, one warp each, word id to owner id modulo the number of owners; a warp keeps a counter per
// word of its own in shared memory.
constexpr std::int64_t kMinOwners = 256;
constexpr std::int64_t kMaxWordsPerOwner = 4096;

std::int64_t owners_of(std::int64_t words) {
  return std::max(kMinOwners, (words + kMaxWordsPerOwner - 1) / kMaxWordsPerOwner);
}

// The words of a table: `first` and the next `count` of a vocabulary.
struct Words {
  std::int64_t first, count, vocabulary;
  template <class Op>
  static Words of(const Op& op, std::int64_t count) {
    return {op.block * count, count, op.vocabulary()};
  }
  // The row that a token has in the table, or -1 when its word is elsewhere. The data layer refuses ids outside the
  // vocabulary; the stream fails, as it does on the CPU.
  __device__ __forceinline__ std::int32_t row_of(std::int32_t id) const {
    if (id < 0 || id >= vocabulary) __trap();
    const std::int64_t row = id - first;
    return 0 <= row && row < count ? static_cast<std::int32_t>(row) : -1;
  }
};

template <class Y, class T, class A, int N>
__global__ void __launch_bounds__(kThreads) gather_kernel(Y* __restrict__ y,
                                                          const std::int32_t* __restrict__ ids,
                                                          const T* __restrict__ table,
                                                          std::int64_t tokens,
                                                          const Words words,
                                                          std::int64_t d) {
  const std::int64_t per_row = d / N, items = tokens * per_row;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < items;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t t = i / per_row, c = (i - t * per_row) * N;
    const std::int64_t row = words.row_of(ids[t]);
    Vec<Y, N> out{};
    if (row < 0) {
      store<N>(y + t * d + c, out);
      continue;
    }
    const auto v = load<N>(table + row * d + c);
#pragma unroll
    for (int k = 0; k < N; ++k)
      out.v[k] = round_to<Y>(widen<A>(v.v[k]));
    store<N>(y + t * d + c, out);
  }
}

// Calls f(base + lane, id or -1 beyond the end) for all tokens in steps of a warp; a few loads are on their way at a time.
template <class F>
__device__ __forceinline__ void for_all_ids(const std::int32_t* __restrict__ ids,
                                            std::int64_t tokens,
                                            F&& f) {
  constexpr int kAhead = 32;
  const int lane = static_cast<int>(threadIdx.x);
  for (std::int64_t base = 0; base < tokens; base += kAhead * kWarp) {
    std::int32_t id[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const std::int64_t t = base + k * kWarp + lane;
      id[k] = t < tokens ? ids[t] : -1;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      f(base + k * kWarp + lane, id[k]);
  }
}

// Grouping. `order` receives the tokens, each word's together and ascending; `run`, zero before, receives at a word's first
// place how many they are. Which owner's tokens come first does not matter to the result.
__global__ void __launch_bounds__(kWarp) group_kernel(std::int32_t* __restrict__ order,
                                                      std::int32_t* __restrict__ run,
                                                      int* cursor,
                                                      const std::int32_t* __restrict__ ids,
                                                      std::int64_t tokens,
                                                      const Words table) {
  extern __shared__ int counters[];
  const int lane = static_cast<int>(threadIdx.x);
  const auto owners = static_cast<std::uint32_t>(gridDim.x), owner = blockIdx.x;
  const int words = static_cast<int>((table.count + owners - 1) / owners);
  for (int w = lane; w < words; w += kWarp)
    counters[w] = 0;
  __syncwarp();
  for_all_ids(ids, tokens, [&](std::int64_t t, std::int32_t token_id) {
    const std::int32_t row = t < tokens ? table.row_of(token_id) : -1;
    const auto id = static_cast<std::uint32_t>(row);
    if (row >= 0 && id % owners == owner) atomicAdd(&counters[id / owners], 1);
  });
  __syncwarp();
  // Counts become first places: a scan in steps of a warp.
  int before = 0;
  for (int base = 0; base < words; base += kWarp) {
    const int w = base + lane;
    const int count = w < words ? counters[w] : 0;
    int upto = count;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int other = __shfl_up_sync(0xffffffffU, upto, offset);
      if (lane >= offset) upto += other;
    }
    if (w < words) counters[w] = before + upto - count;
    before += __shfl_sync(0xffffffffU, upto, kWarp - 1);
  }
  if (before == 0) return;
  int first = 0;
  if (lane == 0) first = atomicAdd(cursor, before);
  first = __shfl_sync(0xffffffffU, first, 0);
  __syncwarp();
  for_all_ids(ids, tokens, [&](std::int64_t t, std::int32_t token_id) {
    const std::int32_t row = t < tokens ? table.row_of(token_id) : -1;
    const auto id = static_cast<std::uint32_t>(row);
    const bool mine = row >= 0 && id % owners == owner;
    const unsigned any = __ballot_sync(0xffffffffU, mine);
    if (any == 0) return;
    if (mine) {
      const unsigned same = __match_any_sync(any, id);
      const int rank = __popc(same & ((1U << lane) - 1U));
      const int word = static_cast<int>(id / owners);
      order[first + counters[word] + rank] = static_cast<std::int32_t>(t);
      __syncwarp(any);
      if (rank == 0) counters[word] += __popc(same);
    }
    __syncwarp();
  });
  // counters[w] is now where word w ends.
  for (int w = lane; w < words; w += kWarp) {
    const int begin = w == 0 ? 0 : counters[w - 1], count = counters[w] - begin;
    if (count > 0) run[first + begin] = count;
  }
}

// dtable[word] += the rows of its tokens, one after the other; kAhead of them are on their way at a time.
template <class G, class T, class A, int N>
__global__ void __launch_bounds__(kThreads) sum_kernel(G* dtable,
                                                       const std::int32_t* __restrict__ order,
                                                       const std::int32_t* __restrict__ run,
                                                       const std::int32_t* __restrict__ ids,
                                                       const T* __restrict__ dy,
                                                       std::int64_t first_word,
                                                       std::int64_t d) {
  constexpr int kAhead = 8;
  const std::int64_t c = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  const int count = run[blockIdx.x];
  if (count == 0 || c >= d) return;
  const std::int32_t* tokens = order + blockIdx.x;
  G* out = dtable + (ids[tokens[0]] - first_word) * d + c;
  auto sum = load<N>(out);
  const auto add = [&](const Vec<T, N>& v) {
#pragma unroll
    for (int i = 0; i < N; ++i)
      sum.v[i] = round_to<G>(widen<A>(sum.v[i]) + widen<A>(v.v[i]));
  };
  // The places of the next rows are read before these are waited for.
  std::int32_t at[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k)
    at[k] = k < count ? tokens[k] : 0;
  for (int j = 0; j < count; j += kAhead) {
    Vec<T, N> v[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (j + k < count) v[k] = load<N>(dy + std::int64_t{at[k]} * d + c);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      at[k] = j + kAhead + k < count ? tokens[j + kAhead + k] : 0;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (j + k < count) add(v[k]);
    }
  }
  store<N>(out, sum);
}

template <class T, class Y>
void gather(const CudaContext& context, const EmbeddingForward& op) {
  constexpr int kBoth = kWide < T >> kWide<Y> ? kWide<T> : kWide<Y>;
  const std::int64_t d = op.table.dim(1), tokens = op.ids.dim(0);
  with_vector<kBoth>(d, {op.y.data(), op.table.data()}, [&]<int N>(std::integral_constant<int, N>) {
    gather_kernel<device_t<Y>, device_t<T>, acc_t<T>, N>
        <<<grid_for(context, (tokens * (d / N) + kThreads - 1) / kThreads, 32),
           kThreads,
           0,
           native_stream(context)>>>(device_data<Y>(op.y),
                                     op.ids.as<std::int32_t>(),
                                     device_data<T>(op.table),
                                     tokens,
                                     Words::of(op, op.table.dim(0)),
                                     d);
  });
  check_launch("kernel embedding_forward");
}

void group(const CudaContext& context,
           const EmbeddingBackward& op,
           const TensorView& order,
           const TensorView& run_and_cursor) {
  const std::int64_t words = op.dtable.dim(0), owners = owners_of(words);
  const auto stream = native_stream(context);
  MOESAIC_CUDA_CALL(cudaMemsetAsync(run_and_cursor.data(), 0, run_and_cursor.bytes(), stream));
  auto* run = run_and_cursor.as<std::int32_t>();
  const auto shared = static_cast<std::size_t>((words + owners - 1) / owners) * sizeof(int);
  group_kernel<<<static_cast<unsigned>(owners), kWarp, shared, stream>>>(order.as<std::int32_t>(),
                                                                         run,
                                                                         run + op.ids.dim(0),
                                                                         op.ids.as<std::int32_t>(),
                                                                         op.ids.dim(0),
                                                                         Words::of(op, words));
  check_launch("kernel embedding_backward: grouping");
}

template <class T, class G>
void scatter(const CudaContext& context,
             const EmbeddingBackward& op,
             const TensorView& order,
             const TensorView& run) {
  const std::int64_t d = op.dtable.dim(1), tokens = op.ids.dim(0);
  with_vector<kWide<T>>(
      d, {op.dtable.data(), op.dy.data()}, [&]<int N>(std::integral_constant<int, N>) {
        const std::int64_t columns = std::int64_t{kThreads} * N;
        const dim3 grid(static_cast<unsigned>(tokens),
                        static_cast<unsigned>((d + columns - 1) / columns));
        sum_kernel<device_t<G>, device_t<T>, acc_t<T>, N>
            <<<grid, kThreads, 0, native_stream(context)>>>(device_data<G>(op.dtable),
                                                            order.as<std::int32_t>(),
                                                            run.as<std::int32_t>(),
                                                            op.ids.as<std::int32_t>(),
                                                            device_data<T>(op.dy),
                                                            op.block * op.dtable.dim(0),
                                                            d);
      });
  check_launch("kernel embedding_backward");
}

}  // namespace

void launch(CudaContext& context, const EmbeddingForward& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  dispatch_float(op.table.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_float(op.y.dtype(), [&]<class Y>(TypeTag<Y>) { gather<T, Y>(context, op); });
  });
}

void launch(CudaContext& context, const EmbeddingBackward& op) {
  const std::int64_t tokens = op.ids.dim(0);
  if (op.dy.numel() == 0) return;
  MOESAIC_CHECK(tokens < std::int64_t{1} << 31, "too many tokens for one call");
  const Arena::Mark mark(context.scratch);
  const TensorView order = context.scratch.take({tokens}, DType::i32, "embedding.order");
  const TensorView run = context.scratch.take({tokens + 1}, DType::i32, "embedding.run");
  if (is_dry(context)) return;
  group(context, op, order, run);
  dispatch_float(op.dy.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.dtable.dtype(),
                       [&]<class G>(TypeTag<G>) { scatter<T, G>(context, op, order, run); });
  });
}

}  // namespace moesaic
