#include "kernels/ops/vocab_block.h"

#include <limits>

#include "kernels/ops/head_linear.h"
#include "kernels/ops/vocab_loss.h"
#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {

constexpr DType kD = DType::f64;
constexpr std::int64_t kRows = 9, kVocabulary = 24;

// What a cross-entropy gives; per-row and per-word results are poisoned before.
struct Results {
  Results(Rig& rig, std::int64_t rows, DType type, DType gradient)
      : loss(rig.zeros({1}, type)),
        z(rig.zeros({1}, type)),
        logp(rig.poisoned({rows}, type)),
        dlogits(rig.poisoned({rows, kVocabulary}, gradient)) {}
  TensorView loss, z, logp, dlogits;
};

struct Operands {
  TensorView logits, targets, weight, divisor;
  double z_coef = 0.0, grad_scale = 1.0;
};

Results whole(Rig& rig, const Operands& in, DType gradient) {
  Results out(rig, in.logits.dim(0), in.logits.dtype(), gradient);
  rig.run(CrossEntropy{.loss_sum = out.loss,
                       .z_sum = out.z,
                       .logp = out.logp,
                       .dlogits = out.dlogits,
                       .logits = in.logits,
                       .targets = in.targets,
                       .weight = in.weight,
                       .divisor = in.divisor,
                       .z_coef = in.z_coef,
                       .grad_scale = in.grad_scale});
  return out;
}

void copy_words(
    Rig& rig, TensorView to, std::int64_t at, ConstTensorView from, std::int64_t begin) {
  const std::int64_t rows = to.dim(0);
  rig.run(CopyHeadColumns{.y = {to.reshaped({rows, 1, to.dim(1)}), at},
                          .x = {from.reshaped({rows, 1, from.dim(1)}), begin},
                          .n = std::min(to.dim(1), from.dim(1))});
}

// The same by `blocks` ranks: accumulators go from one to the next, logp is added up.
Results in_blocks(
    Rig& rig, const Operands& in, std::int64_t blocks, DType gradient, bool in_place = false) {
  const std::int64_t rows = in.logits.dim(0), words = kVocabulary / blocks;
  const DType type = in.logits.dtype();
  Results out(rig, rows, type, gradient);
  const TensorView sums = rig.poisoned({blocks, rows, 2}, type);
  std::vector<TensorView> logits;
  for (std::int64_t b = 0; b < blocks; ++b) {
    logits.push_back(rig.zeros({rows, words}, type));
    copy_words(rig, logits.back(), 0, in.logits, b * words);
    rig.run(VocabBlockSums{.sums = sums.rows(b, b + 1).reshaped({rows, 2}), .logits = logits[b]});
  }
  std::vector<double> logp(static_cast<std::size_t>(rows));
  for (std::int64_t b = 0; b < blocks; ++b) {
    const TensorView d = in_place ? logits[b] : rig.poisoned({rows, words}, gradient),
                     own_logp = rig.poisoned({rows}, type);
    rig.run(VocabBlockCrossEntropy{.loss_sum = out.loss,
                                   .z_sum = out.z,
                                   .logp = own_logp,
                                   .dlogits = d,
                                   .logits = logits[b],
                                   .sums = sums,
                                   .targets = in.targets,
                                   .weight = in.weight,
                                   .divisor = in.divisor,
                                   .block = b,
                                   .z_coef = in.z_coef,
                                   .grad_scale = in.grad_scale});
    copy_words(rig, out.dlogits, b * words, d, 0);
    const auto part = read(own_logp);
    for (std::size_t r = 0; r < logp.size(); ++r)
      logp[r] += part[r];
  }
  out.logp = rig.values(logp, {rows}, type);
  return out;
}

// Ignored rows, a row of weight 0, and targets at the first and last word of blocks of 12, 8, 6 and 4.
Operands operands(Rig& rig, DType type) {
  return {.logits = rig.random({kRows, kVocabulary}, type, 1, 2.0),
          .targets = rig.ints({0, 7, kIgnoredTarget, 8, 11, 12, 23, 5, 18}),
          .weight = rig.values({1, 0.5, 2, 1, 0, 0.25, 1, 3, 1}, {kRows}, type),
          .divisor = rig.values({4.0}, {1}, type),
          .z_coef = 0.1,
          .grad_scale = 3.0};
}

