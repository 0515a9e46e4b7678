#include "kernels/ops/grouped_gemm.h"

#include "kernels/ops/gemm.h"
#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {

constexpr std::int64_t kBound = 300, kN = 24, kK = 40, kSlots = 6;

struct Routed {
  TensorView x, dy, w, offsets, slots;
  std::vector<std::int32_t> off, slot;
};

// Five experts: some rows, none, one, more than a tile, few; rows beyond the last are not used.
Routed routed(Rig& rig, DType type) {
  Routed r;
  r.off = {0, 30, 30, 31, 181, 200};
  r.slot = {4, 0, 2, 1, 5};
  r.x = rig.random({kBound, kK}, type, 1);
  r.dy = rig.random({kBound, kN}, type, 2);
  r.w = rig.random({kSlots, kN, kK}, type, 3, 0.3);
  r.offsets = rig.ints(r.off);
  r.slots = rig.ints(r.slot);
  return r;
}

TensorView slot_matrix(const TensorView& w, std::int32_t slot) {
  return w.rows(slot, slot + 1).reshaped({w.dim(1), w.dim(2)});
}

}  // namespace

TEST_CASE("grouped linear equals one linear layer per expert, bit for bit in the forward pass") {
  Rig rig;
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    const Routed r = routed(rig, type);
    const TensorView y = rig.poisoned({kBound, kN}, type), dx = rig.poisoned({kBound, kK}, type);
    rig.run(GroupedLinearForward{
        .y = y, .x = r.x, .w = r.w, .offsets = r.offsets, .slot_of_expert = r.slots});
    rig.run(GroupedLinearBackwardInput{
        .dx = dx, .dy = r.dy, .w = r.w, .offsets = r.offsets, .slot_of_expert = r.slots});
    for (std::size_t e = 0; e < r.slot.size(); ++e) {
      const std::int64_t begin = r.off[e], end = r.off[e + 1];
      if (begin == end) continue;
      const TensorView want = rig.poisoned({end - begin, kN}, type),
                       want_dx = rig.poisoned({end - begin, kK}, type);
      rig.run(linear_forward(want, r.x.rows(begin, end), slot_matrix(r.w, r.slot[e])));
      rig.run(linear_backward_input(want_dx, r.dy.rows(begin, end), slot_matrix(r.w, r.slot[e])));
      CHECK(same_bits(y.rows(begin, end), want));
      CHECK(same_bits(dx.rows(begin, end), want_dx));
    }
    const TensorView untouched_y = rig.poisoned({100, kN}, type),
                     untouched_x = rig.poisoned({100, kK}, type);
    CHECK(same_bits(y.rows(200, 300), untouched_y));
    CHECK(same_bits(dx.rows(200, 300), untouched_x));
  }
}

TEST_CASE("grouped weight gradient: an expert's rows in several calls give the bits of one") {
  Rig rig;
  constexpr std::int64_t rows = 700, n = 7, k = 45;  // several blocks, ragged tiles
  const std::vector<std::int32_t> slots{1, 0};
  for (const auto& [type, grad] :
       {std::pair{DType::f64, DType::f64}, {DType::f32, DType::f32}, {DType::bf16, DType::f32}}) {
    const TensorView dy = rig.random({rows, n}, type, 1), x = rig.random({rows, k}, type, 2),
                     start = rig.random({2, n, k}, grad, 3);
    const auto sum = [&](const std::vector<std::int32_t>& cuts) {
      const TensorView dw = rig.values(read(start), {2, n, k}, grad);
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const std::int32_t part = cuts[i + 1] - cuts[i];
        rig.run(GroupedLinearBackwardWeight{.dw = dw,
                                            .dy = dy.rows(cuts[i], cuts[i + 1]),
                                            .x = x.rows(cuts[i], cuts[i + 1]),
                                            .offsets = rig.ints({0, part, part}),
                                            .slot_of_expert = rig.ints(slots)});
      }
      return dw;
    };
    const TensorView one = sum({0, 700});
    CHECK(same_bits(sum({0, 1, 2, 18, 257, 300, 699, 700}), one));
    CHECK(same_bits(sum({0, 512, 700}), one));
    CHECK(!same_bits(slot_matrix(one, 1), slot_matrix(start, 1)));
  }
}

