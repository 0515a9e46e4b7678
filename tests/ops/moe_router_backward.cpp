#include "kernels/ops/router.h"
#include "tests/ops/moe_support.h"

namespace moesaic {
namespace {

using moe_test::CpuRunner;
using moe_test::normal;
using moe_test::one;
using moe_test::Tensor;

struct Case {
  RouterScore score = RouterScore::sigmoid;
  bool renormalize = true;
  std::int64_t k = 3;
  double sequence = 0, switched = 0, global = 0, z = 0;
};

constexpr std::int64_t kTokens = 23, kExperts = 7;

/// A router whose objective is <dweights, weights> + the auxiliary losses, with the choice held
/// fixed.
struct Router {
  explicit Router(const Case& which, DType t = DType::f64)
      : c(which),
        type(t),
        logits(normal({kTokens, kExperts}, t, 21)),
        bias(normal({kExperts}, t, 22, 0.2)),
        dweights(normal({kTokens, c.k}, t, 23)),
        cu({5}, DType::i32, std::vector<int>{0, 9, 9, 10, 23}),
        frequency(moe_test::filled({kExperts}, t, 0)),
        tokens(one(DType::i64, 40)),
        documents(one(DType::f64, 6)),
        scores({kTokens, kExperts}, t),
        topk({kTokens, c.k}, DType::i32),
        weights({kTokens, c.k}, t),
        counts({kExperts}, DType::i32) {
    for (std::int64_t e = 0; e < kExperts; ++e)
      frequency.set(e, static_cast<double>(e + 1) / 28.0);
  }
  RouterLosses losses() const {
    return {.sequence_weight = c.sequence,
            .switch_weight = c.switched,
            .global_weight = c.global,
            .z_weight = c.z,
            .cu = cu,
            .frequency = frequency,
            .tokens = tokens,
            .documents = documents};
  }
  void forward(CpuRunner& run, ConstTensorView given = {}) const {
    run(RouterForward{.scores = scores,
                      .topk = topk,
                      .weights = weights,
                      .cutoff = {},
                      .counts = counts,
                      .logits = logits,
                      .bias = bias,
                      .given = given,
                      .score = c.score,
                      .renormalize = c.renormalize,
                      .route_scale = 1.7});
  }
  RouterLossForward loss_op(const Tensor& balance, const Tensor& z) const {
    return {.balance_loss = balance,
            .z_loss = z,
            .logits = logits,
            .scores = scores,
            .topk = topk,
            .losses = losses()};
  }
  RouterBackward backward_op(TensorView dlogits) const {
    return {.dlogits = dlogits,
            .dweights = dweights,
            .logits = logits,
            .scores = scores,
            .weights = weights,
            .topk = topk,
            .score = c.score,
            .renormalize = c.renormalize,
            .route_scale = 1.7,
            .losses = losses()};
  }
  double objective(CpuRunner& run, const Tensor& choice) const {
    forward(run, choice);
    const Tensor balance = one(type, 0), z = one(type, 0);
    run(loss_op(balance, z));
    double sum = balance.at(0) + z.at(0);
    for (std::int64_t i = 0; i < kTokens * c.k; ++i)
      sum += dweights.at(i) * weights.at(i);
    return sum;
  }
  Case c;
  DType type;
  Tensor logits, bias, dweights, cu, frequency, tokens, documents, scores, topk, weights, counts;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const auto score : {RouterScore::sigmoid, RouterScore::softmax}) {
    cases.push_back({.score = score});
    cases.push_back({.score = score, .renormalize = false});
    cases.push_back({.score = score, .k = 1});
    cases.push_back({.score = score, .sequence = 3.0});
    cases.push_back({.score = score, .switched = 5.0});
    cases.push_back({.score = score, .global = 7.0});
    cases.push_back({.score = score, .z = 2.0});
    cases.push_back({.score = score, .sequence = 3.0, .switched = 5.0, .global = 7.0, .z = 2.0});
  }
  return cases;
}

}  // namespace

TEST_CASE("Router backward: finite differences, all losses, both scores") {
  CpuRunner run;
  for (const Case& c : all_cases()) {
    const Router r(c);
    r.forward(run);
    const Tensor choice = copy_of(r.topk);
    const Tensor dlogits({kTokens, kExperts}, DType::f64);
    run(r.backward_op(dlogits));
    std::vector<double> want;
    const double h = 1e-5;
    for (std::int64_t i = 0; i < kTokens * kExperts; ++i) {
      const double x = r.logits.at(i);
      r.logits.set(i, x + h);
      const double up = r.objective(run, choice);
      r.logits.set(i, x - h);
      const double down = r.objective(run, choice);
      r.logits.set(i, x);
      want.push_back((up - down) / (2 * h));
    }
    INFO("softmax " << (c.score == RouterScore::softmax) << " renormalize " << c.renormalize
                    << " k " << c.k << " weights " << c.sequence << " " << c.switched << " "
                    << c.global << " " << c.z);
    CHECK(moe_test::relative_error(dlogits.values(), want) < 1e-8);
  }
}

