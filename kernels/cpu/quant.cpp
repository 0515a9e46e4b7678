#include "kernels/ops/quant.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

// Decoding by table, one per format.
using Table = std::array<double, 256>;
template <double (*decode)(std::uint8_t)>
Table make_table() {
  Table t;
  for (std::size_t i = 0; i < t.size(); ++i)
    t[i] = decode(static_cast<std::uint8_t>(i));
  return t;
}

Table table_of(MxFormat format) {
  return format == MxFormat::mxfp4 ? make_table<e2m1_decode>() : make_table<e4m3_decode>();
}

template <class T>
double largest_magnitude(const T* x, std::int64_t n) {
  acc_t<T> largest = 0;
#pragma omp simd reduction(max : largest)
  for (std::int64_t i = 0; i < n; ++i) {
    const acc_t<T> a = std::abs(static_cast<acc_t<T>>(x[i]));
    largest = a > largest ? a : largest;
  }
  return static_cast<double>(largest);
}

// The shared exponent of a group, -127 .. 127.
int scale_exponent(double amax, MxFormat format, ScaleRule rule) {
  if (!(amax > 0)) return -127;
  const int top_exponent = format == MxFormat::mxfp4 ? 2 : 8;
  const double top = format == MxFormat::mxfp4 ? 6.0 : 448.0;
  int e = 0;
  std::frexp(amax, &e);
  e = e - 1 - top_exponent;  // floor(log2 amax) - top_exponent
  // top = f 2^top_exponent with f < 2: the floor rule misses the smallest sufficient exponent by at most one.
  if (rule == ScaleRule::ceil && amax > std::ldexp(top, e)) ++e;
  return std::clamp(e, -127, 127);
}

template <class T>
void quantize_row(const QuantizeMx& op, std::int64_t r, const Table& decode) {
  using A = acc_t<T>;
  const std::int64_t cols = op.x.dim(1);
  const T* x = op.x.as<T>() + r * cols;
  std::uint8_t* codes = op.codes.empty() ? nullptr : op.codes.as<std::uint8_t>() + r * cols;
  std::uint8_t* packed = op.packed.empty() ? nullptr : op.packed.as<std::uint8_t>() + r * cols / 2;
  T* dequant = op.dequant.empty() ? nullptr : op.dequant.as<T>() + r * cols;
  for (std::int64_t begin = 0; begin < cols; begin += op.group) {
    const int e = scale_exponent(largest_magnitude(x + begin, op.group), op.format, op.rule);
    op.scales.as<std::uint8_t>()[(r * cols + begin) / op.group] =
        static_cast<std::uint8_t>(e + 127);
    const double scale = std::ldexp(1.0, e), inverse = std::ldexp(1.0, -e);
    for (std::int64_t c = begin; c < begin + op.group; ++c) {
      const double v = static_cast<double>(static_cast<A>(x[c])) * inverse;
      const std::uint8_t code = op.format == MxFormat::mxfp4 ? e2m1_encode(v) : e4m3_encode(v);
      if (codes != nullptr) codes[c] = code;
      if (packed != nullptr)
        packed[c / 2] = static_cast<std::uint8_t>(c % 2 == 0 ? code : packed[c / 2] | (code << 4));
      if (dequant != nullptr) dequant[c] = T(static_cast<A>(decode[code] * scale));
    }
  }
}

template <class T>
void dequantize_row(const DequantizeMx& op, std::int64_t r, const Table& decode) {
  const std::int64_t cols = op.y.dim(1);
  const std::uint8_t* codes = op.codes.empty() ? nullptr : op.codes.as<std::uint8_t>() + r * cols;
  const std::uint8_t* packed =
      op.packed.empty() ? nullptr : op.packed.as<std::uint8_t>() + r * cols / 2;
  const std::uint8_t* scales = op.scales.as<std::uint8_t>() + r * cols / op.group;
  T* y = op.y.as<T>() + r * cols;
  for (std::int64_t c = 0; c < cols; ++c) {
    const std::uint8_t code = codes != nullptr
                                  ? codes[c]
                                  : static_cast<std::uint8_t>((packed[c / 2] >> (c % 2 * 4)) & 15);
    y[c] = T(static_cast<acc_t<T>>(decode[code] * e8m0_decode(scales[c / op.group])));
  }
}

