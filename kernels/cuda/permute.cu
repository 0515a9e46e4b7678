// Rows to their experts and back. The rows are moved by warps, 16 bytes per lane and access; which
// rows are in use is read on the device, so grids are sized by the bound.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/device_check.cuh"
#include "kernels/cuda/expert_sort.h"
#include "kernels/cuda/launch.h"
#include "kernels/ops/permute.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMoves = 4;  // accesses of a lane in flight while it copies
constexpr int kTerms = 4;  // rows of a token that are loaded together

__global__ void __launch_bounds__(kThreads) place_kernel(std::int32_t* token_of_row,
                                                         std::int32_t* row_of_assignment,
                                                         const std::int32_t* topk,
                                                         ExpertSort sort,
                                                         std::int64_t rows,
                                                         std::int64_t assignments,
                                                         std::int64_t k) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < assignments) {
    const std::int32_t expert = topk[i], position = sort.position(i, expert);
    std::int32_t row = position < 0 ? -1 : sort.offsets[expert] + position;
    if (row >= rows) row = -1;
    row_of_assignment[i] = row;
    if (row >= 0) token_of_row[row] = static_cast<std::int32_t>(i / k);
  }
  if (sort.offsets[sort.experts] <= i && i < rows) token_of_row[i] = -1;
}

// More assignments than rows: how many, and offsets that end with the rows. One block.
__global__ void __launch_bounds__(kThreads) overflow_kernel(std::int32_t* overflow,
                                                            std::int32_t* offsets,
                                                            std::int64_t experts,
                                                            std::int32_t rows) {
  const std::int32_t assignments = offsets[experts];
  MOESAIC_DEVICE_CHECK(assignments <= rows || overflow != nullptr, "fewer rows than assignments");
  if (threadIdx.x == 0 && overflow != nullptr) *overflow = max(0, assignments - rows);
  __syncthreads();  // offsets[experts] has been read
  for (std::int64_t e = threadIdx.x; e <= experts; e += kThreads)
    offsets[e] = min(offsets[e], rows);
}

// A warp copies pieces of kMoves accesses per lane. A row of x is read as often as its token has
// experts, so with many rows all of them get their first piece before any gets its second: a piece
// of all tokens fits in the cache, and what is written should not push it out.
template <class Word>
__global__ void __launch_bounds__(kThreads) gather_kernel(Word* __restrict__ y,
                                                          const Word* __restrict__ x,
                                                          const std::int32_t* token_of_row,
                                                          const std::int32_t* num_rows,
                                                          std::int64_t all_rows,
                                                          std::int64_t words) {
  constexpr int kPiece = kWarp * kMoves;
  const std::int64_t rows = num_rows == nullptr ? all_rows : *num_rows;
  const std::int64_t lane = threadIdx.x % kWarp;
  for (std::int64_t c = std::int64_t{blockIdx.y} * kPiece + lane; c < words;
       c += std::int64_t{gridDim.y} * kPiece) {
    for (std::int64_t r = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; r < rows;
         r += std::int64_t{gridDim.x} * kWarps) {
      const Word* from = x + std::int64_t{token_of_row[r]} * words + c;
      Word* to = y + r * words + c;
      Word v[kMoves];
#pragma unroll
      for (int i = 0; i < kMoves; ++i)
        if (c + i * kWarp < words) v[i] = from[i * kWarp];
#pragma unroll
      for (int i = 0; i < kMoves; ++i)
        if (c + i * kWarp < words) __stcs(to + i * kWarp, v[i]);
    }
  }
}

