#include <algorithm>
#include <array>
#include <numeric>

#include "kernels/ops/router.h"
#include "tests/ops/moe_support.h"

namespace moesaic {
namespace {

using moe_test::CpuRunner;
using moe_test::normal;
using moe_test::Tensor;

struct Route {
  Route(std::int64_t tokens, std::int64_t experts, std::int64_t k, DType t)
      : scores({tokens, experts}, t),
        topk({tokens, k}, DType::i32),
        weights({tokens, k}, t),
        cutoff({tokens}, t),
        counts({experts}, DType::i32) {}
  RouterForward op(const Tensor& logits,
                   ConstTensorView bias = {},
                   ConstTensorView given = {}) const {
    return {.scores = scores,
            .topk = topk,
            .weights = weights,
            .cutoff = topk.view().dim(1) < logits.view().dim(1) ? cutoff.view() : TensorView(),
            .counts = counts,
            .logits = logits,
            .bias = bias,
            .given = given};
  }
  Tensor scores, topk, weights, cutoff, counts;
};

/// All experts of a token by falling value, equal values by index.
std::vector<std::int64_t> order_of(const std::vector<double>& value) {
  std::vector<std::int64_t> order(value.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return value[static_cast<std::size_t>(a)] > value[static_cast<std::size_t>(b)];
  });
  return order;
}

/// s + bias of a token, added in the type of the op.
std::vector<double> biased(const Tensor& scores, const Tensor& bias, std::int64_t t) {
  const std::int64_t experts = scores.view().dim(1);
  std::vector<double> v;
  for (std::int64_t e = 0; e < experts; ++e) {
    const double sum = scores.at(t * experts + e) + bias.at(e);
    v.push_back(scores.view().dtype() == DType::f32 ? static_cast<double>(static_cast<float>(sum))
                                                    : sum);
  }
  return v;
}

void require_choice(const Route& r, const Tensor& bias, double route_scale, double tolerance) {
  const std::int64_t tokens = r.topk.view().dim(0), k = r.topk.view().dim(1),
                     experts = r.scores.view().dim(1);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(experts), 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto value = biased(r.scores, bias, t);
    const auto order = order_of(value);
    double sum = 0;
    for (std::int64_t j = 0; j < k; ++j)
      sum += r.scores.at(t * experts + order[static_cast<std::size_t>(j)]);
    for (std::int64_t j = 0; j < k; ++j) {
      const std::int64_t e = order[static_cast<std::size_t>(j)];
      REQUIRE(r.topk.at(t * k + j) == e);
      const double want = route_scale * r.scores.at(t * experts + e) / (k > 1 ? sum + 1e-20 : 1.0);
      REQUIRE(r.weights.at(t * k + j) == Approx(want).epsilon(tolerance));
      ++counts[static_cast<std::size_t>(e)];
    }
    if (k < experts)
      REQUIRE(r.cutoff.at(t) ==
              value[static_cast<std::size_t>(order[static_cast<std::size_t>(k)])]);
  }
  REQUIRE(r.counts.ints() == counts);
}

}  // namespace

TEST_CASE("Router: choice, weights, cutoff and counts against sorting") {
  CpuRunner run(2);
  for (const DType type : {DType::f64, DType::f32}) {
    for (const auto& [tokens, experts, k] : {std::array<std::int64_t, 3>{1, 1, 1},
                                             {1, 5, 5},
                                             {17, 33, 4},
                                             {40, 96, 7},
                                             {3, 300, 16}}) {
      const Tensor logits = normal({tokens, experts}, type, 1),
                   bias = normal({experts}, type, 2, 0.2);
      const Route r(tokens, experts, k, type);
      auto op = r.op(logits, bias);
      op.route_scale = 2.446;
      run(op);
      require_choice(r, bias, 2.446, type == DType::f64 ? 1e-14 : 1e-6);
      for (std::int64_t i = 0; i < tokens * experts; ++i) {
        REQUIRE(r.scores.at(i) == Approx(1.0 / (1.0 + std::exp(-logits.at(i))))
                                      .epsilon(type == DType::f64 ? 1e-15 : 1e-6));
      }
    }
  }
}

TEST_CASE("Router: softmax scores, without renormalisation") {
  CpuRunner run;
  const Tensor logits = normal({6, 9}, DType::f64, 3, 4.0);
  const Route r(6, 9, 3, DType::f64);
  auto op = r.op(logits);
  op.score = RouterScore::softmax;
  op.renormalize = false;
  op.route_scale = 2.0;
  run(op);
  for (std::int64_t t = 0; t < 6; ++t) {
    double sum = 0;
    for (std::int64_t e = 0; e < 9; ++e)
      sum += std::exp(logits.at(t * 9 + e));
    for (std::int64_t j = 0; j < 3; ++j) {
      const auto e = static_cast<std::int64_t>(r.topk.at(t * 3 + j));
      CHECK(r.weights.at(t * 3 + j) ==
            Approx(2.0 * std::exp(logits.at(t * 9 + e)) / sum).epsilon(1e-13));
    }
  }
}

