#include "kernels/ops/vocab_loss.h"

#include <limits>

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType stats_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// The device adds a row in hundreds of partial sums, the CPU in eight: its f32 sum over 160,000
// columns is the worse one.
double sum_tolerance(DType dtype, std::int64_t n = 0) {
  return dtype == DType::f64 ? 1e-13 : n > 100000 ? 5e-5 : 1e-5;
}
double gradient_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 3e-5 : 1e-3;
}

enum class Gradient { none, own, in_place, narrow };

void set(TensorView v, std::int64_t i, double x) {
  dispatch_float(v.dtype(), [&]<class T>(TypeTag<T>) { v.as<T>()[i] = T(x); });
}

// Normal numbers, every 50th far away, some -infinity.
void fill_logits(TensorView view, std::uint64_t key) {
  fill_normal(view, key, 2.0);
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    const double u = uniform(key + 100, static_cast<std::uint64_t>(i));
    if (u < 0.02) set(view, i, u < 0.01 ? -80.0 : 12.0);
  }
}

struct Rows {
  Rows(std::int64_t rows, std::int64_t n, DType dtype, DType gradient_dtype)
      : logits({rows, n}, dtype),
        teacher({rows, n}, dtype),
        dlogits({rows, n}, gradient_dtype),
        targets({rows}, DType::i32),
        weight({rows}, stats_type(dtype)),
        divisor({1}, stats_type(dtype)),
        logp({rows}, stats_type(dtype)),
        loss_sum({1}, stats_type(dtype)),
        z_sum({1}, stats_type(dtype)) {
    fill_logits(logits.initial.view(), 61);
    fill_logits(teacher.initial.view(), 62);
    fill_normal(dlogits.initial.view(), 63);
    fill_normal(logp.initial.view(), 64);
    fill_normal(weight.initial.view(), 65, 0.3, 1.0);
    set(divisor.initial.view(), 0, 37.5);
    set(loss_sum.initial.view(), 0, 2.5);
    set(z_sum.initial.view(), 0, -1.5);
    for (std::int64_t r = 0; r < rows; ++r) {
      const double u = uniform(66, static_cast<std::uint64_t>(r));
      targets.initial.data<std::int32_t>()[r] =
          r % 5 == 4 ? kIgnoredTarget : static_cast<std::int32_t>(u * static_cast<double>(n));
      if (r % 7 == 3) set(weight.initial.view(), r, 0.0);
    }
  }
  std::vector<const Twin*> all() const {
    return {&logits, &teacher, &dlogits, &targets, &weight, &divisor, &logp, &loss_sum, &z_sum};
  }
  template <class Side>
  TensorView gradient(Gradient kind, const Side& side) const {
    return kind == Gradient::none       ? TensorView()
           : kind == Gradient::in_place ? side(logits)
                                        : side(dlogits);
  }
  Output gradient_output(Gradient kind) const {
    const Twin& t = kind == Gradient::in_place ? logits : dlogits;
    // Without a gradient nothing may touch it.
    return {&t, kind == Gradient::none ? 0 : gradient_tolerance(t.host.view().dtype())};
  }
  Twin logits, teacher, dlogits, targets, weight, divisor, logp, loss_sum, z_sum;
};

void check_cross_entropy(BothBackends& both,
                         std::int64_t rows,
                         std::int64_t n,
                         DType dtype,
                         Gradient kind,
                         bool all_options) {
  INFO(rows << " x " << n << " " << name(dtype) << ", gradient " << static_cast<int>(kind)
            << ", options " << all_options);
  const Rows r(rows, n, dtype, kind == Gradient::narrow ? DType::bf16 : dtype);
  std::vector<Output> outputs{{&r.loss_sum, sum_tolerance(dtype)},
                              {&r.z_sum, all_options ? sum_tolerance(dtype) : 0},
                              {&r.logp, all_options ? sum_tolerance(dtype) : 0},
                              r.gradient_output(kind)};
  require_cuda_matches_cpu(both, r.all(), outputs, [&](auto side) {
    return CrossEntropy{.loss_sum = side(r.loss_sum),
                        .z_sum = all_options ? side(r.z_sum) : TensorView(),
                        .logp = all_options ? side(r.logp) : TensorView(),
                        .dlogits = r.gradient(kind, side),
                        .logits = side(r.logits),
                        .targets = side(r.targets),
                        .weight = all_options ? side(r.weight) : TensorView(),
                        .divisor = side(r.divisor),
                        .z_coef = all_options ? 0.01 : 0.0,
                        .grad_scale = 3.0};
  });
}

void check_divergence(BothBackends& both,
                      std::int64_t rows,
                      std::int64_t n,
                      DType dtype,
                      Gradient kind,
                      bool masked) {
  for (const auto divergence :
       {DivergenceKind::forward_kl, DivergenceKind::reverse_kl, DivergenceKind::lk}) {
    INFO(rows << " x " << n << " " << name(dtype) << ", gradient " << static_cast<int>(kind)
              << ", masked " << masked << ", divergence " << static_cast<int>(divergence));
    const Rows r(rows, n, dtype, kind == Gradient::narrow ? DType::bf16 : dtype);
    require_cuda_matches_cpu(both,
                             r.all(),
                             {{&r.loss_sum, sum_tolerance(dtype, n)}, r.gradient_output(kind)},
                             [&](auto side) {
                               return VocabDivergence{
                                   .loss_sum = side(r.loss_sum),
                                   .dlogits = r.gradient(kind, side),
                                   .logits = side(r.logits),
                                   .teacher = side(r.teacher),
                                   .mask = masked ? side(r.weight) : TensorView(),
                                   .divisor = side(r.divisor),
                                   .kind = divergence,
                                   .grad_scale = 3.0};
                             });
  }
}