TEST_CASE("Router backward: dlogits may take the place of the scores or of the logits") {
  CpuRunner run;
  for (const Case& c : all_cases()) {
    const Router r(c, DType::f32);
    r.forward(run);
    const Tensor apart({kTokens, kExperts}, DType::f32), scores = copy_of(r.scores);
    run(r.backward_op(apart));
    run(r.backward_op(r.scores));
    CHECK(same_bits(apart, r.scores));
    std::memcpy(r.scores.view().data(), scores.view().data(), scores.view().bytes());
    run(r.backward_op(r.logits));
    CHECK(same_bits(apart, r.logits));
  }
}

TEST_CASE("Router losses and gradients: f32 near f64, and threads do not change a bit") {
  const Case c{.sequence = 3.0, .switched = 5.0, .global = 7.0, .z = 2.0};
  CpuRunner single(1), several(3);
  const Router exact(c), a(c, DType::f32), b(c, DType::f32);
  const Tensor da({kTokens, kExperts}, DType::f32), db({kTokens, kExperts}, DType::f32),
      d64({kTokens, kExperts}, DType::f64);
  const Tensor la = one(DType::f32, 0), lb = one(DType::f32, 0), za = one(DType::f32, 0),
               zb = one(DType::f32, 0);
  exact.forward(single);
  single(exact.backward_op(d64));
  a.forward(single);
  single(a.loss_op(la, za));
  single(a.backward_op(da));
  b.forward(several);
  several(b.loss_op(lb, zb));
  several(b.backward_op(db));
  CHECK(same_bits(a.topk, exact.topk));
  CHECK(moe_test::relative_error(da.values(), d64.values()) < 2e-6);
  CHECK(same_bits(da, db));
  CHECK(same_bits(la, lb));
  CHECK(same_bits(za, zb));
}

TEST_CASE("Router losses: one at balance, and they accumulate over the parts of a step") {
  CpuRunner run;
  // Six tokens, three experts, each chosen twice; equal scores: every balance loss is its weight.
  const Tensor logits = moe_test::filled({6, 3}, DType::f64, 0.3);
  const Tensor scores = moe_test::filled({6, 3}, DType::f64, 0.5);
  const Tensor topk({6, 1}, DType::i32, std::vector<int>{0, 1, 2, 0, 1, 2});
  const Tensor cu({3}, DType::i32, std::vector<int>{0, 3, 6}),
      frequency = moe_test::filled({3}, DType::f64, 1.0 / 3);
  const Tensor tokens = one(DType::i32, 6), documents = one(DType::i32, 2);
  RouterLosses losses{.cu = cu, .frequency = frequency, .tokens = tokens, .documents = documents};
  const auto value = [&](double RouterLosses::*weight) {
    RouterLosses alone = losses;
    alone.*weight = 0.25;
    const Tensor balance = one(DType::f64, 1.0), z = one(DType::f64, 1.0);
    run(RouterLossForward{.balance_loss = balance,
                          .z_loss = z,
                          .logits = logits,
                          .scores = scores,
                          .topk = topk,
                          .losses = alone});
    return std::pair{balance.at(0) - 1.0, z.at(0) - 1.0};
  };
  for (const auto weight : {&RouterLosses::sequence_weight,
                            &RouterLosses::switch_weight,
                            &RouterLosses::global_weight}) {
    CHECK(value(weight).first == Approx(0.25).epsilon(1e-14));
    CHECK(value(weight).second == 0.0);
  }
  const double lse = 0.3 + std::log(3.0);
  CHECK(value(&RouterLosses::z_weight).second == Approx(0.25 * lse * lse).epsilon(1e-14));

  // The same tokens as two micro-batches of one step.
  const Router r({.global = 7.0, .z = 2.0});
  r.forward(run);
  const Tensor whole = one(DType::f64, 0), whole_z = one(DType::f64, 0), parts = one(DType::f64, 0),
               parts_z = one(DType::f64, 0);
  run(r.loss_op(whole, whole_z));
  for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 8}, {8, kTokens}}) {
    run(RouterLossForward{.balance_loss = parts,
                          .z_loss = parts_z,
                          .logits = r.logits.view().rows(begin, end),
                          .scores = r.scores.view().rows(begin, end),
                          .topk = r.topk.view().rows(begin, end),
                          .losses = r.losses()});
  }
  CHECK(parts.at(0) == Approx(whole.at(0)).epsilon(1e-14));
  CHECK(parts_z.at(0) == Approx(whole_z.at(0)).epsilon(1e-14));
}

TEST_CASE("Router losses: boundaries that do not cover the tokens are refused") {
  CpuRunner run;
  Router r({.sequence = 1.0});
  r.forward(run);
  r.cu.set(4, 22);
  CHECK_THROWS_AS(run(r.backward_op(Tensor({kTokens, kExperts}, DType::f64))), InternalError);
}

}  // namespace moesaic
