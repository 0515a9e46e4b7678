// Y = X X^T;  X <- a X + (b Y + c Y^2) X. Products by cublasLt, or in bf16 by own kernels that form one half of what is
// symmetric (schulz_products.h): 3 m^2 n + m^3 multiply-adds instead of 4 m^2 n + 2 m^3, tiles on the diagonal apart.
//
// With `split` a number is the sum of two bf16 halves (about 17 bits) and a product of f32 matrices
// three products on the tensor cores; the product of the two low halves is left out. Where the
// result is symmetric two are enough: with Q = H H^T / 2 + H L^T it is Q + Q^T. With `bf16` the
// iterate and the products are rounded to bf16, as Muon is published; sums are in f32.
#include <algorithm>

#include "kernels/cuda/blas_product.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/newton_schulz.h"
#include "kernels/cuda/schulz_products.h"

namespace moesaic::cuda {
namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
constexpr double kNormFloor = 1e-7;
constexpr std::int64_t kGroupBytes = std::int64_t{512} << 20;
constexpr std::int64_t kMaxGroup = 1024;
constexpr std::int64_t kTensorRows = 64;  // below, the products are too small to gain
constexpr int kThreads = 256;
constexpr std::int64_t kPart = 16384;  // elements per partial sum of the norm; part of the bits
constexpr int kTile = 32;              // of the kernels that transpose
constexpr int kTileRows = 8;           // threads in y; each takes kTile / kTileRows rows

std::int64_t parts_of(std::int64_t elements) {
  return std::max<std::int64_t>(1, (elements + kPart - 1) / kPart);
}

__device__ __forceinline__ void split(float v, __nv_bfloat16& high, __nv_bfloat16& low) {
  high = __float2bfloat16_rn(v);
  low = __float2bfloat16_rn(v - __bfloat162float(high));
}

// sums[matrix, part]; blockIdx.y is the matrix.
template <class A>
__global__ void __launch_bounds__(kThreads)
    square_sums_kernel(double* sums, const A* x, std::int64_t elements) {
  const A* from = x + std::int64_t{blockIdx.y} * elements;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kPart;
  const std::int64_t end = min(elements, begin + kPart);
  double sum = 0;
#pragma unroll 8
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads)
    sum += static_cast<double>(from[i]) * static_cast<double>(from[i]);
  sum = row_sum<kThreads>(sum);
  if (threadIdx.x == 0) sums[std::int64_t{blockIdx.y} * gridDim.x + blockIdx.x] = sum;
}

// to = x / (norm + floor), rounded to T; every block adds the parts of its matrix in the same order. `to` may be x.
template <class T, class A>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(T* to, const A* x, const double* sums, std::int64_t elements) {
  double total = 0;
  for (std::int64_t i = threadIdx.x; i < gridDim.x; i += kThreads)
    total += sums[std::int64_t{blockIdx.y} * gridDim.x + i];
  total = row_sum<kThreads>(total);
  const auto scale = static_cast<A>(1.0 / (sqrt(total) + kNormFloor));
  const std::int64_t first = std::int64_t{blockIdx.y} * elements;
  const std::int64_t begin = std::int64_t{blockIdx.x} * kPart;
  const std::int64_t end = min(elements, begin + kPart);
#pragma unroll 8
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads)
    to[first + i] = round_to<T>(x[first + i] * scale);
}

// Four elements per thread.
__global__ void __launch_bounds__(kThreads)
    split_kernel(__nv_bfloat16* high, __nv_bfloat16* low, const float* x, std::int64_t elements) {
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * 4;
  if (i >= elements) return;
  const auto v = load<4>(x + i);
  Vec<__nv_bfloat16, 4> h, l;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    split(v.v[j], h.v[j], l.v[j]);
  store<4>(high + i, h);
  if (low != nullptr) store<4>(low + i, l);
}

// s = alpha (q + q^T) + beta y, and its halves. y may be null (0), s too (not wanted). A tile per
// block in x and y, a matrix in z.
__global__ void __launch_bounds__(kTile* kTileRows) symmetric_kernel(float* s,
                                                                     __nv_bfloat16* high,
                                                                     __nv_bfloat16* low,
                                                                     const float* q,
                                                                     const float* y,
                                                                     float alpha,
                                                                     float beta,
                                                                     std::int64_t m) {
  __shared__ float tile[kTile][kTile + 1];
  const std::int64_t base = std::int64_t{blockIdx.z} * m * m;
  const std::int64_t row0 = std::int64_t{blockIdx.y} * kTile,
                     col0 = std::int64_t{blockIdx.x} * kTile;
#pragma unroll
  for (int i = 0; i < kTile; i += kTileRows) {
    const std::int64_t r = col0 + threadIdx.y + i, c = row0 + threadIdx.x;
    if (r < m && c < m) tile[threadIdx.y + i][threadIdx.x] = q[base + r * m + c];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTile; i += kTileRows) {
    const std::int64_t r = row0 + threadIdx.y + i, c = col0 + threadIdx.x;
    if (r >= m || c >= m) continue;
    const std::int64_t at = base + r * m + c;
    float v = alpha * (q[at] + tile[threadIdx.x][threadIdx.y + i]);
    if (y != nullptr) v += beta * y[at];
    if (s != nullptr) s[at] = v;
    split(v, high[at], low[at]);
  }
}