struct Size {
  std::int64_t rows, n;
};
// One column, odd lengths, both sides of the lengths at which a block grows and at which a thread's
// batch of four accesses fills.
const Size kSizes[] = {
    {0, 5}, {1, 1}, {9, 7}, {30, 512}, {13, 4088}, {6, 4096}, {5, 4099}, {3, 40000}};

}  // namespace

TEST_CASE("Cross-entropy on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const bool options : {false, true}) {
      for (const auto kind : {Gradient::none, Gradient::own, Gradient::in_place}) {
        check_cross_entropy(both, s.rows, s.n, DType::f64, kind, options);
        check_cross_entropy(both, s.rows, s.n, DType::f32, kind, options);
        check_cross_entropy(both, s.rows, s.n, DType::bf16, kind, options);
      }
      check_cross_entropy(both, s.rows, s.n, DType::f32, Gradient::narrow, options);
    }
  }
  check_cross_entropy(both, 6, 163840, DType::bf16, Gradient::in_place, true);
  check_cross_entropy(both, 6, 163840, DType::f32, Gradient::narrow, true);
  check_cross_entropy(both, 3000, 100, DType::f32, Gradient::own, true);
  // Long rows that are not kept, in the same order of sums as short ones.
  std::get<CudaContext>(both.cuda.backend()).path = KernelPath::plain;
  check_cross_entropy(both, 6, 163840, DType::bf16, Gradient::in_place, true);
  check_cross_entropy(both, 3, 40000, DType::f32, Gradient::narrow, true);
}

TEST_CASE("Divergences over the vocabulary on CUDA match the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const bool masked : {false, true}) {
      check_divergence(both, s.rows, s.n, DType::f64, Gradient::own, masked);
      check_divergence(both, s.rows, s.n, DType::f32, Gradient::in_place, masked);
      check_divergence(both, s.rows, s.n, DType::f32, Gradient::narrow, masked);
      check_divergence(both, s.rows, s.n, DType::bf16, Gradient::in_place, masked);
      check_divergence(both, s.rows, s.n, DType::bf16, Gradient::none, masked);
    }
  }
  check_divergence(both, 3, 163840, DType::bf16, Gradient::in_place, true);
}

TEST_CASE("Cross-entropy of extreme rows on CUDA is the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::int64_t n = 600;
  const Rows r(6, n, DType::f32, DType::f32);
  for (std::int64_t v = 0; v < n; ++v) {
    set(r.logits.initial.view(), v, v < 500 ? -kInfinity : 3.0);  // whole threads see nothing else
    set(r.logits.initial.view(), n + v, -kInfinity);
    set(r.logits.initial.view(), 2 * n + v, v == 77 ? kNan : 1.0);
    set(r.logits.initial.view(), 3 * n + v, v == 5 ? kInfinity : 1.0);
    set(r.logits.initial.view(), 4 * n + v, v == 599 ? 3e38 : -3e38);
    set(r.logits.initial.view(), 5 * n + v, -88.0 + static_cast<double>(v) / 4);
  }
  for (std::int64_t i = 0; i < 6; ++i)
    r.targets.initial.data<std::int32_t>()[i] = 550;
  const auto make_op = [&](auto side) {
    return CrossEntropy{.loss_sum = side(r.loss_sum),
                        .logp = side(r.logp),
                        .dlogits = side(r.dlogits),
                        .logits = side(r.logits),
                        .targets = side(r.targets),
                        .divisor = side(r.divisor)};
  };
  for (const Twin* t : r.all())
    t->reset(both.cuda.stream());
  run(both.cpu.backend(), make_op([](const Twin& t) { return t.host.view(); }));
  run(both.cuda.backend(), make_op([](const Twin& t) { return t.device.view(); }));
  const auto check_row = [](const float* got, const float* want, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      INFO(i << ": " << got[i] << ", CPU " << want[i]);
      if (std::isnan(want[i]) || std::isinf(want[i])) {
        CHECK((std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]));
      } else {
        CHECK(std::abs(got[i] - want[i]) <= 1e-5F * std::abs(want[i]) + 1e-30F);
      }
    }
  };
  const auto logp = download(r.logp.device.view(), both.cuda.stream());
  const auto dlogits = download(r.dlogits.device.view(), both.cuda.stream());
  check_row(logp.data<float>(), r.logp.host.data<float>(), 6);
  for (std::int64_t row = 0; row < 6; ++row) {
    INFO("row " << row);
    check_row(dlogits.data<float>() + row * n, r.dlogits.host.data<float>() + row * n, n);
  }
}

}  // namespace moesaic::test
