#include "kernels/ops/balance.h"

#include <limits>

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

void set(TensorView v, std::int64_t i, double x) {
  switch (v.dtype()) {
    case DType::f64:
      v.as<double>()[i] = x;
      break;
    case DType::f32:
      v.as<float>()[i] = static_cast<float>(x);
      break;
    case DType::i64:
      v.as<std::int64_t>()[i] = static_cast<std::int64_t>(x);
      break;
    default:
      v.as<std::int32_t>()[i] = static_cast<std::int32_t>(x);
  }
}

// Scores between 0 and 1 on a coarse grid (ties), cutoffs near the top, some NaN.
void fill_scores(TensorView scores, TensorView cutoff, bool with_nan) {
  for (std::int64_t i = 0; i < scores.numel(); ++i) {
    const double u = uniform(71, static_cast<std::uint64_t>(i));
    set(scores,
        i,
        with_nan && u < 0.01 ? std::numeric_limits<double>::quiet_NaN()
                             : std::round(u * 3000) / 3000);
  }
  for (std::int64_t t = 0; t < cutoff.numel(); ++t)
    set(cutoff, t, 0.7 + 0.2 * uniform(72, static_cast<std::uint64_t>(t)));
}

struct Size {
  std::int64_t tokens, experts, bins;
};
// One of everything, experts beside a block's eight, tokens on both sides of a block's share, more
// counts than shared memory holds, and the size of a large model.
const Size kSizes[] = {
    {1, 1, 1}, {3, 5, 7}, {100, 8, 33}, {2048, 20, 1001}, {2049, 9, 1500}, {8192, 896, 1001}};

void check_histogram(BothBackends& both, const Size& s, DType dtype, bool with_nan) {
  INFO(s.tokens << " tokens, " << s.experts << " experts, " << s.bins << " bins " << name(dtype)
                << ", NaN " << with_nan);
  const Twin histogram({s.experts, s.bins}, DType::i32), scores({s.tokens, s.experts}, dtype),
      cutoff({s.tokens}, dtype), bias({s.experts}, dtype), tokens({1}, DType::i64),
      skip({1}, dtype);
  fill_scores(scores.initial.view(), cutoff.initial.view(), with_nan);
  fill_normal(bias.initial.view(), 73, 0.1);
  for (std::int64_t i = 0; i < histogram.initial.view().numel(); ++i)
    set(histogram.initial.view(), i, static_cast<double>(i % 3));  // it accumulates
  require_cuda_matches_cpu(
      both, {&histogram, &scores, &cutoff, &bias}, {{&histogram, 0}}, [&](auto side) {
        return BalanceHistogram{.histogram = side(histogram),
                                .scores = side(scores),
                                .cutoff = side(cutoff),
                                .bias = side(bias)};
      });
  // The rule, on the counts that the CPU has made; the whole step has more tokens.
  std::memcpy(
      histogram.initial.view().data(), histogram.host.view().data(), histogram.host.view().bytes());
  const std::int64_t top_k = std::max<std::int64_t>(1, s.experts / 50);
  for (const double step_tokens : {0.0, 1.0, 1.0 * static_cast<double>(s.tokens), 1e9}) {
    for (const int flag : {-1, 0, 1}) {
      INFO("tokens " << step_tokens << ", skip " << flag);
      set(tokens.initial.view(), 0, step_tokens);
      set(skip.initial.view(), 0, flag);
      require_cuda_matches_cpu(
          both, {&histogram, &bias, &tokens, &skip}, {{&bias, 0}}, [&](auto side) {
            return BalanceBiasFromHistogram{.bias = side(bias),
                                            .histogram = side(histogram),
                                            .tokens = side(tokens),
                                            .skip = flag < 0 ? TensorView() : side(skip),
                                            .top_k = top_k};
          });
    }
  }
}

