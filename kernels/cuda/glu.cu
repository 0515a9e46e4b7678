// Gated linear units. Forward: one access per thread, in the order of memory. Backward: a warp or a
// block per row, because the gradient of a row's weight is a sum over the row.
#include "kernels/cuda/glu_math.cuh"
#include "kernels/ops/glu.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 128;

// Where the rows are; null: the first, all. What lies outside the bound is a bug of what wrote it; the stream fails, as it
// does on the CPU.
struct RowRange {
  const std::int32_t* first_row;
  const std::int32_t* row_count;
  std::int64_t bound;

  struct Rows {
    std::int64_t begin, end;
  };
  __device__ __forceinline__ Rows read() const {
    const Rows rows{first_row == nullptr ? 0 : *first_row,
                    row_count == nullptr ? bound : *row_count};
    if (rows.begin < 0 || rows.begin > rows.end || rows.end > bound) __trap();
    return rows;
  }
};
template <class Op>
RowRange range_of(const Op& op, std::int64_t bound) {
  return {
      op.first_row.template as<std::int32_t>(), op.row_count.template as<std::int32_t>(), bound};
}

// No pointer is __restrict__: results may lie on operands; each thread reads what it overwrites itself.
template <class T, class A, class Act, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(T* h, const T* gate_up, RowRange range, std::int64_t width, Act act) {
  const auto rows = range.read();
  const std::int64_t per_row = width / N, items = rows.end * per_row;
  for (std::int64_t i = rows.begin * per_row + std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       i < items;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t t = i / per_row, c = (i - t * per_row) * N;
    const T* gate = gate_up + 2 * t * width + c;
    store<N>(h + t * width + c, glu_values<A>(act, load<N>(gate), load<N>(gate + width)));
  }
}

template <class T, class A>
struct Backward {
  T* dgate_up;
  A* drow_weight;
  T* h;
  const T* dh;
  const T* gate_up;
  const A* row_weight;
  RowRange range;
  std::int64_t width;
  bool weight_h;
};

// Sum over the PerRow threads of a row of what each has of its class of groups; the order is in glu_math.cuh.
template <int PerRow, class A>
__device__ __forceinline__ A sum_of_classes(A of_class) {
  A x = of_class;  // the same in all threads of a group
  x += __shfl_xor_sync(0xffffffffU, x, kGroupPieces);
  x += __shfl_xor_sync(0xffffffffU, x, 2 * kGroupPieces);
  if constexpr (PerRow > kWarp) {
    __shared__ A of_warp[PerRow / kWarp];
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = of_warp[0];
#pragma unroll
    for (int i = 1; i < PerRow / kWarp; ++i)
      x += of_warp[i];
    __syncthreads();  // the next row writes of_warp again
  }
  return x;
}

template <class T, class A, class Act, int N, int PerRow>
__global__ void __launch_bounds__(kThreads) backward_kernel(Backward<T, A> p, Act act) {
  constexpr int kRows = kThreads / PerRow;
  const auto rows = p.range.read();
  for (std::int64_t t = rows.begin + std::int64_t{blockIdx.x} * kRows + threadIdx.x / PerRow;
       t < rows.end;
       t += std::int64_t{gridDim.x} * kRows) {
    const T* gate = p.gate_up + 2 * t * p.width;
    T* dgate = p.dgate_up + 2 * t * p.width;
    const A weight = p.row_weight == nullptr ? A(1) : p.row_weight[t];
    const A h_factor = p.weight_h ? weight : A(1);
    A sum = 0;
    // All threads of a row take part in each round: they add up groups of pieces.
    for (std::int64_t base = 0; base < p.width; base += PerRow * N) {
      const std::int64_t c = base + std::int64_t{threadIdx.x % PerRow} * N;
      A piece = 0;
      if (c < p.width) {
        auto g = load<N>(gate + c);
        auto u = load<N>(gate + p.width + c);
        auto r = load<N>(p.dh + t * p.width + c);
        piece = glu_gradients(act, weight, h_factor, g, u, r);
        store<N>(dgate + c, g);
        store<N>(dgate + p.width + c, u);
        if (p.h != nullptr) store<N>(p.h + t * p.width + c, r);
      }
      if (p.drow_weight != nullptr) sum += lanes_sum<kGroupPieces>(piece);
    }
    if (p.drow_weight != nullptr) {
      sum = sum_of_classes<PerRow>(sum);
      if (threadIdx.x % PerRow == 0) p.drow_weight[t] = sum;
    }
  }
}