TEST_CASE("Router: equal values go to the lower index") {
  CpuRunner run;
  const std::int64_t experts = 70;
  Tensor logits = moe_test::filled({2, experts}, DType::f32, 0.25);
  for (const std::int64_t e : {5, 64, 65})
    logits.set(experts + e, 1.0);
  const Route r(2, experts, 5, DType::f32);
  run(r.op(logits));
  CHECK(r.topk.ints() == std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 64, 65, 0, 1});
  CHECK(r.cutoff.at(0) == r.scores.at(0));
  CHECK(r.cutoff.at(1) == r.scores.at(experts));
}

TEST_CASE("Router: group limit, against marking the groups by hand") {
  CpuRunner run;
  const std::int64_t tokens = 50, groups = 8, per_group = 6, experts = groups * per_group, k = 6;
  const int kept = 3;
  const Tensor logits = normal({tokens, experts}, DType::f64, 5),
               bias = normal({experts}, DType::f64, 6, 0.3);
  const Route r(tokens, experts, k, DType::f64);
  auto op = r.op(logits, bias);
  op.cutoff = {};
  op.num_groups = groups;
  op.topk_groups = kept;
  run(op);
  for (std::int64_t t = 0; t < tokens; ++t) {
    auto value = biased(r.scores, bias, t);
    std::vector<double> group_value;
    for (std::int64_t g = 0; g < groups; ++g) {
      std::vector<double> v(value.begin() + g * per_group, value.begin() + (g + 1) * per_group);
      std::sort(v.rbegin(), v.rend());
      group_value.push_back(v[0] + v[1]);
    }
    const auto best = order_of(group_value);
    for (std::size_t i = kept; i < best.size(); ++i) {
      std::fill_n(
          value.begin() + best[i] * per_group, per_group, -std::numeric_limits<double>::infinity());
    }
    const auto order = order_of(value);
    for (std::int64_t j = 0; j < k; ++j)
      REQUIRE(r.topk.at(t * k + j) == order[static_cast<std::size_t>(j)]);
  }
}

TEST_CASE("Router: groups of one expert") {
  CpuRunner run;
  const Tensor logits({1, 4}, DType::f64, std::vector<double>{0.1, 0.4, 0.2, 0.3});
  const Route r(1, 4, 2, DType::f64);
  auto op = r.op(logits);
  op.cutoff = {};
  op.num_groups = 4;
  op.topk_groups = 2;
  run(op);
  CHECK(r.topk.ints() == std::vector<std::int64_t>{1, 3});
}

TEST_CASE("Router: NaN scores still give different experts") {
  CpuRunner run;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Tensor logits(
      {2, 5}, DType::f64, std::vector<double>{nan, nan, nan, nan, nan, nan, 1.0, nan, 2.0, nan});
  const Route r(2, 5, 3, DType::f64);
  run(r.op(logits));
  CHECK(r.topk.ints() == std::vector<std::int64_t>{0, 1, 2, 3, 1, 0});
}

TEST_CASE("Router: replay of a choice gives the bits of the first run, and obeys another choice") {
  CpuRunner run;
  const Tensor logits = normal({30, 20}, DType::f32, 7), bias = normal({20}, DType::f32, 8, 0.1);
  const Route first(30, 20, 4, DType::f32), again(30, 20, 4, DType::f32);
  run(first.op(logits, bias));
  run(again.op(logits, bias, first.topk));
  CHECK(same_bits(first.topk, again.topk));
  CHECK(same_bits(first.weights, again.weights));
  CHECK(same_bits(first.cutoff, again.cutoff));
  CHECK(same_bits(first.counts, again.counts));

  Tensor other = moe_test::filled({30, 4}, DType::i32, 0);
  for (std::int64_t i = 0; i < 120; ++i)
    other.set(i, static_cast<double>(19 - i % 4));
  run(again.op(logits, bias, other));
  CHECK(same_bits(again.topk, other));
  CHECK(again.counts.at(19) == 30);
  CHECK(again.counts.at(0) == 0);
  other.set(7, 20);
  CHECK_THROWS_AS(run(again.op(logits, bias, other)), InternalError);
}

