#include "kernels/ops/vocab_block.h"

#include <limits>

#include "kernels/ops/vocab_loss.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType stats_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
double sum_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : 1e-5;
}

void set(TensorView v, std::int64_t i, double x) {
  dispatch_float(v.dtype(), [&]<class T>(TypeTag<T>) { v.as<T>()[i] = T(x); });
}

// Normal numbers, some far away.
void fill_logits(TensorView view) {
  fill_normal(view, 61, 2.0);
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    const double u = uniform(161, static_cast<std::uint64_t>(i));
    if (u < 0.02) set(view, i, u < 0.01 ? -80.0 : 12.0);
  }
}
void exclude_row(TensorView view, std::int64_t r) {
  for (std::int64_t v = 0; v < view.dim(1); ++v)
    set(view, r * view.dim(1) + v, -std::numeric_limits<double>::infinity());
}

struct Size {
  std::int64_t rows, n;
};
// Both sides of the lengths at which a block grows and at which a thread's batch of four accesses fills.
const Size kSizes[] = {
    {0, 5}, {1, 1}, {9, 7}, {30, 512}, {13, 4088}, {6, 4096}, {5, 4099}, {3, 40000}};

void check_sums(BothBackends& both, const Size& s, DType dtype) {
  INFO(s.rows << " x " << s.n << " " << name(dtype));
  const Twin logits({s.rows, s.n}, dtype), sums({s.rows, 2}, stats_type(dtype));
  fill_logits(logits.initial.view());
  fill_normal(sums.initial.view(), 62);
  require_cuda_matches_cpu(both, {&logits, &sums}, {{&sums, sum_tolerance(dtype)}}, [&](auto side) {
    return VocabBlockSums{.sums = side(sums), .logits = side(logits)};
  });
}

enum class Gradient { none, own, in_place, narrow };

// Block 1 of three; the sums of the others are made up.
void check_cross_entropy(BothBackends& both, const Size& s, DType dtype, Gradient kind) {
  INFO(s.rows << " x " << s.n << " " << name(dtype) << ", gradient " << static_cast<int>(kind));
  const DType stats = stats_type(dtype), narrow = kind == Gradient::narrow ? DType::bf16 : dtype;
  const Twin logits({s.rows, s.n}, dtype), dlogits({s.rows, s.n}, narrow),
      sums({3, s.rows, 2}, stats), targets({s.rows}, DType::i32), weight({s.rows}, stats),
      divisor({1}, stats), logp({s.rows}, stats), loss_sum({1}, stats), z_sum({1}, stats);
  fill_logits(logits.initial.view());
  if (s.rows > 1) exclude_row(logits.initial.view(), 1);  // its target is in another block
  fill_normal(dlogits.initial.view(), 63);
  fill_normal(logp.initial.view(), 64);
  fill_normal(weight.initial.view(), 65, 0.3, 1.0);
  set(divisor.initial.view(), 0, 37.5);
  set(loss_sum.initial.view(), 0, 2.5);
  set(z_sum.initial.view(), 0, -1.5);
  for (std::int64_t i = 0; i < 3 * s.rows; ++i) {
    set(sums.initial.view(), 2 * i, 12.0 + static_cast<double>(i % 4));
    set(sums.initial.view(), 2 * i + 1, 1.0 + static_cast<double>(i % 7));
  }
  for (std::int64_t r = 0; r < s.rows; ++r) {
    const double u = uniform(66, static_cast<std::uint64_t>(r));
    const auto word = static_cast<std::int32_t>(u * 3.0 * static_cast<double>(s.n));
    const auto border = static_cast<std::int32_t>(s.n + (r % 2) * (s.n - 1));
    targets.initial.data<std::int32_t>()[r] = r % 5 == 4   ? kIgnoredTarget
                                              : r % 3 == 0 ? border
                                              : r == 1     ? 0
                                                           : word;
    if (r % 7 == 3) set(weight.initial.view(), r, 0.0);
  }
  const Twin& written = kind == Gradient::in_place ? logits : dlogits;
  const double gradient_tolerance = narrow == DType::f64   ? 1e-12
                                    : narrow == DType::f32 ? 3e-5
                                                           : 1e-3;
  require_cuda_matches_cpu(
      both,
      {&logits, &dlogits, &sums, &targets, &weight, &divisor, &logp, &loss_sum, &z_sum},
      {{&loss_sum, sum_tolerance(dtype)},
       {&z_sum, sum_tolerance(dtype)},
       {&logp, sum_tolerance(dtype)},
       {&written, kind == Gradient::none ? 0 : gradient_tolerance}},
      [&](auto side) {
        return VocabBlockCrossEntropy{
            .loss_sum = side(loss_sum),
            .z_sum = side(z_sum),
            .logp = side(logp),
            .dlogits = kind == Gradient::none ? TensorView() : side(written),
            .logits = side(logits),
            .sums = side(sums),
            .targets = side(targets),
            .weight = side(weight),
            .divisor = side(divisor),
            .block = 1,
            .z_coef = 0.01,
            .grad_scale = 3.0};
      });
}

}  // namespace

TEST_CASE("Sums of a block of words on CUDA match the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const Size& s : kSizes) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
      check_sums(both, s, dtype);
  }
  check_sums(both, {6, 163840}, DType::bf16);
}

TEST_CASE("Sums of a row of nothing but -infinity on CUDA are -infinity and 0", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t n : {1, 600, 5000}) {
    const Twin logits({3, n}, DType::f32), sums({3, 2}, DType::f32);
    fill_logits(logits.initial.view());
    exclude_row(logits.initial.view(), 1);
    fill_normal(sums.initial.view(), 62);
    logits.reset(both.cuda.stream());
    sums.reset(both.cuda.stream());
    run(both.cuda.backend(),
        VocabBlockSums{.sums = sums.device.view(), .logits = logits.device.view()});
    const auto got = download(sums.device.view(), both.cuda.stream());
    CHECK(got.data<float>()[2] == -std::numeric_limits<float>::infinity());
    CHECK(got.data<float>()[3] == 0.0F);
    CHECK(std::isfinite(got.data<float>()[0]));
    CHECK(got.data<float>()[5] >= 1.0F);
  }
}

TEST_CASE("Cross-entropy of a block of words on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const Size& s : kSizes) {
    for (const Gradient kind : {Gradient::none, Gradient::own, Gradient::in_place}) {
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16})
        check_cross_entropy(both, s, dtype, kind);
    }
    check_cross_entropy(both, s, DType::f32, Gradient::narrow);
  }
  check_cross_entropy(both, {6, 163840}, DType::bf16, Gradient::in_place);
  check_cross_entropy(both, {3000, 100}, DType::f32, Gradient::own);
}

}  // namespace moesaic::test
