#pragma once
// Sums over rows, for gradients of parameters that every row shares, in two stages: partial sums over fixed blocks of rows,
// then the blocks. Borders and orders depend on sizes alone.
#include "kernels/cuda/vectors.cuh"

namespace moesaic::cuda {

/// How rows are cut into blocks: a multiple of `unit` rows each, at most `max_count` of them (bounds the scratch).
struct RowBlocks {
  std::int64_t rows_per_block;
  std::int64_t count;
  explicit RowBlocks(std::int64_t rows, std::int64_t unit = 64, std::int64_t max_count = 512) {
    const std::int64_t span = unit * max_count;
    rows_per_block = unit * std::max<std::int64_t>(1, (rows + span - 1) / span);
    count = (rows + rows_per_block - 1) / rows_per_block;
  }
};

constexpr int kFinishColumns = 32;  // the second stage: columns x lanes that share the row blocks
constexpr int kFinishLanes = 16;

/// Calls add(c, sum over blocks of partials[b, c]) once per column: lane y takes every kFinishLanes-th block, then the
/// lanes in order. `pitch` elements from block to block.
template <class A, class Add>
__global__ void __launch_bounds__(kFinishColumns* kFinishLanes) finish_columns_kernel(
    const A* partials, std::int64_t blocks, std::int64_t columns, std::int64_t pitch, Add add) {
  __shared__ A lanes[kFinishLanes][kFinishColumns];
  const std::int64_t c = std::int64_t{blockIdx.x} * kFinishColumns + threadIdx.x;
  A sum = 0;
  if (c < columns) {
#pragma unroll 4
    for (std::int64_t b = threadIdx.y; b < blocks; b += kFinishLanes)
      sum += partials[b * pitch + c];
  }
  lanes[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns) return;
#pragma unroll
  for (int y = 1; y < kFinishLanes; ++y)
    sum += lanes[y][threadIdx.x];
  add(c, sum);
}

/// The usual `add`: a gradient that accumulates.
template <class A>
struct AddTo {
  A* gradient;
  __device__ __forceinline__ void operator()(std::int64_t c, A sum) const { gradient[c] += sum; }
};

template <class A, class Add>
void finish_columns(const CudaContext& context,
                    const A* partials,
                    std::int64_t blocks,
                    std::int64_t columns,
                    std::int64_t pitch,
                    const Add& add,
                    const char* name) {
  finish_columns_kernel<<<static_cast<unsigned>((columns + kFinishColumns - 1) / kFinishColumns),
                          dim3(kFinishColumns, kFinishLanes),
                          0,
                          native_stream(context)>>>(partials, blocks, columns, pitch, add);
  check_launch(name);
}

/// Column sums of the rows that one block of threads walks through, several rows at a time: thread (row lane, column group)
/// adds what it sees of its N columns, and the row lanes are added in order at the end. With kInRegisters a thread meets one
/// group of columns only; else it keeps its sums in the block's row of `partials` itself.
template <class A, int N, int PerRow, int Threads, bool kInRegisters>
class ColumnSums {
 public:
  static_assert(kInRegisters || PerRow == Threads);
  /// `row` = this block's row of the partials, or null when nobody wants the sums.
  __device__ __forceinline__ ColumnSums(A* row, std::int64_t columns)
      : row_(row), columns_(columns) {
    if constexpr (!kInRegisters) {
      if (row_ == nullptr) return;
      for (std::int64_t c = std::int64_t{threadIdx.x} * N; c < columns; c += Threads * N)
        store<N>(row_ + c, Vec<A, N>{});
    }
  }
  __device__ __forceinline__ void add(std::int64_t c, const A (&values)[N]) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum_[i] += values[i];
    } else if (row_ != nullptr) {
      auto sum = load<N>(row_ + c);
#pragma unroll
      for (int i = 0; i < N; ++i)
        sum.v[i] += values[i];
      store<N>(row_ + c, sum);
    }
  }
  /// Once, by all threads of the block.
  __device__ __forceinline__ void finish() {
    if constexpr (kInRegisters) {
      if (row_ == nullptr) return;
      __shared__ A lanes[Threads * N];
      __syncthreads();  // another object of this type may have used the array
#pragma unroll
      for (int i = 0; i < N; ++i)
        lanes[threadIdx.x * N + i] = sum_[i];
      __syncthreads();
      const std::int64_t c = std::int64_t{threadIdx.x} * N;
      if (threadIdx.x >= PerRow || c >= columns_) return;
      for (int lane = 1; lane < Threads / PerRow; ++lane) {
#pragma unroll
        for (int i = 0; i < N; ++i)
          sum_[i] += lanes[(lane * PerRow + threadIdx.x) * N + i];
      }
#pragma unroll
      for (int i = 0; i < N; ++i)
        row_[c + i] = sum_[i];
    }
  }

 private:
  A* row_;
  std::int64_t columns_;
  A sum_[N] = {};
};

/// Calls f with (threads per row, whether a row is at most one access per thread) for rows of `columns` elements.
template <int N, int Threads, class F>
void with_threads_per_row(std::int64_t columns, F&& f) {
  if (columns <= 16 * N)
    return f(std::integral_constant<int, 16>{}, std::integral_constant<bool, true>{});
  if (columns <= kWarp * N)
    return f(std::integral_constant<int, kWarp>{}, std::integral_constant<bool, true>{});
  f(std::integral_constant<int, Threads>{}, std::integral_constant<bool, false>{});
}

}  // namespace moesaic::cuda
