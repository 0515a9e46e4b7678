#include "kernels/ops/vocab_loss.h"
#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {
constexpr std::int64_t kRows = 6, kVocabulary = 13;
constexpr DType kD = DType::f64;
}  // namespace

TEST_CASE("cross-entropy: gradient with weights, ignored rows and z term by central differences") {
  Rig rig;
  const TensorView x = rig.random({kRows, kVocabulary}, kD, 1, 2.0),
                   w = rig.values({1, 0.5, 2, 1, 0, 0.25}, {kRows}, kD);
  const TensorView targets = rig.ints({3, 0, -100, 12, 5, 7}), divisor = rig.values({4.0}, {1}, kD);
  const double z_coef = 0.1, grad_scale = 3.0;
  const TensorView d = rig.poisoned(x.shape(), kD);
  const auto loss = [&] {
    const TensorView sum = rig.zeros({}, kD), z = rig.zeros({}, kD);
    rig.run(
        CrossEntropy{.loss_sum = sum, .z_sum = z, .logits = x, .targets = targets, .weight = w});
    return grad_scale * (read(sum)[0] + z_coef * read(z)[0]) / 4.0;
  };
  const TensorView sum = rig.zeros({}, kD), logp = rig.poisoned({kRows}, kD);
  rig.run(CrossEntropy{.loss_sum = sum,
                       .logp = logp,
                       .dlogits = d,
                       .logits = x,
                       .targets = targets,
                       .weight = w,
                       .divisor = divisor,
                       .z_coef = z_coef,
                       .grad_scale = grad_scale});
  check_gradient(x, d, loss);
  CHECK(read(d.rows(2, 3)) == std::vector<double>(kVocabulary, 0.0));  // ignored
  CHECK(read(d.rows(4, 5)) == std::vector<double>(kVocabulary, 0.0));  // weight 0
  CHECK(read(logp)[2] == 0.0);
  CHECK(-inner(logp, w) == Approx(read(sum)[0]));
}

TEST_CASE("cross-entropy: chunks add up to the whole, in place as well") {
  Rig rig;
  const TensorView x = rig.random({kRows, kVocabulary}, kD, 1),
                   targets = rig.ints({3, 0, -100, 12, 5, 7}), divisor = rig.values({5.0}, {1}, kD);
  const TensorView whole = rig.zeros({1}, kD), parts = rig.zeros({1}, kD),
                   d = rig.zeros(x.shape(), kD);
  rig.run(CrossEntropy{
      .loss_sum = whole, .dlogits = d, .logits = x, .targets = targets, .divisor = divisor});
  for (const std::int64_t begin : {0, 4}) {
    const std::int64_t end = begin == 0 ? 4 : kRows;
    rig.run(CrossEntropy{.loss_sum = parts,
                         .dlogits = x.rows(begin, end),
                         .logits = x.rows(begin, end),
                         .targets = targets.rows(begin, end),
                         .divisor = divisor});
  }
  CHECK(read(parts)[0] == Approx(read(whole)[0]).epsilon(1e-14));
  CHECK(same_bits(x, d));
}

TEST_CASE("cross-entropy: huge logits, bf16 gradients from f32 logits, bad targets") {
  Rig rig;
  const TensorView x = rig.values({1e4, -1e4, 0, 88, 89, 90}, {2, 3}, DType::f32),
                   d = rig.poisoned({2, 3}, DType::bf16), sum = rig.zeros({1}, DType::f32);
  const TensorView divisor = rig.values({2.0}, {1}, DType::f32);
  rig.run(CrossEntropy{
      .loss_sum = sum, .dlogits = d, .logits = x, .targets = rig.ints({1, 2}), .divisor = divisor});
  const double lse = 90 + std::log(1 + std::exp(-1.0) + std::exp(-2.0));
  CHECK(read(sum)[0] == Approx(2e4 + lse - 90).epsilon(1e-6));
  CHECK(read(d)[0] == 0.5);
  CHECK(read(d)[1] == -0.5);
  CHECK(read(d)[5] == Approx((std::exp(90 - lse) - 1) / 2).epsilon(0.005));
  CHECK_THROWS_AS(rig.run(CrossEntropy{.loss_sum = sum, .logits = x, .targets = rig.ints({1, 3})}),
                  InternalError);
}

TEST_CASE("divergences: gradients by central differences, zero between equals, masks") {
  Rig rig;
  const TensorView x = rig.random({kRows, kVocabulary}, kD, 1),
                   y = rig.random({kRows, kVocabulary}, kD, 2),
                   divisor = rig.values({2.0}, {1}, kD);
  const TensorView mask = rig.values({1, 0, 1, 0.5, 1, 1}, {kRows}, kD);
  for (const DivergenceKind kind :
       {DivergenceKind::forward_kl, DivergenceKind::reverse_kl, DivergenceKind::lk}) {
    const TensorView d = rig.poisoned(x.shape(), kD);
    const auto loss = [&] {
      const TensorView sum = rig.zeros({1}, kD);
      rig.run(
          VocabDivergence{.loss_sum = sum, .logits = x, .teacher = y, .mask = mask, .kind = kind});
      return read(sum)[0] / 2.0;
    };
    const TensorView sum = rig.zeros({1}, kD);
    rig.run(VocabDivergence{.loss_sum = sum,
                            .dlogits = d,
                            .logits = x,
                            .teacher = y,
                            .mask = mask,
                            .divisor = divisor,
                            .kind = kind});
    check_gradient(x, d, loss);
    CHECK(read(sum)[0] > 0);
    const TensorView same = rig.zeros({1}, kD);
    rig.run(VocabDivergence{.loss_sum = same, .logits = x, .teacher = x, .kind = kind});
    CHECK(std::abs(read(same)[0]) < 1e-14);
  }
}

TEST_CASE("vocabulary losses: same bits on any number of threads") {
  check_threads([](Rig& rig) {
    constexpr std::int64_t kMany = 200, kWide = 517;
    const TensorView x = rig.random({kMany, kWide}, DType::f32, 1),
                     y = rig.random({kMany, kWide}, DType::f32, 2);
    std::vector<std::int32_t> t(kMany);
    for (std::size_t i = 0; i < t.size(); ++i)
      t[i] = static_cast<std::int32_t>(i * 7 % kWide);
    const TensorView sum = rig.zeros({1}, DType::f32), sum2 = rig.zeros({1}, DType::f32),
                     divisor = rig.values({200.0}, {1}, DType::f32);
    const TensorView d = rig.zeros(x.shape(), DType::f32), d2 = rig.zeros(x.shape(), DType::f32);
    rig.run(CrossEntropy{
        .loss_sum = sum, .dlogits = d, .logits = x, .targets = rig.ints(t), .divisor = divisor});
    rig.run(VocabDivergence{
        .loss_sum = sum2, .dlogits = d2, .logits = x, .teacher = y, .divisor = divisor});
    return std::vector<TensorView>{sum, sum2, d, d2};
  });
}

}  // namespace moesaic::test