TEST_CASE(
    "grouped weight gradient accumulates; experts without rows and other slots keep their bits") {
  Rig rig;
  for (const auto& [type, grad] : {std::pair{DType::f64, DType::f64},
                                   {DType::f32, DType::f32},
                                   {DType::bf16, DType::f32},
                                   {DType::bf16, DType::bf16}}) {
    const Routed r = routed(rig, type);
    const TensorView start = rig.random({kSlots, kN, kK}, grad, 7),
                     dw = rig.values(read(start), {kSlots, kN, kK}, grad);
    rig.run(GroupedLinearBackwardWeight{
        .dw = dw, .dy = r.dy, .x = r.x, .offsets = r.offsets, .slot_of_expert = r.slots});
    CHECK(same_bits(slot_matrix(dw, 0), slot_matrix(start, 0)));
    CHECK(same_bits(slot_matrix(dw, 3), slot_matrix(start, 3)));
    const auto x = read(r.x), dy = read(r.dy);
    for (std::size_t e = 0; e < r.slot.size(); ++e) {
      auto want = read(slot_matrix(start, r.slot[e]));
      for (std::int32_t t = r.off[e]; t < r.off[e + 1]; ++t) {
        for (std::int64_t i = 0; i < kN * kK; ++i) {
          want[static_cast<std::size_t>(i)] += dy[static_cast<std::size_t>(t * kN + i / kK)] *
                                               x[static_cast<std::size_t>(t * kK + i % kK)];
        }
      }
      const double unit = grad == DType::bf16 ? 0x1p-8 : grad == DType::f64 ? 1e-15 : 1e-6;
      CHECK(distance(read(slot_matrix(dw, r.slot[e])), want) <= 50 * unit);
    }
  }
}

TEST_CASE("grouped linear: an expert's row keeps its bits whatever rows surround it") {
  Rig rig;
  const Routed r = routed(rig, DType::f32);
  const TensorView y = rig.poisoned({kBound, kN}, DType::f32),
                   alone = rig.poisoned({1, kN}, DType::f32);
  rig.run(GroupedLinearForward{
      .y = y, .x = r.x, .w = r.w, .offsets = r.offsets, .slot_of_expert = r.slots});
  for (const std::int64_t t : {0, 29, 31, 100, 180}) {
    const std::int32_t slot = t < 30 ? 4 : 1;
    rig.run(GroupedLinearForward{.y = alone,
                                 .x = r.x.rows(t, t + 1),
                                 .w = r.w,
                                 .offsets = rig.ints({0, 1}),
                                 .slot_of_expert = rig.ints({slot})});
    CHECK(same_bits(alone, y.rows(t, t + 1)));
  }
}

TEST_CASE("grouped linear: same bits on any number of threads; bad routing fails the stream") {
  for (const DType type : {DType::f32, DType::bf16}) {
    check_threads([&](Rig& rig) {
      const Routed r = routed(rig, type);
      const TensorView y = rig.zeros({kBound, kN}, type), dx = rig.zeros({kBound, kK}, type),
                       dw = rig.zeros({kSlots, kN, kK}, DType::f32);
      rig.run(GroupedLinearForward{
          .y = y, .x = r.x, .w = r.w, .offsets = r.offsets, .slot_of_expert = r.slots});
      rig.run(GroupedLinearBackwardInput{
          .dx = dx, .dy = r.dy, .w = r.w, .offsets = r.offsets, .slot_of_expert = r.slots});
      rig.run(GroupedLinearBackwardWeight{
          .dw = dw, .dy = r.dy, .x = r.x, .offsets = r.offsets, .slot_of_expert = r.slots});
      return std::vector<TensorView>{y, dx, dw};
    });
  }
  Rig rig;
  const Routed r = routed(rig, DType::f32);
  const TensorView y = rig.zeros({kBound, kN}, DType::f32);
  GroupedLinearForward op{.y = y,
                          .x = r.x,
                          .w = r.w,
                          .offsets = r.offsets,
                          .slot_of_expert = rig.ints({4, 0, 6, 1, 5})};
  CHECK_THROWS_AS(rig.run(op), InternalError);
  op.slot_of_expert = r.slots;
  op.offsets = rig.ints({0, 30, 30, 31, 181, 301});
  CHECK_THROWS_AS(rig.run(op), InternalError);
}

}  // namespace moesaic::test