void check_same(const Results& a, const Results& b, double relative, double gradient) {
  const auto largest = [](const TensorView& v) {
    double most = 0;
    for (const double x : read(v))
      most = std::max(most, std::abs(x));
    return most;
  };
  CHECK(distance(read(a.loss), read(b.loss)) <= relative * largest(b.loss));
  CHECK(distance(read(a.z), read(b.z)) <= relative * largest(b.z));
  CHECK(distance(read(a.logp), read(b.logp)) <= relative * largest(b.logp));
  CHECK(distance(read(a.dlogits), read(b.dlogits)) <= gradient * largest(b.dlogits));
}

}  // namespace

TEST_CASE("cross-entropy in blocks of words: what the whole gives, at every number of blocks") {
  Rig rig;
  for (const std::int64_t blocks : {1, 2, 3, 4, 6, 24}) {
    INFO(blocks << " blocks");
    for (const bool in_place : {false, true}) {
      const Operands in = operands(rig, kD);
      check_same(in_blocks(rig, in, blocks, kD, in_place), whole(rig, in, kD), 1e-15, 1e-15);
    }
    const Operands in = operands(rig, DType::f32);
    check_same(in_blocks(rig, in, blocks, DType::f32), whole(rig, in, DType::f32), 1e-6, 1e-6);
    check_same(in_blocks(rig, in, blocks, DType::bf16), whole(rig, in, DType::bf16), 1e-6, 0.005);
  }
  Operands plain = operands(rig, kD);
  plain.weight = {};
  check_same(in_blocks(rig, plain, 3, kD), whole(rig, plain, kD), 1e-15, 1e-15);
}

TEST_CASE("cross-entropy in blocks of words: gradient by central differences") {
  Rig rig;
  const Operands in = operands(rig, kD);
  const Results r = in_blocks(rig, in, 3, kD);
  check_gradient(in.logits, r.dlogits, [&] {
    const Results at = in_blocks(rig, in, 3, kD);
    return in.grad_scale * (read(at.loss)[0] + in.z_coef * read(at.z)[0]) / 4.0;
  });
  CHECK(read(r.dlogits.rows(2, 3)) == std::vector<double>(kVocabulary, 0.0));  // ignored
  CHECK(read(r.dlogits.rows(4, 5)) == std::vector<double>(kVocabulary, 0.0));  // weight 0
  CHECK(read(r.logp)[2] == 0.0);
  CHECK(read(r.logp)[4] < 0.0);
}

TEST_CASE("cross-entropy in blocks of words: extreme logits, in one block or another") {
  Rig rig;
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const DType type : {kD, DType::f32}) {
    Operands in = operands(rig, type);
    in.weight = {};
    in.z_coef = 0;
    std::vector<double> x = read(in.logits);
    const auto row = [&](std::size_t r, auto&& value) {
      for (std::size_t v = 0; v < kVocabulary; ++v)
        x[r * kVocabulary + v] = value(v);
    };
    row(0, [](std::size_t v) { return v == 0 ? 1e4 : -1e4; });
    row(1, [](std::size_t v) { return v == 7 ? -1e4 : 1e4; });
    row(3, [](std::size_t v) { return v < 12 ? 1.0 : -kInfinity; });  // whole blocks out
    row(4, [](std::size_t v) { return v == 11 ? 3e38 : -3e38; });
    row(5, [](std::size_t v) { return v % 5 == 2 ? 88.0 : -88.0 + static_cast<double>(v); });
    row(6, [](std::size_t v) { return v == 23 ? 0.0 : -kInfinity; });
    in.logits = rig.values(x, {kRows, kVocabulary}, type);
    const double tolerance = type == kD ? 1e-15 : 1e-6;
    for (const std::int64_t blocks : {2, 4, 24}) {
      const Results r = in_blocks(rig, in, blocks, type);
      check_same(r, whole(rig, in, type), tolerance, tolerance);
      CHECK(read(r.logp)[6] == 0.0);
    }
    // What has no log-sum-exp has none in blocks either.
    row(0, [](std::size_t) { return -kInfinity; });
    row(1, [](std::size_t v) { return v == 20 ? std::nan("") : 1.0; });
    row(3, [](std::size_t v) { return v == 2 ? kInfinity : 1.0; });
    in.logits = rig.values(x, {kRows, kVocabulary}, type);
    const Results r = in_blocks(rig, in, 4, type);
    for (const std::size_t bad : {0, 1, 3}) {
      CHECK(std::isnan(read(r.logp)[bad]));
      for (std::size_t v = 0; v < kVocabulary; ++v)
        CHECK(std::isnan(read(r.dlogits)[bad * kVocabulary + v]));
    }
    CHECK(std::isfinite(read(r.logp)[5]));
  }
}

