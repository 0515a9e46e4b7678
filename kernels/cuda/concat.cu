// Rows are copied in the widest unit that fits every row's start: no element type is needed.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/ops/concat.h"

namespace moesaic {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): device helpers

constexpr int kThreads = 256;

// y[t] = [a[t], b[t]], or the other way round; m and n are units of a and b per row. PerRow threads share a row.
template <class Unit, int PerRow, bool Split>
__global__ void __launch_bounds__(kThreads)
    columns_kernel(Unit* y, Unit* a, Unit* b, std::int64_t rows, std::int64_t m, std::int64_t n) {
  constexpr int kRows = kThreads / PerRow;
  for (std::int64_t t = std::int64_t{blockIdx.x} * kRows + threadIdx.x / PerRow; t < rows;
       t += std::int64_t{gridDim.x} * kRows) {
    for (std::int64_t c = threadIdx.x % PerRow; c < m + n; c += PerRow) {
      Unit* part = c < m ? a + t * m + c : b + t * n + (c - m);
      Unit* whole = y + t * (m + n) + c;
      if constexpr (Split) {
        *part = *whole;
      } else {
        *whole = *part;
      }
    }
  }
}

template <class Unit, bool Split>
void copy(const CudaContext& context,
          std::byte* y,
          std::byte* a,
          std::byte* b,
          std::int64_t rows,
          std::int64_t a_bytes,
          std::int64_t b_bytes) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(Unit));
  const std::int64_t m = a_bytes / kSize, n = b_bytes / kSize;
  const auto enqueue = [&]<int PerRow>(std::integral_constant<int, PerRow>) {
    constexpr int kRows = kThreads / PerRow;
    columns_kernel<Unit, PerRow, Split><<<grid_for(context, (rows + kRows - 1) / kRows, 16),
                                          kThreads,
                                          0,
                                          native_stream(context)>>>(reinterpret_cast<Unit*>(y),
                                                                    reinterpret_cast<Unit*>(a),
                                                                    reinterpret_cast<Unit*>(b),
                                                                    rows,
                                                                    m,
                                                                    n);
  };
  if (m + n <= kThreads) {
    enqueue(std::integral_constant<int, kWarp>{});
  } else {
    enqueue(std::integral_constant<int, kThreads>{});
  }
  check_launch(Split ? "kernel split_columns" : "kernel concat_columns");
}

template <bool Split>
void dispatch(const CudaContext& context,
              const std::byte* y,
              const std::byte* a,
              const std::byte* b,
              const Shape& whole,
              std::int64_t columns_of_a,
              std::size_t element) {
  const auto size = static_cast<std::int64_t>(element);
  const std::int64_t a_bytes = columns_of_a * size, b_bytes = (whole[1] - columns_of_a) * size;
  // One signature for both directions: the kernel writes to what its direction says only.
  auto* yp = const_cast<std::byte*>(y);
  auto* ap = const_cast<std::byte*>(a);
  auto* bp = const_cast<std::byte*>(b);
  const auto fits = [&](std::int64_t unit) {
    const auto bytes = static_cast<std::size_t>(unit);
    return a_bytes % unit == 0 && b_bytes % unit == 0 && is_aligned(y, bytes) &&
           is_aligned(a, bytes) && is_aligned(b, bytes);
  };
  if (fits(16)) return copy<uint4, Split>(context, yp, ap, bp, whole[0], a_bytes, b_bytes);
  if (fits(4)) return copy<std::uint32_t, Split>(context, yp, ap, bp, whole[0], a_bytes, b_bytes);
  copy<std::uint16_t, Split>(context, yp, ap, bp, whole[0], a_bytes, b_bytes);
}

}  // namespace

void launch(CudaContext& context, const ConcatColumns& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  MOESAIC_CHECK(byte_size(op.y.dtype()) % 2 == 0, "columns of single bytes");
  dispatch<false>(context,
                  op.y.data(),
                  op.a.data(),
                  op.b.data(),
                  op.y.shape(),
                  op.a.dim(1),
                  byte_size(op.y.dtype()));
}

void launch(CudaContext& context, const SplitColumns& op) {
  if (is_dry(context) || op.y.numel() == 0) return;
  MOESAIC_CHECK(byte_size(op.y.dtype()) % 2 == 0, "columns of single bytes");
  dispatch<true>(context,
                 op.y.data(),
                 op.a.data(),
                 op.b.data(),
                 op.y.shape(),
                 op.a.dim(1),
                 byte_size(op.y.dtype()));
}

}  // namespace moesaic