// A warp forms N neighbouring columns per lane of one token: the rows are loaded kTerms at a time
// and added in their order. Lane l holds the row and the weight of choice l of each 32. Up to a
// block of warps work on neighbouring columns of one token.
template <class T, class U, class A, int N>
__global__ void __launch_bounds__(kThreads, 2) combine_kernel(U* u,
                                                              const T* __restrict__ y,
                                                              const A* __restrict__ weights,
                                                              const std::int32_t* row_of_assignment,
                                                              const std::int32_t* token_count,
                                                              std::int64_t all_tokens,
                                                              std::int64_t width,
                                                              std::int64_t k,
                                                              int warps_per_token,
                                                              bool accumulate) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp,
            warp = static_cast<int>(threadIdx.x) / kWarp;
  const int tokens_per_block = kWarps / warps_per_token;
  const std::int64_t tokens = token_count == nullptr ? all_tokens : *token_count;
  for (std::int64_t t = std::int64_t{blockIdx.x} * tokens_per_block + warp / warps_per_token;
       t < tokens;
       t += std::int64_t{gridDim.x} * tokens_per_block) {
    for (std::int64_t c0 = std::int64_t{warp % warps_per_token} * kWarp * N; c0 < width;
         c0 += std::int64_t{warps_per_token} * kWarp * N) {
      const std::int64_t c = c0 + lane * N;
      const bool inside = c < width;
      A sum[N] = {};
      if (accumulate && inside) {
        const auto old = load<N>(u + t * width + c);
#pragma unroll
        for (int i = 0; i < N; ++i)
          sum[i] = widen<A>(old.v[i]);
      }
      for (std::int64_t j0 = 0; j0 < k; j0 += kWarp) {
        const bool mine = j0 + lane < k;
        const std::int32_t my_row = mine ? row_of_assignment[t * k + j0 + lane] : -1;
        const A my_weight = mine && weights != nullptr ? weights[t * k + j0 + lane] : A(1);
        const int count = static_cast<int>(min(std::int64_t{kWarp}, k - j0));
        for (int j = 0; j < count; j += kTerms) {
          Vec<T, N> v[kTerms];
          std::int32_t row[kTerms];
#pragma unroll
          for (int i = 0; i < kTerms; ++i) {
            row[i] = __shfl_sync(0xffffffffU, my_row, (j + i) % kWarp);
            if (row[i] >= 0 && inside) v[i] = load<N>(y + std::int64_t{row[i]} * width + c);
          }
#pragma unroll
          for (int i = 0; i < kTerms; ++i) {
            const A weight = __shfl_sync(0xffffffffU, my_weight, (j + i) % kWarp);
            if (row[i] < 0) continue;
#pragma unroll
            for (int n = 0; n < N; ++n)
              sum[n] += weight * widen<A>(v[i].v[n]);
          }
        }
      }
      if (!inside) continue;
      Vec<U, N> out;
#pragma unroll
      for (int i = 0; i < N; ++i)
        out.v[i] = round_to<U>(sum[i]);
      store<N>(u + t * width + c, out);
    }
  }
}

template <class A, bool Backward>
__global__ void __launch_bounds__(kThreads)
    row_weight_kernel(A* out, const A* in, const std::int32_t* map, std::int64_t assignments) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= assignments) return;
  const std::int32_t row = map[i];
  if constexpr (Backward) {
    out[i] = row >= 0 ? in[row] : A(0);
  } else {
    if (row >= 0) out[row] = in[i];
  }
}

template <class Word>
void gather(CudaContext& context, const GatherRows& op, std::size_t row_bytes) {
  const auto words = static_cast<std::int64_t>(row_bytes / sizeof(Word));
  const std::int64_t rows = (op.y.dim(0) + kWarps - 1) / kWarps,  // in blocks
      pieces = (words + kWarp * kMoves - 1) / (kWarp * kMoves);
  const unsigned x = grid_for(context, rows, 8);
  const std::int64_t room = std::int64_t{context.num_sms} * 8 / x;  // few rows: pieces side by side
  const dim3 grid(x, static_cast<unsigned>(std::clamp<std::int64_t>(pieces, 1, room)));
  gather_kernel<Word>
      <<<grid, kThreads, 0, native_stream(context)>>>(reinterpret_cast<Word*>(op.y.data()),
                                                      reinterpret_cast<const Word*>(op.x.data()),
                                                      op.token_of_row.as<std::int32_t>(),
                                                      op.num_rows.as<std::int32_t>(),
                                                      op.y.dim(0),
                                                      words);
  check_launch("kernel gather_rows");
}

