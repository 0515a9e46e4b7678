// Scales, codes and reconstructions: the CPU's bits.
#include "kernels/ops/quant.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

constexpr DType kTypes[] = {DType::f64, DType::f32, DType::bf16};

// Normal numbers times a factor per stretch of 16 from far below one to far above, with zeros of both signs, stretches of
// zeros, halfway cases of both codes, subnormal numbers and, if wanted, values that are not finite.
void fill_wild(TensorView view, std::uint64_t key, bool finite) {
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    const double ties[] = {
        0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 1.0625, 1.1875, 464.0, 0.0009765625};
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      const auto index = static_cast<std::uint64_t>(i);
      const double kind = uniform(key + 1, index / 16);
      double x = standard_normal(key, index) * std::exp2(std::floor(40.0 * (kind - 0.5)));
      if (kind < 0.1) x = 0.0;
      if (kind > 0.9) x = ties[i % std::ssize(ties)] * (i % 2 == 0 ? 1.0 : -1.0);
      if (kind > 0.5 && kind < 0.53) x = 1e-39 * standard_normal(key, index);
      if (i % 37 == 0) x = i % 2 == 0 ? 0.0 : -0.0;
      if (!finite && i % 211 == 5) x = i % 3 == 0 ? NAN : i % 2 == 0 ? INFINITY : -INFINITY;
      view.as<T>()[i] = T(x);
    }
  });
}

struct MxSize {
  std::int64_t rows, cols, group;
};
const MxSize kMxSizes[] = {
    {1, 2, 1}, {0, 64, 32}, {33, 64, 32}, {7, 4096, 32}, {5, 66, 3}, {3, 48, 16}, {2, 40, 40}};

class PathNames : public PathObserver {
 public:
  void ran(const char*, const char* path) override { last = path; }
  std::string last;
};

void check_mx(BothBackends& both,
              const MxSize& s,
              DType dtype,
              MxFormat format,
              ScaleRule rule,
              KernelPath path,
              bool finite) {
  INFO(s.rows << " x " << s.cols << " by " << s.group << " " << name(dtype) << ", mxfp4 "
              << (format == MxFormat::mxfp4) << ", ceil " << (rule == ScaleRule::ceil) << ", plain "
              << (path == KernelPath::plain) << ", finite " << finite);
  const Twin x({s.rows, s.cols}, dtype), scales({s.rows, s.cols / s.group}, DType::u8),
      codes({s.rows, s.cols}, DType::u8), packed({s.rows, s.cols / 2}, DType::u8),
      y({s.rows, s.cols}, dtype);
  fill_wild(x.initial.view(), 1, finite);
  fill_normal(y.initial.view(), 2);
  const bool with_packed = format == MxFormat::mxfp4;
  auto& context = std::get<CudaContext>(both.cuda.backend());
  PathNames paths;
  context.path = path;
  context.paths = &paths;
  // The bits of a NaN differ between machines, so what is not finite is compared as codes only.
  for (const Twin* out : {&y, &x}) {
    std::vector<Output> outputs{{&scales, 0}, {&codes, 0}};
    if (with_packed) outputs.push_back({&packed, 0});
    if (finite) outputs.push_back({out, 0});
    require_cuda_matches_cpu(both, {&x, &scales, &codes, &packed, &y}, outputs, [&](auto side) {
      return QuantizeMx{.scales = side(scales),
                        .codes = side(codes),
                        .packed = with_packed ? side(packed) : TensorView(),
                        .dequant = side(*out),
                        .x = side(x),
                        .format = format,
                        .rule = rule,
                        .group = s.group};
    });
  }
  if (path == KernelPath::plain && s.rows > 0) CHECK(paths.last == "plain");
  if (path == KernelPath::automatic && s.group == 32 && s.rows > 0) CHECK(paths.last == "fused");
  context.path = KernelPath::automatic;
  context.paths = nullptr;
}