// The iteration on `count` matrices of a workspace.
struct Iteration {
  CudaContext& context;
  const NewtonSchulzWorkspace& ws;
  std::int64_t count;
  TensorView x = ws.x, other = ws.other;

  std::int64_t m() const { return ws.shape.rows; }
  std::int64_t n() const { return ws.shape.cols; }
  BlasProduct::Matrix square(const TensorView& v) const { return {v.data(), m(), m(), m() * m()}; }
  BlasProduct::Matrix wide(const TensorView& v) const { return {v.data(), m(), n(), m() * n()}; }

  // d = alpha a b(^T) + beta c for all matrices.
  void product(const TensorView& d,
               const BlasProduct::Matrix& a,
               const BlasProduct::Matrix& b,
               bool transpose_b,
               double alpha,
               double beta,
               const TensorView& c) const {
    const std::int64_t columns = transpose_b ? b.rows : b.cols;
    multiply(context,
             {.a = a,
              .b = b,
              .input = ws.shape.products == SchulzProducts::plain ? ws.shape.dtype : DType::bf16,
              .d = d.data(),
              .c = beta == 0 ? nullptr : c.data(),
              .d_stride = a.rows * columns,
              .output = d.dtype(),
              .transpose_b = transpose_b,
              .alpha = alpha,
              .beta = beta,
              .batch = count,
              .nominal_batch = ws.shape.group()},
             ws.blas);
  }

  // The normalised matrices to `to`.
  template <class T, class A>
  void normalise(T* to) const {
    const std::int64_t elements = m() * n();
    const dim3 grid(static_cast<unsigned>(parts_of(elements)), static_cast<unsigned>(count));
    const auto stream = native_stream(context);
    square_sums_kernel<A><<<grid, kThreads, 0, stream>>>(ws.sums.as<double>(), x.as<A>(), elements);
    check_launch("kernel newton_schulz: norm");
    scale_kernel<<<grid, kThreads, 0, stream>>>(
        to, static_cast<const A*>(x.as<A>()), ws.sums.as<double>(), elements);
    check_launch("kernel newton_schulz: scale");
  }

  // All in one dtype.
  void step(const TensorView& gram, const TensorView& polynomial) {
    product(gram, wide(x), wide(x), true, 1, 0, {});
    product(polynomial, square(gram), square(gram), false, kC, kB, gram);
    product(other, square(polynomial), wide(x), false, 1, kA, x);
    std::swap(x, other);
  }

  static __nv_bfloat16* half_of(const TensorView& v) {
    return reinterpret_cast<__nv_bfloat16*>(v.as<bf16>());
  }
  unsigned quads() const {
    return static_cast<unsigned>((count * m() * n() / 4 + kThreads - 1) / kThreads);
  }
  void split_x(const TensorView& low) const {
    split_kernel<<<quads(), kThreads, 0, native_stream(context)>>>(
        half_of(ws.x_high), half_of(low), x.as<float>(), count * m() * n());
    check_launch("kernel newton_schulz: halves");
  }
  void symmetric_step() {
    multiply_symmetric(context, ws.gram_high, x, {}, 1, 0, count);
    multiply_symmetric(context, ws.polynomial_high, ws.gram_high, ws.gram_high, kC, kB, count);
    multiply_wide(context, other, ws.polynomial_high, x, kA, count);
    std::swap(x, other);
  }
  // The iteration on rounded matrices; so is the result.
  void run_bf16(int iterations) {
    x = ws.x_high;
    other = ws.x_low;
    for (int i = 0; i < iterations; ++i) {
      if (ws.shape.halves_products()) {
        symmetric_step();
      } else {
        step(ws.gram_high, ws.polynomial_high);
      }
    }
  }
  // s = alpha (q + q^T) + beta y and halves.
  void symmetric(float* s,
                 const TensorView& high,
                 const TensorView& low,
                 const TensorView& q,
                 const float* y,
                 double alpha,
                 double beta) const {
    const auto tiles = static_cast<unsigned>((m() + kTile - 1) / kTile);
    symmetric_kernel<<<dim3(tiles, tiles, static_cast<unsigned>(count)),
                       dim3(kTile, kTileRows),
                       0,
                       native_stream(context)>>>(s,
                                                 half_of(high),
                                                 half_of(low),
                                                 q.as<float>(),
                                                 y,
                                                 static_cast<float>(alpha),
                                                 static_cast<float>(beta),
                                                 m());
    check_launch("kernel newton_schulz: symmetric sum");
  }
  // `polynomial` holds the half products, `gram` the Gram matrix.
  void split_step() {
    split_x(ws.x_low);
    const TensorView& q = ws.polynomial;
    product(q, wide(ws.x_high), wide(ws.x_high), true, 0.5, 0, {});
    product(q, wide(ws.x_high), wide(ws.x_low), true, 1, 1, q);
    symmetric(ws.gram.as<float>(), ws.gram_high, ws.gram_low, q, nullptr, 1, 0);
    product(q, square(ws.gram_high), square(ws.gram_high), true, 0.5, 0, {});
    product(q, square(ws.gram_high), square(ws.gram_low), true, 1, 1, q);
    symmetric(nullptr, ws.polynomial_high, ws.polynomial_low, q, ws.gram.as<float>(), kC, kB);
    product(other, square(ws.polynomial_high), wide(ws.x_high), false, 1, kA, x);
    product(other, square(ws.polynomial_high), wide(ws.x_low), false, 1, 1, other);
    product(other, square(ws.polynomial_low), wide(ws.x_high), false, 1, 1, other);
    std::swap(x, other);
  }
};

}  // namespace

