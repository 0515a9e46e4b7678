#include <algorithm>

#include "kernels/ops/balance.h"
#include "kernels/ops/router.h"
#include "tests/ops/moe_support.h"

namespace moesaic {
namespace {

using moe_test::CpuRunner;
using moe_test::filled;
using moe_test::normal;
using moe_test::one;
using moe_test::Tensor;

/// Scores, cutoffs and counts under a bias.
struct Routed {
  Routed(CpuRunner& run, const Tensor& logits, const Tensor& bias, std::int64_t k)
      : scores(logits.view().shape(), logits.view().dtype()),
        cutoff({logits.view().dim(0)}, logits.view().dtype()),
        counts({logits.view().dim(1)}, DType::i32) {
    const Tensor topk({logits.view().dim(0), k}, DType::i32),
        weights({logits.view().dim(0), k}, logits.view().dtype());
    run(RouterForward{.scores = scores,
                      .topk = topk,
                      .weights = weights,
                      .cutoff = cutoff,
                      .counts = counts,
                      .logits = logits,
                      .bias = bias,
                      .given = {}});
  }
  Tensor scores, cutoff, counts;
};

/// Logits that favour the first experts.
Tensor skewed_logits(std::int64_t tokens, std::int64_t experts, DType type, std::uint64_t key) {
  Tensor logits = normal({tokens, experts}, type, key);
  for (std::int64_t i = 0; i < tokens * experts; ++i)
    logits.set(i, logits.at(i) - 0.15 * static_cast<double>(i % experts));
  return logits;
}

}  // namespace

TEST_CASE("Histogram: each entry in its bin, parts of a step add up, threads do not matter") {
  CpuRunner single(1), several(3);
  const std::int64_t tokens = 83, experts = 37, bins = 101;
  const Tensor logits = skewed_logits(tokens, experts, DType::f64, 51),
               bias = normal({experts}, DType::f64, 52, 0.1);
  const Routed r(single, logits, bias, 4);
  const Tensor whole = filled({experts, bins}, DType::i32, 0),
               parts = filled({experts, bins}, DType::i32, 0);
  single(
      BalanceHistogram{.histogram = whole, .scores = r.scores, .cutoff = r.cutoff, .bias = bias});
  for (const auto& [begin, end] :
       {std::pair<std::int64_t, std::int64_t>{0, 1}, {1, 60}, {60, tokens}}) {
    several(BalanceHistogram{.histogram = parts,
                             .scores = r.scores.view().rows(begin, end),
                             .cutoff = r.cutoff.view().rows(begin, end),
                             .bias = bias});
  }
  CHECK(same_bits(whole, parts));
  const auto b = bias.values();
  const double low = *std::min_element(b.begin(), b.end()) - 1,
               width = (*std::max_element(b.begin(), b.end()) + 1 - low) / bins;
  std::vector<std::int64_t> want(static_cast<std::size_t>(experts * bins), 0);
  for (std::int64_t i = 0; i < tokens * experts; ++i) {
    const double m = std::floor((r.cutoff.at(i / experts) - r.scores.at(i) - low) / width);
    ++want[static_cast<std::size_t>(i % experts * bins +
                                    static_cast<std::int64_t>(std::clamp(m, 0.0, bins - 1.0)))];
  }
  CHECK(whole.ints() == want);
}

TEST_CASE("Histogram: values outside the range and NaN are counted in the end bins") {
  CpuRunner run;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor scores({4, 1}, DType::f32, std::vector<double>{-50, 50, nan, 0}),
      cutoff = filled({4}, DType::f32, 0);
  const Tensor histogram = filled({1, 3}, DType::i32, 0);
  run(BalanceHistogram{.histogram = histogram,
                       .scores = scores,
                       .cutoff = cutoff,
                       .bias = filled({1}, DType::f32, 0)});
  CHECK(histogram.ints() == std::vector<std::int64_t>{2, 1, 1});
}

TEST_CASE("Exact quantile: floor(q) margins stay above, and the mean is zero") {
  CpuRunner run(2);
  for (const std::int64_t tokens : {1, 7, 64, 65}) {
    const std::int64_t experts = 11, k = 3;
    const Tensor logits = skewed_logits(tokens, experts, DType::f64, 53),
                 zero = filled({experts}, DType::f64, 0);
    const Routed r(run, logits, zero, k);
    const Tensor margins({tokens, experts}, DType::f64), bias({experts}, DType::f64);
    run(BalanceMargins{.margins = margins, .scores = r.scores, .cutoff = r.cutoff});
    run(BalanceBiasExact{.bias = bias, .margins = margins, .skip = {}, .top_k = k});
    const std::int64_t q = tokens * k / experts;
    std::vector<double> theta;
    double mean = 0;
    for (std::int64_t e = 0; e < experts; ++e) {
      std::vector<double> column;
      for (std::int64_t t = 0; t < tokens; ++t)
        column.push_back(r.scores.at(t * experts + e) - r.cutoff.at(t));
      std::sort(column.rbegin(), column.rend());
      theta.push_back(column[static_cast<std::size_t>(q)]);
      mean -= theta.back() / static_cast<double>(experts);
    }
    for (std::int64_t e = 0; e < experts; ++e)
      REQUIRE(bias.at(e) == Approx(-theta[static_cast<std::size_t>(e)] - mean).margin(1e-14));
  }
}

TEST_CASE("Quantile rules even out the loads of a skewed router") {
  CpuRunner run(2);
  const std::int64_t tokens = 600, experts = 12, k = 2, bins = 1001;
  const Tensor logits = skewed_logits(tokens, experts, DType::f32, 54);
  const auto largest_load = [&](const Tensor& bias) {
    const auto counts = Routed(run, logits, bias, k).counts.ints();
    return static_cast<double>(*std::max_element(counts.begin(), counts.end())) * experts /
           static_cast<double>(tokens * k);
  };
  const Tensor exact = filled({experts}, DType::f32, 0),
               histogram_bias = filled({experts}, DType::f32, 0);
  REQUIRE(largest_load(exact) > 2.0);
  for (int step = 0; step < 8; ++step) {
    const Routed a(run, logits, exact, k), b(run, logits, histogram_bias, k);
    const Tensor margins({tokens, experts}, DType::f32),
        histogram = filled({experts, bins}, DType::i32, 0);
    run(BalanceMargins{.margins = margins, .scores = a.scores, .cutoff = a.cutoff});
    run(BalanceBiasExact{.bias = exact, .margins = margins, .skip = {}, .top_k = k});
    run(BalanceHistogram{
        .histogram = histogram, .scores = b.scores, .cutoff = b.cutoff, .bias = histogram_bias});
    run(BalanceBiasFromHistogram{.bias = histogram_bias,
                                 .histogram = histogram,
                                 .tokens = one(DType::i64, tokens),
                                 .skip = {},
                                 .top_k = k});
  }
  CHECK(largest_load(exact) < 1.05);
  CHECK(largest_load(histogram_bias) < 1.05);
}

TEST_CASE("Counts beyond 2^24 are exact, also next to an f32 bias") {
  CpuRunner run;
  const double big = 16777216.0;  // 2^24: the next integer is no float
  const Tensor bias = filled({3}, DType::f32, 0);
  run(BalanceBiasSign{.bias = bias,
                      .counts = Tensor({3}, DType::i64, std::vector<double>{big, big + 1, big + 2}),
                      .skip = {},
                      .gamma = 0.5});
  CHECK(bias.values() == std::vector<double>{0.5, 0.0, -0.5});

  const Tensor total = filled({3}, DType::i64, 0),
               counts({3}, DType::i32, std::vector<double>{big + 1, 1, 2147483647});
  for (int i = 0; i < 3; ++i)
    run(AccumulateCounts{.total = total, .counts = counts});
  CHECK(total.ints() == std::vector<std::int64_t>{50331651, 3, 6442450941});

  const Tensor frequency({3}, DType::f64);
  run(BalanceFrequency{.frequency = frequency, .counts = total, .skip = {}});
  CHECK(frequency.at(0) == 50331651.0 / 6492782595.0);

  // Bin 0 holds 2^24 of 2^25 + 2 entries: q = 2^24 + 1 (k / E = 1/2) lies one entry inside bin 1 of
  // 2^24 + 2 entries.
  const Tensor histogram(
      {2, 4}, DType::i32, std::vector<double>{big, big + 2, 0, 0, big + 1, big + 1, 0, 0});
  const Tensor quantile = filled({2}, DType::f64, 0);
  run(BalanceBiasFromHistogram{.bias = quantile,
                               .histogram = histogram,
                               .tokens = one(DType::i64, 2 * big + 2),
                               .skip = {},
                               .top_k = 1});
  const double first = -1 + (1 + 1 / (big + 2)) * 0.5, second = -1 + 0.5;
  CHECK(quantile.at(0) == Approx((first - second) / 2).epsilon(1e-7));
  CHECK(quantile.at(1) == Approx((second - first) / 2).epsilon(1e-7));
  CHECK(quantile.at(0) > 0);
}

TEST_CASE("A skipped step and a step without tokens leave the bias as it is") {
  CpuRunner run;
  const Tensor counts({2}, DType::i32, std::vector<int>{1, 5}),
      histogram({2, 2}, DType::i32, std::vector<int>{3, 1, 1, 3});
  const Tensor margins = normal({4, 2}, DType::f32, 55), skip = one(DType::f32, 1),
               go = one(DType::f32, 0), tokens = one(DType::i32, 4);
  const Tensor bias({2}, DType::f32, std::vector<double>{0.25, -0.25}), before = copy_of(bias);
  run(BalanceBiasSign{.bias = bias, .counts = counts, .skip = skip});
  run(BalanceBiasFromHistogram{
      .bias = bias, .histogram = histogram, .tokens = tokens, .skip = skip, .top_k = 1});
  run(BalanceBiasExact{.bias = bias, .margins = margins, .skip = skip, .top_k = 1});
  run(BalanceFrequency{.frequency = bias, .counts = counts, .skip = skip});
  run(BalanceBiasFromHistogram{
      .bias = bias, .histogram = histogram, .tokens = one(DType::i32, 0), .skip = go, .top_k = 1});
  CHECK(same_bits(bias, before));
  run(BalanceBiasSign{.bias = bias, .counts = counts, .skip = go});
  CHECK_FALSE(same_bits(bias, before));
}

TEST_CASE("Frequencies without any count are equal") {
  CpuRunner run;
  const Tensor frequency({4}, DType::f32);
  run(BalanceFrequency{.frequency = frequency, .counts = filled({4}, DType::i32, 0), .skip = {}});
  CHECK(frequency.values() == std::vector<double>(4, 0.25));
}

}  // namespace moesaic
