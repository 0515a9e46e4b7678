// Block formats with shared power-of-two scales. fused: neighbouring lanes hold a group, one access each. plain: scales first,
// by a warp per group, then the elements, by a thread per pair.
#include "kernels/cuda/fp_codes.cuh"
#include "kernels/cuda/vectors.cuh"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;

// x and dequant may be one tensor: no pointer is __restrict__.
template <class T>
struct Quantize {
  std::uint8_t* scales;
  std::uint8_t* codes;   // null: not wanted
  std::uint8_t* packed;  // null: not wanted
  T* dequant;            // null: not wanted
  const T* x;
  std::int64_t numel, group;
  MxFormat format;
  ScaleRule rule;
};

template <class A>
__device__ __forceinline__ std::uint8_t code_of(A x, MxFormat format) {
  return format == MxFormat::mxfp4 ? e2m1_code(x) : e4m3_code(x);
}
template <class A>
__device__ __forceinline__ A value_of(std::uint8_t code, MxFormat format) {
  return format == MxFormat::mxfp4 ? e2m1_value<A>(code) : e4m3_value<A>(code);
}

// NaN does not count; fmax drops it.
template <class A>
__device__ __forceinline__ A lanes_max(A x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    x = fmax(x, __shfl_xor_sync(0xffffffffU, x, offset));
  return x;
}

// `lanes` = group / N, a power of two up to a warp.
template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) fused_kernel(Quantize<T> q, int lanes) {
  const std::int64_t items = q.numel / N;
  const std::int64_t rounded =
      (items + kWarp - 1) / kWarp * kWarp;  // whole warps meet in the shuffles
  for (std::int64_t item = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; item < rounded;
       item += std::int64_t{gridDim.x} * kThreads) {
    const bool inside = item < items;
    Vec<T, N> x{};
    if (inside) x = load<N>(q.x + item * N);
    A largest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
      largest = fmax(largest, fabs(widen<A>(x.v[i])));
    const int e = mx_exponent(static_cast<double>(lanes_max(largest, lanes)), q.format, q.rule);
    if (!inside) continue;
    if (item % lanes == 0) q.scales[item / lanes] = static_cast<std::uint8_t>(e + 127);
    const A scale = power_of_two<A>(e), inverse = power_of_two<A>(-e);
    Vec<std::uint8_t, N> codes;
    Vec<std::uint8_t, N / 2> packed;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      codes.v[i] = code_of(widen<A>(x.v[i]) * inverse, q.format);
      x.v[i] = round_to<T>(value_of<A>(codes.v[i], q.format) * scale);
    }
#pragma unroll
    for (int i = 0; i < N; i += 2)
      packed.v[i / 2] = static_cast<std::uint8_t>(codes.v[i] | codes.v[i + 1] << 4);
    if (q.codes != nullptr) store<N>(q.codes + item * N, codes);
    if (q.packed != nullptr) store<N / 2>(q.packed + item * (N / 2), packed);
    if (q.dequant != nullptr) store<N>(q.dequant + item * N, x);
  }
}

template <class T, class A>
__global__ void __launch_bounds__(kThreads) scales_kernel(Quantize<T> q) {
  const std::int64_t groups = q.numel / q.group;
  for (std::int64_t g = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
       g < groups;
       g += std::int64_t{gridDim.x} * (kThreads / kWarp)) {
    A largest = 0;
    for (std::int64_t c = threadIdx.x % kWarp; c < q.group; c += kWarp)
      largest = fmax(largest, fabs(widen<A>(q.x[g * q.group + c])));
    const int e = mx_exponent(static_cast<double>(lanes_max(largest, kWarp)), q.format, q.rule);
    if (threadIdx.x % kWarp == 0) q.scales[g] = static_cast<std::uint8_t>(e + 127);
  }
}