std::int64_t NewtonSchulzShape::group() const {
  const auto element = static_cast<std::int64_t>(byte_size(dtype));
  std::int64_t wide = 2 * element, square = 2 * element;  // bytes per element
  if (products == SchulzProducts::split) {
    wide += 4;
    square += 8;
  } else if (products == SchulzProducts::bf16) {
    wide = element + 4;
    square = 4;
  }
  const std::int64_t bytes = rows * cols * wide + rows * rows * square;
  return std::clamp<std::int64_t>(kGroupBytes / std::max<std::int64_t>(1, bytes), 1, kMaxGroup);
}

bool NewtonSchulzShape::suits_tensor_cores() const {
  return dtype == DType::f32 && rows >= kTensorRows && rows % 8 == 0 && cols % 8 == 0;
}

bool NewtonSchulzShape::halves_products() const {
  return products == SchulzProducts::bf16 && can_multiply_schulz(rows, cols);
}

std::int64_t NewtonSchulzShape::group(const CudaContext& context, std::int64_t total) const {
  return halves_products() ? schulz_group(context, rows, cols, total, group())
                           : std::min(total, group());
}

NewtonSchulzWorkspace NewtonSchulzWorkspace::take(Arena& arena,
                                                  const NewtonSchulzShape& shape,
                                                  std::int64_t count) {
  const std::int64_t m = shape.rows, n = shape.cols;
  const auto wide = [&](DType dtype, const char* tag) {
    return arena.take({count, m, n}, dtype, tag);
  };
  const auto square = [&](DType dtype, const char* tag) {
    return arena.take({count, m, m}, dtype, tag);
  };
  NewtonSchulzWorkspace ws;
  ws.shape = shape;
  ws.sums = arena.take({count, parts_of(m * n)}, DType::f64, "muon.sums");
  ws.blas = take_blas_workspace(arena);
  ws.x = wide(shape.dtype, "muon.x");
  if (shape.products != SchulzProducts::bf16) {
    ws.other = wide(shape.dtype, "muon.x_next");
    ws.gram = square(shape.dtype, "muon.gram");
    ws.polynomial = square(shape.dtype, "muon.polynomial");
  }
  if (shape.products == SchulzProducts::plain) return ws;
  for (TensorView* v : {&ws.x_high, &ws.x_low})
    *v = wide(DType::bf16, "muon.halves");
  for (TensorView* v : {&ws.gram_high, &ws.polynomial_high})
    *v = square(DType::bf16, "muon.halves");
  if (shape.products == SchulzProducts::bf16) return ws;
  for (TensorView* v : {&ws.gram_low, &ws.polynomial_low})
    *v = square(DType::bf16, "muon.halves");
  return ws;
}

TensorView newton_schulz(CudaContext& context,
                         const NewtonSchulzWorkspace& ws,
                         std::int64_t count,
                         int iterations) {
  Iteration it{context, ws, count};
  if (ws.shape.products == SchulzProducts::bf16) {
    it.normalise<__nv_bfloat16, float>(Iteration::half_of(ws.x_high));
    it.run_bf16(iterations);
    return it.x;
  }
  if (ws.shape.dtype == DType::f64) {
    it.normalise<double, double>(ws.x.as<double>());
  } else {
    it.normalise<float, float>(ws.x.as<float>());
  }
  for (int i = 0; i < iterations; ++i) {
    if (ws.shape.products == SchulzProducts::split) {
      it.split_step();
    } else {
      it.step(ws.gram, ws.polynomial);
    }
  }
  return it.x;
}

}  // namespace moesaic::cuda