// Codes of all values; scales of ordinary size and the smallest ones.
void check_dequantize_mx(
    BothBackends& both, const MxSize& s, DType dtype, MxFormat format, bool packed) {
  INFO(s.rows << " x " << s.cols << " by " << s.group << " " << name(dtype) << ", mxfp4 "
              << (format == MxFormat::mxfp4) << ", packed " << packed);
  const Twin y({s.rows, s.cols}, dtype), scales({s.rows, s.cols / s.group}, DType::u8),
      codes({s.rows, packed ? s.cols / 2 : s.cols}, DType::u8);
  for (std::int64_t i = 0; i < codes.initial.view().numel(); ++i) {
    auto code = static_cast<std::uint8_t>(i * 37 + 11);
    if (format == MxFormat::mxfp8 && (code & 0x7f) == 0x7f) code ^= 1;  // no NaN: see above
    codes.initial.data<std::uint8_t>()[i] = code;
  }
  for (std::int64_t i = 0; i < scales.initial.view().numel(); ++i)
    scales.initial.data<std::uint8_t>()[i] =
        static_cast<std::uint8_t>(i % 3 == 0 ? i % 7 : 110 + i % 30);
  require_cuda_matches_cpu(both, {&y, &scales, &codes}, {{&y, 0}}, [&](auto side) {
    return DequantizeMx{.y = side(y),
                        .codes = packed ? TensorView() : side(codes),
                        .packed = packed ? side(codes) : TensorView(),
                        .scales = side(scales),
                        .format = format,
                        .group = s.group};
  });
}

struct Fp8Size {
  std::int64_t rows, cols, block_rows, block_cols;
};
const Fp8Size kFp8Sizes[] = {{1, 1, 1, 128},
                             {0, 128, 1, 128},
                             {33, 512, 1, 128},
                             {9, 200, 1, 128},
                             {257, 384, 128, 128},
                             {130, 333, 128, 128},
                             {11, 24, 3, 5}};

void check_fp8(BothBackends& both,
               const Fp8Size& s,
               DType dtype,
               bool power_of_two,
               double floor,
               bool finite) {
  INFO(s.rows << " x " << s.cols << " by " << s.block_rows << " x " << s.block_cols << " "
              << name(dtype) << ", power of two " << power_of_two << ", floor " << floor
              << ", finite " << finite);
  const DType acc = dtype == DType::f64 ? DType::f64 : DType::f32;
  const Twin x({s.rows, s.cols}, dtype), codes({s.rows, s.cols}, DType::u8),
      y({s.rows, s.cols}, dtype),
      scales(
          {(s.rows + s.block_rows - 1) / s.block_rows, (s.cols + s.block_cols - 1) / s.block_cols},
          acc);
  fill_wild(x.initial.view(), 1, finite);
  fill_normal(y.initial.view(), 2);
  fill_normal(scales.initial.view(), 3);
  for (const Twin* out : {&y, &x}) {
    std::vector<Output> outputs{{&scales, 0}, {&codes, 0}};
    if (finite) outputs.push_back({out, 0});
    require_cuda_matches_cpu(both, {&x, &codes, &y, &scales}, outputs, [&](auto side) {
      return QuantizeFp8Block{.scales = side(scales),
                              .codes = side(codes),
                              .dequant = side(*out),
                              .x = side(x),
                              .block_rows = s.block_rows,
                              .block_cols = s.block_cols,
                              .power_of_two = power_of_two,
                              .amax_floor = floor};
    });
  }
  std::memset(codes.initial.view().data(), 0, codes.initial.view().bytes());
  for (std::int64_t i = 0; i < codes.initial.view().numel(); ++i) {
    const auto code = static_cast<std::uint8_t>(i * 37 + 11);
    codes.initial.data<std::uint8_t>()[i] =
        static_cast<std::uint8_t>((code & 0x7f) == 0x7f ? code ^ 1 : code);
  }
  require_cuda_matches_cpu(both, {&codes, &y, &scales}, {{&y, 0}}, [&](auto side) {
    return DequantizeFp8Block{.y = side(y),
                              .codes = side(codes),
                              .scales = side(scales),
                              .block_rows = s.block_rows,
                              .block_cols = s.block_cols};
  });
}

}  // namespace

TEST_CASE("MX quantization on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kMxSizes) {
    for (const DType dtype : kTypes) {
      for (const MxFormat format : {MxFormat::mxfp4, MxFormat::mxfp8}) {
        for (const ScaleRule rule : {ScaleRule::floor, ScaleRule::ceil}) {
          check_mx(both, s, dtype, format, rule, KernelPath::automatic, true);
          check_mx(both, s, dtype, format, rule, KernelPath::plain, true);
          check_mx(both, s, dtype, format, rule, KernelPath::automatic, false);
        }
        check_dequantize_mx(both, s, dtype, format, false);
        if (format == MxFormat::mxfp4) check_dequantize_mx(both, s, dtype, format, true);
      }
    }
  }
}

TEST_CASE("FP8 block quantization on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kFp8Sizes) {
    for (const DType dtype : kTypes) {
      for (const bool power_of_two : {false, true}) {
        check_fp8(both, s, dtype, power_of_two, 0.0, true);
        check_fp8(both, s, dtype, power_of_two, 1e-4, true);
        check_fp8(both, s, dtype, power_of_two, 0.0, false);
      }
    }
  }
}

}  // namespace moesaic::test
