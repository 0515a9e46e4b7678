// E4M3 with one scale per tile of the matrix: a warp per small tile, a block per large one; the second reading of a tile comes
// from the cache.
#include "kernels/cuda/fp_codes.cuh"
#include "kernels/cuda/vectors.cuh"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;
constexpr std::int64_t kSmallTile = 1024;  // elements, up to here a warp does it

template <int Threads, class A>
__device__ __forceinline__ A tile_max(A x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    x = fmax(x, __shfl_xor_sync(0xffffffffU, x, offset));
  if constexpr (Threads > kWarp) {
    __shared__ A partial[Threads / kWarp];
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
    __syncthreads();
    for (int w = 0; w < Threads / kWarp; ++w)
      x = fmax(x, partial[w]);
    __syncthreads();  // the next tile writes partial again
  }
  return x;
}

// The code of x / scale, as if divided in double. For float: the code is a monotonic function, so when the codes on both sides
// of an estimate agree, it is theirs.
class Divider {
 public:
  __device__ __forceinline__ explicit Divider(float scale)
      : scale_(scale), inverse_(1.0F / scale), in_range_(1e-35F < scale && scale < 1e35F) {}
  __device__ __forceinline__ std::uint8_t code(float x) const {
    constexpr float kMargin = 5e-7F;  // four roundings of float
    const float estimate = x * inverse_;
    const std::uint16_t sides =
        e4m3_codes(estimate * (1.0F - kMargin), estimate * (1.0F + kMargin));
    const auto low = static_cast<std::uint8_t>(sides), high = static_cast<std::uint8_t>(sides >> 8);
    if (in_range_ && low == high) return low;
    return e4m3_code(static_cast<double>(x) / static_cast<double>(scale_));
  }

 private:
  float scale_, inverse_;
  bool in_range_;
};
class ExactDivider {
 public:
  __device__ __forceinline__ explicit ExactDivider(double scale) : scale_(scale) {}
  __device__ __forceinline__ std::uint8_t code(double x) const { return e4m3_code(x / scale_); }

 private:
  double scale_;
};

template <class T, class A>
struct Quantize {
  A* scales;
  std::uint8_t* codes;  // null: not wanted
  T* dequant;           // null: not wanted; may be x
  const T* x;
  std::int64_t rows, cols, block_rows, block_cols, tiles, tiles_per_row;
  double amax_floor;
  bool power_of_two;
};

template <class T, class A, int N, int PerTile>
__global__ void __launch_bounds__(kThreads) quantize_kernel(Quantize<T, A> q) {
  using Divide = std::conditional_t<std::is_same_v<A, float>, Divider, ExactDivider>;
  constexpr int kTiles = kThreads / PerTile;
  for (std::int64_t tile = std::int64_t{blockIdx.x} * kTiles + threadIdx.x / PerTile;
       tile < q.tiles;
       tile += std::int64_t{gridDim.x} * kTiles) {
    const std::int64_t r0 = tile / q.tiles_per_row * q.block_rows,
                       c0 = tile % q.tiles_per_row * q.block_cols;
    const std::int64_t height = min(q.block_rows, q.rows - r0),
                       width = min(q.block_cols, q.cols - c0) / N;  // in accesses
    const auto for_all = [&](auto&& f) {
      for (std::int64_t i = threadIdx.x % PerTile; i < height * width; i += PerTile)
        f((r0 + i / width) * q.cols + c0 + i % width * N);
    };
    A largest = 0;  // NaN does not count: fmax drops it
    for_all([&](std::int64_t at) {
      const auto x = load<N>(q.x + at);
#pragma unroll
      for (int k = 0; k < N; ++k)
        largest = fmax(largest, fabs(widen<A>(x.v[k])));
    });
    largest = tile_max<PerTile>(largest);
    const A scale =
        static_cast<A>(fp8_scale(static_cast<double>(largest), q.amax_floor, q.power_of_two));
    if (threadIdx.x % PerTile == 0) q.scales[tile] = scale;
    const Divide divide(scale);
    for_all([&](std::int64_t at) {
      auto x = load<N>(q.x + at);
      Vec<std::uint8_t, N> codes;
#pragma unroll
      for (int k = 0; k < N; ++k) {
        codes.v[k] = divide.code(widen<A>(x.v[k]));
        x.v[k] = round_to<T>(e4m3_value<A>(codes.v[k]) * scale);
      }
      if (q.codes != nullptr) store<N>(q.codes + at, codes);
      if (q.dequant != nullptr) store<N>(q.dequant + at, x);
    });
  }
}