// A pair may lie in two groups; the last element of an odd number of them is alone.
template <class T, class A>
__global__ void __launch_bounds__(kThreads) elements_kernel(Quantize<T> q) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads * 2;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * 2; i < q.numel;
       i += stride) {
    std::uint8_t pair[2] = {0, 0};
    for (int k = 0; k < 2 && i + k < q.numel; ++k) {
      const int e = static_cast<int>(q.scales[(i + k) / q.group]) - 127;
      pair[k] = code_of(widen<A>(q.x[i + k]) * power_of_two<A>(-e), q.format);
      if (q.codes != nullptr) q.codes[i + k] = pair[k];
      if (q.dequant != nullptr)
        q.dequant[i + k] = round_to<T>(value_of<A>(pair[k], q.format) * power_of_two<A>(e));
    }
    if (q.packed != nullptr) q.packed[i / 2] = static_cast<std::uint8_t>(pair[0] | pair[1] << 4);
  }
}

template <class T>
void quantize(const CudaContext& context, const QuantizeMx& op) {
  using D = device_t<T>;
  using A = acc_t<T>;
  const Quantize<D> q{op.scales.as<std::uint8_t>(),
                      op.codes.as<std::uint8_t>(),
                      op.packed.as<std::uint8_t>(),
                      device_data<T>(op.dequant),
                      device_data<T>(op.x),
                      op.x.numel(),
                      op.group,
                      op.format,
                      op.rule};
  constexpr int N = kWide<T>;
  const std::int64_t lanes = op.group / N;
  const bool fused = may_specialise(context) && op.group % N == 0 && lanes <= kWarp &&
                     (lanes & (lanes - 1)) == 0 && all_aligned({q.codes, q.packed, q.dequant, q.x});
  report_path(context, op, fused ? "fused" : "plain");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  if (fused) {
    fused_kernel<D, A, N>
        <<<grid_for(context, (q.numel / N + kThreads - 1) / kThreads, 16), kThreads, 0, stream>>>(
            q, static_cast<int>(lanes));
    check_launch("kernel quantize_mx");
    return;
  }
  constexpr int kGroups = kThreads / kWarp;
  scales_kernel<D, A>
      <<<grid_for(context, (q.numel / q.group + kGroups - 1) / kGroups), kThreads, 0, stream>>>(q);
  elements_kernel<D, A>
      <<<grid_for(context, (q.numel / 2 + kThreads) / kThreads), kThreads, 0, stream>>>(q);
  check_launch("kernel quantize_mx: plain");
}

template <class T>
struct Dequantize {
  T* y;
  const std::uint8_t* codes;  // null: packed
  const std::uint8_t* packed;
  const std::uint8_t* scales;
  std::int64_t numel, group;
  MxFormat format;
};

// N elements of one group at a time, or single ones.
template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(Dequantize<T> q) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads * N;
  for (std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * N; i < q.numel;
       i += stride) {
    const A scale = e8m0_value<A>(q.scales[i / q.group]);
    Vec<T, N> out;
    if (q.codes != nullptr) {
      const auto codes = load<N>(q.codes + i);
#pragma unroll
      for (int k = 0; k < N; ++k)
        out.v[k] = round_to<T>(value_of<A>(codes.v[k], q.format) * scale);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const int code = q.packed[(i + k) / 2] >> ((i + k) % 2 * 4) & 15;
        out.v[k] = round_to<T>(value_of<A>(static_cast<std::uint8_t>(code), q.format) * scale);
      }
    }
    store<N>(q.y + i, out);
  }
}

}  // namespace

void launch(CudaContext& context, const QuantizeMx& op) {
  if (op.x.numel() == 0) return;
  dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { quantize<T>(context, op); });
}

void launch(CudaContext& context, const DequantizeMx& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
    const Dequantize<device_t<T>> q{device_data<T>(op.y),
                                    op.codes.as<std::uint8_t>(),
                                    op.packed.as<std::uint8_t>(),
                                    op.scales.as<std::uint8_t>(),
                                    op.y.numel(),
                                    op.group,
                                    op.format};
    with_vector<kWide<T>>(
        op.group, {q.y, q.codes, q.packed}, [&]<int N>(std::integral_constant<int, N>) {
          dequantize_kernel<device_t<T>, acc_t<T>, N>
              <<<grid_for(context, (q.numel / N + kThreads - 1) / kThreads, 16),
                 kThreads,
                 0,
                 native_stream(context)>>>(q);
        });
  });
  check_launch("kernel dequantize_mx");
}

}  // namespace moesaic
