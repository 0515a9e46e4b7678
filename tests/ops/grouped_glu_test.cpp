#include "kernels/ops/grouped_glu.h"

#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/permute.h"
#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {

constexpr std::int64_t kBound = 90, kUsed = 70, kK = 24, kWidth = 20, kSlots = 5;

struct Experts {
  TensorView x, dy, up, down, gate_up, weight, offsets, slots;
};

// Some rows, none, one, many; rows beyond the last expert's are not used.
Experts experts(Rig& rig, DType type) {
  const DType acc = type == DType::f64 ? DType::f64 : DType::f32;
  return {.x = rig.random({kBound, kK}, type, 1),
          .dy = rig.random({kBound, kK}, type, 2),
          .up = rig.random({kSlots, 2 * kWidth, kK}, type, 3, 0.5),
          .down = rig.random({kSlots, kK, kWidth}, type, 4, 0.5),
          .gate_up = rig.random({kBound, 2 * kWidth}, type, 5, 2.0),
          .weight = rig.random({kBound}, acc, 6),
          .offsets = rig.ints({0, 9, 9, 10, kUsed}),
          .slots = rig.ints({3, 0, 1, 4})};
}

GroupedGluForward forward_of(const Experts& e, const TensorView& h, const GluActivation& act) {
  return {.h = h,
          .x = e.x,
          .w = e.up,
          .offsets = e.offsets,
          .slot_of_expert = e.slots,
          .activation = act};
}

const GluActivation kActivations[] = {{.kind = GluKind::swiglu},
                                      {.kind = GluKind::situ, .beta1 = 4.0, .beta2 = 25.0}};

}  // namespace

TEST_CASE("grouped GLU has the bits of product and activation one after the other") {
  Rig rig;
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto& act : kActivations) {
      const Experts e = experts(rig, type);
      const TensorView middle = rig.poisoned({kBound, 2 * kWidth}, type),
                       want = rig.poisoned({kBound, kWidth}, type);
      rig.run(GroupedLinearForward{
          .y = middle, .x = e.x, .w = e.up, .offsets = e.offsets, .slot_of_expert = e.slots});
      rig.run(GluForward{
          .h = want, .gate_up = middle, .row_count = rows_in_use(e.offsets), .activation = act});
      for (const bool keep : {true, false}) {
        const TensorView h = rig.poisoned(want.shape(), type),
                         gate_up = rig.poisoned(middle.shape(), type);
        auto op = forward_of(e, h, act);
        if (keep) op.gate_up = gate_up;
        rig.run(op);
        CHECK(same_bits(h, want));
        if (keep) CHECK(same_bits(gate_up, middle));
      }
    }
  }
}

TEST_CASE("grouped GLU backward has the bits of product and activation one after the other") {
  Rig rig;
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    for (const auto& act : kActivations) {
      const Experts e = experts(rig, type);
      const Shape wide{kBound, 2 * kWidth}, narrow{kBound, kWidth};
      const TensorView r = rig.poisoned(narrow, type), dwide = rig.poisoned(wide, type),
                       weighted = rig.poisoned(narrow, type),
                       sums = rig.poisoned({kBound}, e.weight.dtype());
      rig.run(GroupedLinearBackwardInput{
          .dx = r, .dy = e.dy, .w = e.down, .offsets = e.offsets, .slot_of_expert = e.slots});
      rig.run(GluBackward{.dgate_up = dwide,
                          .drow_weight = sums,
                          .h = weighted,
                          .dh = r,
                          .gate_up = e.gate_up,
                          .row_weight = e.weight,
                          .row_count = rows_in_use(e.offsets),
                          .activation = act,
                          .weight_h = true});
      const TensorView dgate_up = rig.poisoned(wide, type), h = rig.poisoned(narrow, type),
                       dweight = rig.poisoned({kBound}, e.weight.dtype());
      GroupedGluBackward op{.dgate_up = dgate_up,
                            .drow_weight = dweight,
                            .h = h,
                            .dy = e.dy,
                            .w = e.down,
                            .gate_up = e.gate_up,
                            .row_weight = e.weight,
                            .offsets = e.offsets,
                            .slot_of_expert = e.slots,
                            .activation = act,
                            .weight_h = true};
      rig.run(op);
      CHECK(same_bits(dgate_up, dwide));
      CHECK(same_bits(h, weighted));
      CHECK(same_bits(dweight, sums));
      op.dgate_up = rig.values(read(e.gate_up), wide, type);
      op.gate_up = op.dgate_up;
      rig.run(op);
      CHECK(same_bits(op.dgate_up.rows(0, kUsed), dwide.rows(0, kUsed)));
    }
  }
}

TEST_CASE("grouped GLU refuses shapes and types that do not fit") {
  Rig rig;
  const Experts e = experts(rig, DType::f32);
  const auto forward = [&](Shape shape, DType type) {
    return forward_of(e, rig.zeros(shape, type), kActivations[0]);
  };
  CHECK_THROWS_AS(rig.run(forward({kBound, kWidth + 1}, DType::f32)), InternalError);
  CHECK_THROWS_AS(rig.run(forward({kBound - 1, kWidth}, DType::f32)), InternalError);
  CHECK_THROWS_AS(rig.run(forward({kBound, kWidth}, DType::f64)), InternalError);
  auto op = forward({kBound, kWidth}, DType::f32);
  op.gate_up = rig.zeros({kBound, kWidth}, DType::f32);
  CHECK_THROWS_AS(rig.run(op), InternalError);
  op.gate_up = {};
  op.offsets = rig.ints({0, 9, 9, 10, kBound + 1});
  CHECK_THROWS_AS(rig.run(op), InternalError);
}

}  // namespace moesaic::test