TEST_CASE("Router: experts in another order give the same weights") {
  CpuRunner run;
  const std::int64_t tokens = 12, experts = 40, k = 5;
  const Tensor logits = normal({tokens, experts}, DType::f32, 9);
  Tensor permuted({tokens, experts}, DType::f32);
  const auto moved = [](std::int64_t e) { return (e * 7 + 3) % 40; };
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t e = 0; e < experts; ++e)
      permuted.set(t * experts + moved(e), logits.at(t * experts + e));
  }
  const Route a(tokens, experts, k, DType::f32), b(tokens, experts, k, DType::f32);
  run(a.op(logits));
  run(b.op(permuted));
  CHECK(same_bits(a.weights, b.weights));
  for (std::int64_t i = 0; i < tokens * k; ++i)
    REQUIRE(b.topk.at(i) == static_cast<double>(moved(static_cast<std::int64_t>(a.topk.at(i)))));
}

TEST_CASE("Router: all tokens to the same experts; no token at all") {
  CpuRunner run;
  Tensor logits = normal({25, 6}, DType::f64, 10);
  const Tensor bias({6}, DType::f64, std::vector<double>{0, 9, 0, 0, 8, 0});
  const Route r(25, 6, 2, DType::f64);
  run(r.op(logits, bias));
  CHECK(r.counts.ints() == std::vector<std::int64_t>{0, 25, 0, 0, 25, 0});
  const Route none(0, 6, 2, DType::f64);
  run(none.op(Tensor({0, 6}, DType::f64), bias));
  CHECK(none.counts.ints() == std::vector<std::int64_t>(6, 0));
}

TEST_CASE("Router: the number of threads does not change a bit") {
  const Tensor logits = normal({333, 61}, DType::f32, 11), bias = normal({61}, DType::f32, 12);
  const Route a(333, 61, 8, DType::f32), b(333, 61, 8, DType::f32);
  CpuRunner(1)(a.op(logits, bias));
  CpuRunner(3)(b.op(logits, bias));
  CHECK(same_bits(a.scores, b.scores));
  CHECK(same_bits(a.topk, b.topk));
  CHECK(same_bits(a.weights, b.weights));
  CHECK(same_bits(a.cutoff, b.cutoff));
  CHECK(same_bits(a.counts, b.counts));
}

TEST_CASE("Router: impossible arguments are refused") {
  CpuRunner run;
  const Tensor logits = normal({4, 6}, DType::f64, 13);
  const Route r(4, 6, 3, DType::f64);
  auto op = r.op(logits);
  op.num_groups = 3;
  op.topk_groups = 1;
  CHECK_THROWS_AS(run(op), InternalError);  // a cutoff, and two experts for three choices
  op.cutoff = {};
  CHECK_THROWS_AS(run(op), InternalError);
  const Route too_many(4, 6, 7, DType::f64);
  CHECK_THROWS_AS(run(too_many.op(logits)), InternalError);
  const Tensor bias = normal({6}, DType::f32, 14);
  CHECK_THROWS_AS(run(r.op(logits, bias)), InternalError);
}

TEST_CASE("Capacity: the largest weights or the first tokens survive") {
  CpuRunner run(2);
  const std::int64_t tokens = 60, experts = 5, k = 2;
  const Tensor logits = normal({tokens, experts}, DType::f32, 15);
  const Route r(tokens, experts, k, DType::f32);
  run(r.op(logits));
  for (std::int64_t i = 0; i < tokens * k; ++i)
    r.weights.set(i, std::round(r.weights.at(i) * 20) / 20);  // ties
  for (const auto policy : {DropPolicy::prob, DropPolicy::position}) {
    for (const std::int64_t capacity : {0, 1, 13, 24, 60}) {
      const Tensor kept({tokens, k}, DType::u8);
      run(ExpertCapacity{.kept = kept,
                         .topk = r.topk,
                         .weights = r.weights,
                         .num_experts = experts,
                         .capacity = capacity,
                         .policy = policy});
      for (std::int64_t e = 0; e < experts; ++e) {
        std::vector<std::int64_t> mine;
        for (std::int64_t a = 0; a < tokens * k; ++a) {
          if (r.topk.at(a) == static_cast<double>(e)) mine.push_back(a);
        }
        if (policy == DropPolicy::prob) {
          std::stable_sort(mine.begin(), mine.end(), [&](std::int64_t a, std::int64_t b) {
            return r.weights.at(a) > r.weights.at(b);
          });
        }
        for (std::size_t i = 0; i < mine.size(); ++i)
          REQUIRE(kept.at(mine[i]) == (static_cast<std::int64_t>(i) < capacity ? 1 : 0));
      }
    }
  }
}

}  // namespace moesaic
