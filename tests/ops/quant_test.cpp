#include "kernels/ops/quant.h"

#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {

// Nearest finite code by search over all codes; ties to the even code.
int nearest(double x, int codes, double (*decode)(std::uint8_t) noexcept) {
  int best = 0;
  for (int c = 0; c < codes / 2; ++c) {
    const double v = decode(static_cast<std::uint8_t>(c));
    if (std::isnan(v)) continue;
    const double d = std::abs(std::abs(x) - v),
                 b = std::abs(std::abs(x) - decode(static_cast<std::uint8_t>(best)));
    if (d < b || (d == b && c % 2 == 0)) best = c;
  }
  return best + (std::signbit(x) ? codes / 2 : 0);
}

}  // namespace

TEST_CASE("codes: every value encodes to itself, everything else to the nearest") {
  for (int c = 0; c < 16; ++c)
    CHECK(e2m1_encode(e2m1_decode(static_cast<std::uint8_t>(c))) == c);
  for (int c = 0; c < 256; ++c) {
    if ((c & 0x7f) != 0x7f) CHECK(e4m3_encode(e4m3_decode(static_cast<std::uint8_t>(c))) == c);
  }
  for (std::uint64_t i = 0; i < 4000; ++i) {
    const double x = standard_normal(1, i) * std::exp2(std::floor(30 * uniform(2, i)) - 18);
    CHECK(e2m1_encode(x) == nearest(x, 16, e2m1_decode));
    CHECK(e4m3_encode(x) == nearest(x, 256, e4m3_decode));
  }
  for (int c = 0; c + 1 < 0x7f; ++c) {  // exact ties
    const double tie = 0.5 * (e4m3_decode(static_cast<std::uint8_t>(c)) +
                              e4m3_decode(static_cast<std::uint8_t>(c + 1)));
    CHECK(e4m3_encode(tie) == c + c % 2);
  }
  CHECK(e4m3_encode(1e9) == 0x7e);
  CHECK(e4m3_encode(-INFINITY) == 0xfe);
  CHECK(e4m3_encode(std::nan("")) == 0x7f);
  CHECK(e2m1_encode(-0.0) == 8);
  CHECK(e8m0_decode(127) == 1.0);
  CHECK(std::isnan(e8m0_decode(255)));
}

TEST_CASE("MX: scales fit, the ceiling rule never saturates, zero blocks, packing") {
  Rig rig;
  const TensorView x = rig.random({9, 64}, DType::f32, 3, 5.0);
  for (std::int64_t c = 0; c < 32; ++c)
    x.as<float>()[c] = 0.0F;
  for (const MxFormat format : {MxFormat::mxfp4, MxFormat::mxfp8}) {
    for (const ScaleRule rule : {ScaleRule::floor, ScaleRule::ceil}) {
      QuantizeMx op;
      op.scales = rig.poisoned({9, 2}, DType::u8);
      op.codes = rig.poisoned({9, 64}, DType::u8);
      op.dequant = rig.poisoned({9, 64}, DType::f32);
      if (format == MxFormat::mxfp4) op.packed = rig.poisoned({9, 32}, DType::u8);
      op.x = x;
      op.format = format;
      op.rule = rule;
      rig.run(op);
      CHECK(op.scales.as<std::uint8_t>()[0] == 0);
      const auto v = read(x), q = read(op.dequant);
      const double top = format == MxFormat::mxfp4 ? 6 : 448,
                   relative = format == MxFormat::mxfp4 ? 0.25 : 1.0 / 16;
      for (std::size_t i = 32; i < v.size(); ++i) {
        const double scale = e8m0_decode(op.scales.as<std::uint8_t>()[i / 32]);
        if (rule == ScaleRule::ceil) CHECK(std::abs(v[i]) <= top * scale);
        if (std::abs(v[i]) <= top * scale)
          CHECK(std::abs(q[i] - v[i]) <= std::max(relative * std::abs(v[i]), 0.25 * scale));
      }
      const TensorView back = rig.poisoned({9, 64}, DType::f32);
      rig.run(DequantizeMx{.y = back, .codes = op.codes, .scales = op.scales, .format = format});
      CHECK(same_bits(back, op.dequant));
      if (format == MxFormat::mxfp4) {
        CHECK(op.packed.as<std::uint8_t>()[40] ==
              (op.codes.as<std::uint8_t>()[80] | op.codes.as<std::uint8_t>()[81] << 4));
        rig.run(DequantizeMx{.y = back, .packed = op.packed, .scales = op.scales});
        CHECK(same_bits(back, op.dequant));
      }
    }
  }
}

TEST_CASE(
    "FP8 blocks: the largest value of a block is exact, power-of-two scales, floor, threads") {
  Rig rig;
  const TensorView x = rig.random({5, 200}, DType::f64, 3),
                   scales = rig.poisoned({3, 2}, DType::f64),
                   codes = rig.poisoned({5, 200}, DType::u8),
                   y = rig.poisoned({5, 200}, DType::f64);
  rig.run(QuantizeFp8Block{
      .scales = scales, .codes = codes, .dequant = y, .x = x, .block_rows = 2, .block_cols = 128});
  double amax = 0;
  for (int c = 128; c < 200; ++c)
    amax = std::max(amax, std::abs(x.as<double>()[4 * 200 + c]));
  CHECK(scales.as<double>()[5] == amax / 448);
  CHECK(distance(read(x), read(y)) <= 4.0 / 16);
  rig.run(QuantizeFp8Block{.scales = scales,
                           .codes = codes,
                           .x = x,
                           .block_rows = 2,
                           .block_cols = 128,
                           .power_of_two = true});
  for (const double s : read(scales))
    CHECK(std::exp2(std::round(std::log2(s))) == s);
  const TensorView zero = rig.zeros({5, 200}, DType::f64);
  rig.run(QuantizeFp8Block{
      .scales = scales, .codes = codes, .x = zero, .block_rows = 2, .block_cols = 128});
  CHECK(read(scales) == std::vector<double>(6, 1.0));
  rig.run(QuantizeFp8Block{.scales = scales,
                           .codes = codes,
                           .x = zero,
                           .block_rows = 2,
                           .block_cols = 128,
                           .amax_floor = 1e-4});
  CHECK(read(scales)[0] == 1e-4 / 448);
  check_threads([](Rig& r) {
    const TensorView in = r.random({300, 256}, DType::bf16, 8), s = r.zeros({3, 2}, DType::f32),
                     out = r.zeros({300, 256}, DType::bf16);
    r.run(QuantizeFp8Block{
        .scales = s, .dequant = out, .x = in, .block_rows = 128, .block_cols = 128});
    return std::vector<TensorView>{s, out};
  });
}

}  // namespace moesaic::test