TEST_CASE("cross-entropy in blocks of words: targets outside the whole vocabulary are refused") {
  Rig rig;
  const TensorView logits = rig.random({1, 3}, kD, 1), sums = rig.zeros({2, 1, 2}, kD),
                   loss = rig.zeros({1}, kD);
  const auto with_target = [&](std::int32_t target) {
    rig.run(VocabBlockCrossEntropy{.loss_sum = loss,
                                   .logits = logits,
                                   .sums = sums,
                                   .targets = rig.ints({target}),
                                   .block = 1});
  };
  CHECK_NOTHROW(with_target(5));
  CHECK_THROWS_AS(with_target(6), InternalError);
  CHECK_THROWS_AS(with_target(-1), InternalError);
  CHECK_THROWS_AS(
      rig.run(VocabBlockCrossEntropy{
          .loss_sum = loss, .logits = logits, .sums = sums, .targets = rig.ints({0}), .block = 2}),
      InternalError);
}

TEST_CASE("cross-entropy in blocks of words: a sum over a whole vocabulary keeps its digits") {
  Rig rig;
  constexpr std::int64_t kWords = 163840;
  const TensorView x = rig.random({2, kWords}, DType::f32, 1), wide = rig.zeros({2, kWords}, kD);
  for (std::int64_t i = 0; i < x.numel(); ++i) {  // a few words that outweigh the others by far
    if (i % 97 == 5) x.as<float>()[i] = 12.0F;
    wide.as<double>()[i] = static_cast<double>(x.as<float>()[i]);
  }
  const TensorView got = rig.zeros({2, 2}, DType::f32), want = rig.zeros({2, 2}, kD);
  rig.run(VocabBlockSums{.sums = got, .logits = x});
  rig.run(VocabBlockSums{.sums = want, .logits = wide});
  for (std::int64_t i = 0; i < 4; ++i)
    CHECK(std::abs(got.as<float>()[i] / want.as<double>()[i] - 1) <= 3e-6);
}

TEST_CASE("cross-entropy in blocks of words: same bits on any number of threads") {
  check_threads([](Rig& rig) {
    constexpr std::int64_t kMany = 200, kWide = 517;
    const TensorView x = rig.random({kMany, kWide}, DType::f32, 1);
    std::vector<std::int32_t> t(kMany);
    for (std::size_t i = 0; i < t.size(); ++i)
      t[i] = static_cast<std::int32_t>(i * 7 % kWide);
    const TensorView sums = rig.zeros({1, kMany, 2}, DType::f32), loss = rig.zeros({1}, DType::f32),
                     d = rig.zeros(x.shape(), DType::f32);
    rig.run(VocabBlockSums{.sums = sums.reshaped({kMany, 2}), .logits = x});
    rig.run(VocabBlockCrossEntropy{.loss_sum = loss,
                                   .dlogits = d,
                                   .logits = x,
                                   .sums = sums,
                                   .targets = rig.ints(t),
                                   .divisor = rig.values({200.0}, {1}, DType::f32)});
    return std::vector<TensorView>{sums, loss, d};
  });
}

}  // namespace moesaic::test