template <class T, class U>
void combine(CudaContext& context, const CombineRows& op) {
  using A = acc_t<T>;
  const std::int64_t tokens = op.u.dim(0), width = op.u.dim(1);
  constexpr int kWide = 16 / sizeof(T);
  auto* u = reinterpret_cast<device_t<U>*>(op.u.as<U>());
  const auto* y = reinterpret_cast<const device_t<T>*>(op.y.as<T>());
  const auto run = [&]<int N>(std::integral_constant<int, N>) {
    int warps_per_token = 1;
    while (warps_per_token < kWarps && std::int64_t{warps_per_token} * kWarp * N < width)
      warps_per_token *= 2;
    const std::int64_t tokens_per_block = kWarps / warps_per_token;
    const unsigned grid = grid_for(context, (tokens + tokens_per_block - 1) / tokens_per_block, 16);
    combine_kernel<device_t<T>, device_t<U>, A, N>
        <<<grid, kThreads, 0, native_stream(context)>>>(u,
                                                        y,
                                                        op.weights.as<A>(),
                                                        op.row_of_assignment.as<std::int32_t>(),
                                                        op.token_count.as<std::int32_t>(),
                                                        tokens,
                                                        width,
                                                        op.row_of_assignment.dim(1),
                                                        warps_per_token,
                                                        op.accumulate);
  };
  if (width % kWide == 0 && is_aligned(u, 16) && is_aligned(y, 16)) {
    run(std::integral_constant<int, kWide>{});
  } else {
    run(std::integral_constant<int, 1>{});
  }
  check_launch("kernel combine_rows");
}

template <bool Backward>
void move_weights(CudaContext& context,
                  const TensorView& out,
                  const ConstTensorView& in,
                  const ConstTensorView& map) {
  if (is_dry(context) || map.numel() == 0) return;
  const auto blocks = static_cast<unsigned>((map.numel() + kThreads - 1) / kThreads);
  const auto run = [&]<class A>(TypeTag<A>) {
    row_weight_kernel<A, Backward><<<blocks, kThreads, 0, native_stream(context)>>>(
        out.as<A>(), in.as<A>(), map.as<std::int32_t>(), map.numel());
  };
  if (in.dtype() == DType::f64) {
    run(TypeTag<double>{});
  } else {
    run(TypeTag<float>{});
  }
  check_launch("kernel row_weight");
}

}  // namespace

void launch(CudaContext& context, const DispatchPlan& op) {
  const std::int64_t experts = op.offsets.dim(0) - 1, assignments = op.topk.numel(),
                     rows = op.token_of_row.dim(0);
  const Arena::Mark mark(context.scratch);
  const TensorView rank = context.scratch.take({assignments}, DType::i32, "dispatch_plan.rank");
  const TensorView counts = take_sort_scratch(context.scratch, assignments, experts);
  if (is_dry(context)) return;
  const ExpertSort sort =
      sort_by_expert(context, rank, op.offsets, counts, op.topk, op.kept, op.token_count);
  const auto blocks =
      static_cast<unsigned>((std::max(rows, assignments) + kThreads - 1) / kThreads);
  if (blocks > 0) {
    place_kernel<<<blocks, kThreads, 0, native_stream(context)>>>(
        op.token_of_row.as<std::int32_t>(),
        op.row_of_assignment.as<std::int32_t>(),
        op.topk.as<std::int32_t>(),
        sort,
        rows,
        assignments,
        op.topk.dim(1));
    check_launch("kernel dispatch_plan: places");
  }
  if (rows >= assignments && op.overflow.empty()) return;
  overflow_kernel<<<1, kThreads, 0, native_stream(context)>>>(op.overflow.as<std::int32_t>(),
                                                              op.offsets.as<std::int32_t>(),
                                                              experts,
                                                              static_cast<std::int32_t>(rows));
  check_launch("kernel dispatch_plan: overflow");
}

void launch(CudaContext& context, const GatherRows& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  const std::size_t element = byte_size(op.x.dtype()),
                    row_bytes = element * static_cast<std::size_t>(op.x.dim(1));
  const bool wide =
      row_bytes % 16 == 0 && is_aligned(op.x.data(), 16) && is_aligned(op.y.data(), 16);
  if (wide) return gather<uint4>(context, op, row_bytes);
  if (element == 8) return gather<unsigned long long>(context, op, row_bytes);
  if (element == 4) return gather<unsigned>(context, op, row_bytes);
  if (element == 2) return gather<unsigned short>(context, op, row_bytes);
  gather<unsigned char>(context, op, row_bytes);
}

void launch(CudaContext& context, const CombineRows& op) {
  if (is_dry(context) || op.u.numel() == 0) return;
  dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
    dispatch_weight<T>(op.u.dtype(), [&]<class U>(TypeTag<U>) { combine<T, U>(context, op); });
  });
}

void launch(CudaContext& context, const RowWeightForward& op) {
  move_weights<false>(context, op.row_weight, op.weights, op.row_of_assignment);
}

void launch(CudaContext& context, const RowWeightBackward& op) {
  move_weights<true>(context, op.dweights, op.drow_weight, op.row_of_assignment);
}

}  // namespace moesaic
