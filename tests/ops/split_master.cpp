// Ops on masters that are split into weight and remainder leave the bits that they leave on f32 masters.
#include "core/base/split_float.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/initial_values.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/qk_clip.h"
#include "tests/ops/moe_support.h"

namespace moesaic {
namespace {

using moe_test::copy_of;
using moe_test::CpuRunner;
using moe_test::normal;
using moe_test::same_bits;
using moe_test::Tensor;

struct Split {
  explicit Split(const Tensor& master)
      : weight(master.view().shape(), DType::bf16), remainder(master.view().shape(), DType::u16) {
    for (std::int64_t i = 0; i < master.view().numel(); ++i)
      split_float(master.view().as<float>()[i],
                  weight.view().as<bf16>()[i],
                  remainder.view().as<std::uint16_t>()[i]);
  }
  Tensor joined() const {
    Tensor t(weight.view().shape(), DType::f32);
    for (std::int64_t i = 0; i < t.view().numel(); ++i)
      t.view().as<float>()[i] =
          join_float(weight.view().as<bf16>()[i], remainder.view().as<std::uint16_t>()[i]);
    return t;
  }
  Tensor weight, remainder;
};

// The joined master, and the weight as the rounding of it.
void check_same(const Split& split, const Tensor& master) {
  CHECK(same_bits(split.joined(), master));
  CHECK(same_bits(split.weight, Split(master).weight));
}

Tensor scalars_of(const StepScalars& s) {
  const Tensor t({kNumStepScalars}, DType::f32);
  s.write(t);
  return t;
}

}  // namespace

TEST_CASE("split masters: AdamW over several steps, with threads, tails and skips") {
  for (const std::int64_t n : {1, 7, 1023, 1024, 40001}) {
    for (const DType gradient : {DType::f32, DType::bf16}) {
      CpuRunner one(1), three(3);
      const Tensor w = normal({n}, DType::f32, 1, 0.05), m = normal({n}, DType::f32, 2, 0.1);
      const Tensor v = moe_test::filled({n}, DType::f32, 0.01), m2 = copy_of(m), v2 = copy_of(v);
      const Split split(w);
      for (int t = 1; t <= 4; ++t) {
        INFO(n << " elements, gradient " << name(gradient) << ", step " << t);
        const Tensor dw = normal({n}, gradient, 10 + static_cast<std::uint64_t>(t), 2.0);
        const Tensor scalars = scalars_of({.learning_rate = 1e-3 * t,
                                           .weight_decay_scale = 0.5,
                                           .bias_correction1 = bias_correction(0.9, t),
                                           .bias_correction2 = bias_correction(0.95, t),
                                           .clip_factor = 0.4,
                                           .skip = t == 3 ? 1.0 : 0.0});
        const Tensor before = split.joined();
        one(AdamW{.w = w, .m = m, .v = v, .dw = dw, .scalars = scalars, .weight_decay = 0.1});
        three(AdamW{.m = m2,
                    .v = v2,
                    .w_compute = split.weight,
                    .remainder = split.remainder,
                    .dw = dw,
                    .scalars = scalars,
                    .weight_decay = 0.1});
        check_same(split, w);
        CHECK(same_bits(m, m2));
        CHECK(same_bits(v, v2));
        CHECK(same_bits(split.joined(), before) == (t == 3));
      }
    }
  }
}

TEST_CASE("split masters: small updates add up that a bf16 weight alone would lose") {
  CpuRunner run;
  const Tensor ones = moe_test::filled({3}, DType::f32, 1.0),
               m = moe_test::filled({3}, DType::f32, 0), v = moe_test::filled({3}, DType::f32, 0),
               dw = moe_test::filled({3}, DType::f32, 1.0);
  const Split split(ones);
  for (int t = 1; t <= 100; ++t) {
    run(AdamW{.m = m,
              .v = v,
              .w_compute = split.weight,
              .remainder = split.remainder,
              .dw = dw,
              .scalars = scalars_of({.learning_rate = 1e-4,
                                     .bias_correction1 = bias_correction(0.9, t),
                                     .bias_correction2 = bias_correction(0.95, t)})});
  }
  CHECK(split.joined().at(0) == Approx(0.99).epsilon(1e-5));
  CHECK(split.weight.at(0) == Approx(0.99).epsilon(0.004));
  CHECK(split.weight.at(0) < 1.0);
}

TEST_CASE(
    "split masters: Muon over several steps, in both orientations, by blocks and by members") {
  struct Case {
    Shape shape;
    std::vector<RowBlock> blocks;
  };
  for (const Case& c : {Case{{6, 9}, {}},
                        Case{{3, 40, 24}, {}},
                        Case{{150, 131}, {}},
                        Case{{2, 48, 20}, head_row_blocks(3, {16})},
                        Case{{48, 20}, {{0, 10}, {10, 48}}}}) {
    for (const DType gradient : {DType::f32, DType::bf16}) {
      CpuRunner one(1), three(3);
      const Tensor w = normal(c.shape, DType::f32, 21, 0.05), m = normal(c.shape, DType::f32, 22),
                   m2 = copy_of(m);
      const Split split(w);
      for (int t = 0; t < 3; ++t) {
        INFO(to_string(c.shape) << ", gradient " << name(gradient) << ", step " << t);
        const Tensor dw = normal(c.shape, gradient, 30 + static_cast<std::uint64_t>(t));
        const Tensor scalars = scalars_of({.learning_rate = 0.02,
                                           .weight_decay_scale = 0.5,
                                           .clip_factor = 0.75,
                                           .skip = t == 1 ? 1.0 : 0.0});
        const Tensor before = split.joined();
        one(MuonUpdate{.w = w,
                       .momentum = m,
                       .dw = dw,
                       .scalars = scalars,
                       .blocks = c.blocks,
                       .weight_decay = 0.1});
        three(MuonUpdate{.momentum = m2,
                         .w_compute = split.weight,
                         .remainder = split.remainder,
                         .dw = dw,
                         .scalars = scalars,
                         .blocks = c.blocks,
                         .weight_decay = 0.1});
        check_same(split, w);
        CHECK(same_bits(m, m2));
        CHECK(same_bits(split.joined(), before) == (t == 1));
      }
    }
  }
}

TEST_CASE("split masters: QK-clip, the moving average and initial values") {
  CpuRunner run(2);
  const Tensor q = normal({4 * 24, 33}, DType::f32, 41), kv = normal({4 * 32, 17}, DType::f32, 42),
               largest({4}, DType::f32, std::vector<double>{50, 130, 400, NAN});
  const Split split_q(q), split_kv(kv);
  const auto clip = [&](const Tensor& q_weight, const Tensor& kv_weight) {
    return QkClip{.q_weight = q_weight,
                  .kv_b_weight = kv_weight,
                  .max_logit = largest,
                  .dn = 16,
                  .dr = 8,
                  .dv = 16,
                  .tau = 100.0};
  };
  run(clip(q, kv));
  auto op = clip(split_q.weight, split_kv.weight);
  op.q_remainder = split_q.remainder;
  op.kv_b_remainder = split_kv.remainder;
  run(op);
  check_same(split_q, q);
  check_same(split_kv, kv);

  for (const std::int64_t n : {1, 1500, 9001}) {
    const Tensor w = normal({n}, DType::f32, 43), average = normal({n}, DType::f32, 44),
                 average2 = copy_of(average);
    const Split split(w);
    for (int t = 0; t < 3; ++t) {
      run(MovingAverage{.average = average, .w = w, .decay = 0.99});
      run(MovingAverage{
          .average = average2, .w = split.weight, .remainder = split.remainder, .decay = 0.99});
    }
    CHECK(same_bits(average, average2));
    check_same(split, w);
  }

  const Tensor y({5000}, DType::f32);
  const Split drawn(y);
  run(InitialValues{.y = y, .a = 0.02, .key = 7});
  run(InitialValues{.y = drawn.weight, .remainder = drawn.remainder, .a = 0.02, .key = 7});
  check_same(drawn, y);
}

TEST_CASE("split masters: a master beside the pair, or half a pair, is refused") {
  CpuRunner run;
  const Tensor w = normal({8, 4}, DType::f32, 51), m = normal({8, 4}, DType::f32, 52),
               v = moe_test::filled({8, 4}, DType::f32, 1), dw = normal({8, 4}, DType::f32, 53),
               scalars = scalars_of({}), other({4, 8}, DType::u16);
  const Split split(w);
  const AdamW adamw{.m = m,
                    .v = v,
                    .w_compute = split.weight,
                    .remainder = split.remainder,
                    .dw = dw,
                    .scalars = scalars};
  auto wrong = adamw;
  wrong.w = w;
  CHECK_THROWS_AS(run(wrong), InternalError);
  wrong = adamw;
  wrong.w_compute = {};
  CHECK_THROWS_AS(run(wrong), InternalError);
  wrong = adamw;
  wrong.remainder = other;
  CHECK_THROWS_AS(run(wrong), InternalError);
  wrong = adamw;
  wrong.w_compute = w;
  CHECK_THROWS_AS(run(wrong), InternalError);
  CHECK_THROWS_AS(run(MuonUpdate{.w = w,
                                 .momentum = m,
                                 .w_compute = split.weight,
                                 .remainder = split.remainder,
                                 .dw = dw,
                                 .scalars = scalars}),
                  InternalError);
  CHECK_THROWS_AS(run(MovingAverage{.average = m, .w = w, .remainder = split.remainder}),
                  InternalError);
}

}  // namespace moesaic