void check_exact(BothBackends& both, const Size& s, DType dtype, bool with_nan) {
  INFO(s.tokens << " tokens, " << s.experts << " experts " << name(dtype) << ", NaN " << with_nan);
  const Twin scores({s.tokens, s.experts}, dtype), margins({s.tokens, s.experts}, dtype),
      cutoff({s.tokens}, dtype), bias({s.experts}, dtype), skip({1}, DType::i32);
  fill_scores(scores.initial.view(), cutoff.initial.view(), false);
  for (const bool in_place : {false, true}) {
    const Twin& result = in_place ? scores : margins;
    require_cuda_matches_cpu(both, {&scores, &margins, &cutoff}, {{&result, 0}}, [&](auto side) {
      return BalanceMargins{
          .margins = side(result), .scores = side(scores), .cutoff = side(cutoff)};
    });
  }
  fill_scores(margins.initial.view(), cutoff.initial.view(), with_nan);
  for (std::int64_t i = 0; i < s.tokens * s.experts; ++i) {
    if (i % 5 == 0) set(margins.initial.view(), i, 0.0 - 0.25 * static_cast<double>(i % 4));
  }
  fill_normal(bias.initial.view(), 74);
  for (const std::int64_t top_k : {std::int64_t{1}, (s.experts + 1) / 2, s.experts}) {
    for (const int flag : {0, 1}) {
      INFO("top " << top_k << ", skip " << flag);
      set(skip.initial.view(), 0, flag);
      require_cuda_matches_cpu(both, {&margins, &bias, &skip}, {{&bias, 0}}, [&](auto side) {
        return BalanceBiasExact{
            .bias = side(bias), .margins = side(margins), .skip = side(skip), .top_k = top_k};
      });
    }
  }
}

void check_counts(
    BothBackends& both, std::int64_t experts, DType dtype, DType count_dtype, std::int64_t most) {
  INFO(experts << " experts " << name(dtype) << ", counts " << name(count_dtype) << " below "
               << most);
  const Twin bias({experts}, dtype), frequency({experts}, dtype), counts({experts}, count_dtype),
      total({experts}, DType::i64), skip({1}, DType::f32);
  fill_normal(bias.initial.view(), 75, 0.1);
  fill_normal(frequency.initial.view(), 76);
  for (std::int64_t e = 0; e < experts; ++e) {
    set(counts.initial.view(),
        e,
        std::floor(uniform(77, static_cast<std::uint64_t>(e)) * static_cast<double>(most)));
    set(total.initial.view(), e, static_cast<double>(e << 33));
  }
  for (const int flag : {-1, 0, 1}) {
    INFO("skip " << flag);
    set(skip.initial.view(), 0, flag);
    const std::vector<const Twin*> twins{&bias, &frequency, &counts, &total, &skip};
    require_cuda_matches_cpu(both, twins, {{&bias, 0}}, [&](auto side) {
      return BalanceBiasSign{
          .bias = side(bias), .counts = side(counts), .skip = flag < 0 ? TensorView() : side(skip)};
    });
    require_cuda_matches_cpu(both, twins, {{&frequency, 0}}, [&](auto side) {
      return BalanceFrequency{.frequency = side(frequency),
                              .counts = side(counts),
                              .skip = flag < 0 ? TensorView() : side(skip)};
    });
    require_cuda_matches_cpu(both, twins, {{&total, 0}}, [&](auto side) {
      return AccumulateCounts{.total = side(total), .counts = side(counts)};
    });
  }
}

}  // namespace

TEST_CASE("Histogram and its bias on CUDA are the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_histogram(both, s, DType::f32, false);
    if (s.experts < 100) check_histogram(both, s, DType::f64, true);
  }
  check_histogram(both, {0, 6, 11}, DType::f32, false);
}

TEST_CASE("Margins and the exact bias on CUDA are the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_exact(both, {std::min<std::int64_t>(s.tokens, 2049), s.experts, 0}, DType::f32, false);
    if (s.experts < 100) check_exact(both, s, DType::f64, true);
  }
}

TEST_CASE("Rules on counts on CUDA are the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t experts : {1, 7, 896, 1500}) {
    for (const DType dtype : {DType::f32, DType::f64}) {
      check_counts(both, experts, dtype, DType::i32, 1000);
      check_counts(both, experts, dtype, DType::i64, std::int64_t{1} << 40);
      check_counts(both, experts, dtype, DType::i64, 3);  // many at the mean
      check_counts(both, experts, dtype, DType::i32, 1);  // all zero
    }
  }
}

}  // namespace moesaic::test