double block_scale(double amax, const QuantizeFp8Block& op) {
  amax = std::max(amax, op.amax_floor);
  if (!(amax > 0)) return 1.0;
  const double scale = amax / 448.0;
  if (!op.power_of_two) return scale;
  int e = 0;
  return std::frexp(scale, &e) == 0.5 ? scale : std::ldexp(1.0, e);
}

template <class T>
void quantize_block(const QuantizeFp8Block& op,
                    std::int64_t row_block,
                    std::int64_t col_block,
                    const Table& decode) {
  using A = acc_t<T>;
  const std::int64_t cols = op.x.dim(1), r0 = row_block * op.block_rows,
                     c0 = col_block * op.block_cols;
  const std::int64_t r1 = std::min(op.x.dim(0), r0 + op.block_rows),
                     c1 = std::min(cols, c0 + op.block_cols);
  double amax = 0;
  for (std::int64_t r = r0; r < r1; ++r)
    amax = std::max(amax, largest_magnitude(op.x.as<T>() + r * cols + c0, c1 - c0));
  const A stored = static_cast<A>(block_scale(amax, op));
  op.scales.as<A>()[row_block * op.scales.dim(1) + col_block] = stored;
  const double scale = static_cast<double>(stored);
  for (std::int64_t i = r0; i < r1; ++i) {
    for (std::int64_t c = i * cols + c0; c < i * cols + c1; ++c) {
      const std::uint8_t code =
          e4m3_encode(static_cast<double>(static_cast<A>(op.x.as<T>()[c])) / scale);
      if (!op.codes.empty()) op.codes.as<std::uint8_t>()[c] = code;
      if (!op.dequant.empty()) op.dequant.as<T>()[c] = T(static_cast<A>(decode[code] * scale));
    }
  }
}

template <class T>
void dequantize_block_row(const DequantizeFp8Block& op, std::int64_t r, const Table& decode) {
  using A = acc_t<T>;
  const std::int64_t cols = op.y.dim(1);
  const A* scales = op.scales.as<A>() + r / op.block_rows * op.scales.dim(1);
  const std::uint8_t* codes = op.codes.as<std::uint8_t>() + r * cols;
  T* y = op.y.as<T>() + r * cols;
  for (std::int64_t c = 0; c < cols; ++c) {
    y[c] = T(static_cast<A>(decode[codes[c]] * static_cast<double>(scales[c / op.block_cols])));
  }
}

// Calls f(row, table) for all rows of `like`.
template <class F>
void for_rows(ThreadPool& pool, const ConstTensorView& like, const Table& table, F f) {
  pool.parallel_for(
      like.dim(0), cpu::row_grain(like.dim(1)), [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t r = begin; r < end; ++r)
          f(r, table);
      });
}

}  // namespace

void launch(CpuContext& context, const QuantizeMx& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      for_rows(pool, op.x, table_of(op.format), [&](std::int64_t r, const Table& table) {
        quantize_row<T>(op, r, table);
      });
    });
  });
}

void launch(CpuContext& context, const DequantizeMx& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
      for_rows(pool, op.y, table_of(op.format), [&](std::int64_t r, const Table& table) {
        dequantize_row<T>(op, r, table);
      });
    });
  });
}

void launch(CpuContext& context, const QuantizeFp8Block& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) {
      const Table table = make_table<e4m3_decode>();
      const std::int64_t per_row = op.scales.dim(1);
      pool.parallel_for(op.scales.numel(),
                        cpu::row_grain(op.block_rows * op.block_cols),
                        [&](std::int64_t begin, std::int64_t end) {
                          for (std::int64_t b = begin; b < end; ++b)
                            quantize_block<T>(op, b / per_row, b % per_row, table);
                        });
    });
  });
}

void launch(CpuContext& context, const DequantizeFp8Block& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.y.dtype(), [&]<class T>(TypeTag<T>) {
      for_rows(pool, op.y, make_table<e4m3_decode>(), [&](std::int64_t r, const Table& t) {
        dequantize_block_row<T>(op, r, t);
      });
    });
  });
}

}  // namespace moesaic
