#pragma once
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic {

// --- codes (SPEC 10.1), exact for every double
double e2m1_decode(
    std::uint8_t code) noexcept;  ///< low four bits: sign, two exponent bits, one mantissa bit
std::uint8_t e2m1_encode(
    double x) noexcept;  ///< nearest, ties to the even code, saturates at 6; keeps the sign of 0
double e4m3_decode(std::uint8_t code) noexcept;  ///< bias 7; 0x7f and 0xff are NaN; largest 448
std::uint8_t e4m3_encode(double x) noexcept;     ///< nearest even, saturates at 448; NaN -> 0x7f
double e8m0_decode(std::uint8_t code) noexcept;  ///< 2^(code - 127); 255 is NaN

enum class MxFormat : std::uint8_t { mxfp4, mxfp8 };  ///< elements E2M1 or E4M3, scales E8M0
/// floor: e = floor(log2 amax) - emax (the top of a block may saturate); ceil: smallest e with amax / 2^e <= largest
/// element value. Zero blocks have scale code 0.
enum class ScaleRule : std::uint8_t { floor, ceil };

/// Splits the rows of x into groups along the last dimension and writes one E8M0 scale per group and one code per
/// element (SPEC 10.2).
///
///   x        [rows, cols]           f64 | f32 | bf16; cols divisible by group
///   scales   [rows, cols / group]   u8
///   codes    [rows, cols]           u8, optional
///   packed   [rows, cols / 2]       u8, optional, mxfp4 only: the even column in the low nibble
///   dequant  [rows, cols]           type of x, optional: code times scale; may alias x
///
/// Straight-through training uses `dequant` forward and passes the gradient unchanged.
struct QuantizeMx {
  static constexpr const char* kName = "quantize_mx";
  TensorView scales{};
  TensorView codes{};
  TensorView packed{};
  TensorView dequant{};
  ConstTensorView x{};
  MxFormat format = MxFormat::mxfp4;
  ScaleRule rule = ScaleRule::floor;
  std::int64_t group = 32;

  void check() const;
  OpCost cost() const;
};

/// y = code * scale. Either `codes` or `packed` is given; shapes as in QuantizeMx.
struct DequantizeMx {
  static constexpr const char* kName = "dequantize_mx";
  TensorView y{};
  ConstTensorView codes{};
  ConstTensorView packed{};
  ConstTensorView scales{};
  MxFormat format = MxFormat::mxfp4;
  std::int64_t group = 32;

  void check() const;
  OpCost cost() const;
};

/// E4M3 with one scale per block of block_rows x block_cols (1 x 128 activations, 128 x 128 weights; ragged edges
/// allowed): scale = max(amax, amax_floor) / 448, optionally rounded up to a power of two; 1 for a zero block (SPEC 10.4).
///
///   x        [rows, cols]   f64 | f32 | bf16
///   scales   [ceil(rows / block_rows), ceil(cols / block_cols)]  acc_t: what a code is multiplied by
///   codes    [rows, cols]   u8
///   dequant  [rows, cols]   type of x, optional; may alias x
struct QuantizeFp8Block {
  static constexpr const char* kName = "quantize_fp8_block";
  TensorView scales{};
  TensorView codes{};
  TensorView dequant{};
  ConstTensorView x{};
  std::int64_t block_rows = 1;
  std::int64_t block_cols = 128;
  bool power_of_two = false;
  double amax_floor = 0.0;

  void check() const;
  OpCost cost() const;
};

/// y = code * scale of its block; shapes as in QuantizeFp8Block.
struct DequantizeFp8Block {
  static constexpr const char* kName = "dequantize_fp8_block";
  TensorView y{};
  ConstTensorView codes{};
  ConstTensorView scales{};
  std::int64_t block_rows = 1;
  std::int64_t block_cols = 128;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const QuantizeMx& op);
void launch(CpuContext& context, const DequantizeMx& op);
void launch(CpuContext& context, const QuantizeFp8Block& op);
void launch(CpuContext& context, const DequantizeFp8Block& op);
void launch(CudaContext& context, const QuantizeMx& op);
void launch(CudaContext& context, const DequantizeMx& op);
void launch(CudaContext& context, const QuantizeFp8Block& op);
void launch(CudaContext& context, const DequantizeFp8Block& op);

}  // namespace moesaic