template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(T* y,
                                                              const std::uint8_t* codes,
                                                              const A* scales,
                                                              std::int64_t rows,
                                                              std::int64_t cols,
                                                              std::int64_t block_rows,
                                                              std::int64_t block_cols,
                                                              std::int64_t tiles_per_row) {
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const A* row_scales = scales + r / block_rows * tiles_per_row;
    for (std::int64_t c = std::int64_t{threadIdx.x} * N; c < cols; c += kThreads * N) {
      const A scale = row_scales[c / block_cols];
      const auto code = load<N>(codes + r * cols + c);
      Vec<T, N> out;
#pragma unroll
      for (int k = 0; k < N; ++k)
        out.v[k] = round_to<T>(e4m3_value<A>(code.v[k]) * scale);
      store<N>(y + r * cols + c, out);
    }
  }
}

template <class T>
void quantize(const CudaContext& context, const QuantizeFp8Block& op) {
  using D = device_t<T>;
  using A = acc_t<T>;
  const Quantize<D, A> q{op.scales.as<A>(),
                         op.codes.as<std::uint8_t>(),
                         device_data<T>(op.dequant),
                         device_data<T>(op.x),
                         op.x.dim(0),
                         op.x.dim(1),
                         op.block_rows,
                         op.block_cols,
                         op.scales.numel(),
                         op.scales.dim(1),
                         op.amax_floor,
                         op.power_of_two};
  const auto stream = native_stream(context);
  // Accesses may straddle neither rows nor tiles.
  const std::int64_t unit = q.cols % kWide<T> == 0 ? op.block_cols : 1;
  with_vector<kWide<T>>(
      unit, {q.codes, q.dequant, q.x}, [&]<int N>(std::integral_constant<int, N>) {
        if (op.block_rows * op.block_cols <= kSmallTile) {
          constexpr int kTiles = kThreads / kWarp;
          quantize_kernel<D, A, N, kWarp>
              <<<grid_for(context, (q.tiles + kTiles - 1) / kTiles), kThreads, 0, stream>>>(q);
        } else {
          quantize_kernel<D, A, N, kThreads>
              <<<grid_for(context, q.tiles), kThreads, 0, stream>>>(q);
        }
      });
  check_launch("kernel quantize_fp8_block");
}

}  // namespace

void launch(CudaContext& context, const QuantizeFp8Block& op) {
  if (is_dry(context) || op.x.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { quantize<T>(context, op); });
}

void launch(CudaContext& context, const DequantizeFp8Block& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
    using A = acc_t<T>;
    const std::int64_t unit = op.y.dim(1) % kWide<T> == 0 ? op.block_cols : 1;
    with_vector<kWide<T>>(
        unit, {op.y.data(), op.codes.data()}, [&]<int N>(std::integral_constant<int, N>) {
          dequantize_kernel<device_t<T>, A, N>
              <<<grid_for(context, op.y.dim(0)), kThreads, 0, native_stream(context)>>>(
                  device_data<T>(op.y),
                  op.codes.as<std::uint8_t>(),
                  op.scales.as<A>(),
                  op.y.dim(0),
                  op.y.dim(1),
                  op.block_rows,
                  op.block_cols,
                  op.scales.dim(1));
        });
  });
  check_launch("kernel dequantize_fp8_block");
}

}  // namespace moesaic