// Calls f(PerRow) and the grid that goes with it.
template <int N, class F>
void with_row_threads(const CudaContext& context, std::int64_t rows, std::int64_t width, F&& f) {
  const auto call = [&]<int PerRow>(std::integral_constant<int, PerRow> per_row) {
    constexpr int kRows = kThreads / PerRow;
    f(per_row, grid_for(context, (rows + kRows - 1) / kRows, 32));
  };
  if (row_classes(width, N) < kThreads / kGroupPieces)
    return call(std::integral_constant<int, kWarp>{});
  call(std::integral_constant<int, kThreads>{});
}

template <class T, class Act>
void forward(const CudaContext& context, const GluForward& op) {
  const std::int64_t rows = op.h.dim(0), width = op.h.dim(1);
  with_vector<kWide<T>>(
      width, {op.h.data(), op.gate_up.data()}, [&]<int N>(std::integral_constant<int, N>) {
        const unsigned grid = grid_for(context, (rows * (width / N) + kThreads - 1) / kThreads, 32);
        forward_kernel<device_t<T>, acc_t<T>, Act, N>
            <<<grid, kThreads, 0, native_stream(context)>>>(device_data<T>(op.h),
                                                            device_data<T>(op.gate_up),
                                                            range_of(op, rows),
                                                            width,
                                                            Act(op.activation));
      });
  check_launch("kernel glu_forward");
}

template <class T, class Act>
void backward(const CudaContext& context, const GluBackward& op) {
  using A = acc_t<T>;
  const std::int64_t rows = op.dh.dim(0), width = op.dh.dim(1);
  const Backward<device_t<T>, A> p{device_data<T>(op.dgate_up),
                                   op.drow_weight.as<A>(),
                                   device_data<T>(op.h),
                                   device_data<T>(op.dh),
                                   device_data<T>(op.gate_up),
                                   op.row_weight.as<A>(),
                                   range_of(op, rows),
                                   width,
                                   op.weight_h};
  with_vector<kWide<T>>(
      width, {p.dgate_up, p.h, p.dh, p.gate_up}, [&]<int N>(std::integral_constant<int, N>) {
        with_row_threads<N>(context,
                            rows,
                            width,
                            [&]<int PerRow>(std::integral_constant<int, PerRow>, unsigned grid) {
                              backward_kernel<device_t<T>, A, Act, N, PerRow>
                                  <<<grid, kThreads, 0, native_stream(context)>>>(
                                      p, Act(op.activation));
                            });
      });
  check_launch("kernel glu_backward");
}

template <class T>
constexpr bool kFastMath = std::is_same_v<T, bf16>;

}  // namespace

void launch(CudaContext& context, const GluForward& op) {
  if (is_dry(context) || op.h.numel() == 0) return;
  dispatch_float(op.h.dtype(), [&]<class T>(TypeTag<T>) {
    if (op.activation.kind == GluKind::situ)
      return forward<T, SituGlu<acc_t<T>, kFastMath<T>>>(context, op);
    forward<T, SwiGlu<acc_t<T>, kFastMath<T>>>(context, op);
  });
}

void launch(CudaContext& context, const GluBackward& op) {
  if (is_dry(context) || op.dh.dim(0) == 0) return;  // no columns: drow_weight is still zeroed
  dispatch_float(op.dh.dtype(), [&]<class T>(TypeTag<T>) {
    if (op.activation.kind == GluKind::situ)
      return backward<T, SituGlu<acc_t<T>, kFastMath<T>>>(context, op);
    backward<T, SwiGlu<acc_t<T>, kFastMath<T>>>(context, op);
  });
}

}  // namespace moesaic
