// The experts' ops on some of the experts at a time: the bits of one call, whatever lies in the rows of others.
#include <algorithm>

#include "kernels/ops/grouped_gemm.h"
#include "kernels/ops/grouped_glu.h"
#include "kernels/ops/permute.h"
#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {

constexpr std::int64_t kBound = 330, kN = 24, kK = 40, kWidth = 20, kSlots = 9;
// None, some rows, one, none, more than a block of them, few, one, none; then rows of nobody.
const std::vector<std::int32_t> kOffsets{0, 0, 30, 31, 31, 301, 320, 321, 321},
    kSlotOf{4, 0, 2, 8, 1, 5, 7, 3};
constexpr std::int64_t kExperts = 8;

struct Run {
  std::int64_t begin, end;
};

// Runs of `size` experts, the first ones first or, as in backward, the last ones.
std::vector<Run> runs_of(std::int64_t size, bool descending) {
  std::vector<Run> runs;
  for (std::int64_t begin = 0; begin < kExperts; begin += size)
    runs.push_back({begin, std::min(kExperts, begin + size)});
  if (descending) std::reverse(runs.begin(), runs.end());
  return runs;
}

// What an op of a run may read: rows of other experts are NaN.
TensorView only_rows(Rig& rig, const TensorView& all, const Run& run) {
  const TensorView part = rig.poisoned(all.shape(), all.dtype());
  const auto begin = kOffsets[static_cast<std::size_t>(run.begin)],
             end = kOffsets[static_cast<std::size_t>(run.end)];
  std::memcpy(
      part.rows(begin, end).data(), all.rows(begin, end).data(), all.rows(begin, end).bytes());
  return part;
}

struct Routed {
  TensorView offsets, slots;
  ConstTensorView offsets_of(const Run& run) const { return offsets.rows(run.begin, run.end + 1); }
  ConstTensorView slots_of(const Run& run) const { return slots.rows(run.begin, run.end); }
};

Routed routed(Rig& rig) {
  return {rig.ints(kOffsets), rig.ints(kSlotOf)};
}

TensorView copy_of(Rig& rig, const TensorView& from) {
  return rig.values(read(from), from.shape(), from.dtype());
}

// `make(results, run)` is an op of a run that writes into results[i], which start as `start`: all runs together leave what
// one call leaves.
template <class Make>
void check_runs(Rig& rig, const std::vector<TensorView>& start, const Make& make) {
  const auto copies = [&] {
    std::vector<TensorView> result;
    for (const TensorView& view : start)
      result.push_back(copy_of(rig, view));
    return result;
  };
  const auto one = copies();
  rig.run(make(one, Run{0, kExperts}));
  for (std::size_t i = 0; i < one.size(); ++i)
    CHECK(!same_bits(one[i], start[i]));
  for (const std::int64_t size : {1, 2, 3, 5}) {
    for (const bool descending : {false, true}) {
      INFO("runs of " << size << (descending ? ", descending" : ""));
      const auto several = copies();
      for (const Run& run : runs_of(size, descending))
        rig.run(make(several, run));
      for (std::size_t i = 0; i < one.size(); ++i)
        CHECK(same_bits(several[i], one[i]));
    }
  }
}

const std::pair<DType, DType> kTypes[] = {{DType::f64, DType::f64},
                                          {DType::f32, DType::f32},
                                          {DType::bf16, DType::bf16},
                                          {DType::bf16, DType::f32}};
const GluActivation kActivations[] = {{.kind = GluKind::swiglu},
                                      {.kind = GluKind::situ, .beta1 = 4.0, .beta2 = 25.0}};

}  // namespace

TEST_CASE("runs of experts: products have the bits of one call") {
  Rig rig;
  const Routed r = routed(rig);
  for (const auto& [type, result] : kTypes) {
    INFO(name(type) << " to " << name(result));
    const TensorView x = rig.random({kBound, kK}, type, 1), dy = rig.random({kBound, kN}, type, 2),
                     w = rig.random({kSlots, kN, kK}, type, 3, 0.3);
    for (const bool accumulate : {false, true}) {
      check_runs(rig,
                 {rig.random({kBound, kN}, result, 4)},
                 [&](const std::vector<TensorView>& to, const Run& run) {
                   return GroupedLinearForward{.y = to[0],
                                               .x = only_rows(rig, x, run),
                                               .w = w,
                                               .offsets = r.offsets_of(run),
                                               .slot_of_expert = r.slots_of(run),
                                               .accumulate = accumulate};
                 });
      check_runs(rig,
                 {rig.random({kBound, kK}, result, 5)},
                 [&](const std::vector<TensorView>& to, const Run& run) {
                   return GroupedLinearBackwardInput{.dx = to[0],
                                                     .dy = only_rows(rig, dy, run),
                                                     .w = w,
                                                     .offsets = r.offsets_of(run),
                                                     .slot_of_expert = r.slots_of(run),
                                                     .accumulate = accumulate};
                 });
    }
    check_runs(rig,
               {rig.random({kSlots, kN, kK}, result, 6)},
               [&](const std::vector<TensorView>& to, const Run& run) {
                 return GroupedLinearBackwardWeight{.dw = to[0],
                                                    .dy = only_rows(rig, dy, run),
                                                    .x = only_rows(rig, x, run),
                                                    .offsets = r.offsets_of(run),
                                                    .slot_of_expert = r.slots_of(run)};
               });
  }
}

TEST_CASE("runs of experts: gated linear units have the bits of one call") {
  Rig rig;
  const Routed r = routed(rig);
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    const DType acc = type == DType::f64 ? DType::f64 : DType::f32;
    const TensorView x = rig.random({kBound, kK}, type, 1), dy = rig.random({kBound, kN}, type, 2),
                     up = rig.random({kSlots, 2 * kWidth, kK}, type, 3, 0.5),
                     down = rig.random({kSlots, kN, kWidth}, type, 4, 0.5),
                     gate_up = rig.random({kBound, 2 * kWidth}, type, 5, 2.0),
                     weight = rig.random({kBound}, acc, 6);
    const TensorView narrow = rig.random({kBound, kWidth}, type, 7),
                     wide = rig.random({kBound, 2 * kWidth}, type, 8),
                     sums = rig.random({kBound}, acc, 9);
    for (const auto& activation : kActivations) {
      for (const bool keep : {true, false}) {
        std::vector<TensorView> start{narrow};
        if (keep) start.push_back(wide);
        check_runs(rig, start, [&](const std::vector<TensorView>& to, const Run& run) {
          return GroupedGluForward{.h = to[0],
                                   .gate_up = keep ? to[1] : TensorView(),
                                   .x = only_rows(rig, x, run),
                                   .w = up,
                                   .offsets = r.offsets_of(run),
                                   .slot_of_expert = r.slots_of(run),
                                   .activation = activation};
        });
        check_runs(
            rig, {wide, narrow, sums}, [&](const std::vector<TensorView>& to, const Run& run) {
              return GroupedGluBackward{.dgate_up = to[0],
                                        .drow_weight = to[2],
                                        .h = to[1],
                                        .dy = only_rows(rig, dy, run),
                                        .w = down,
                                        .gate_up = only_rows(rig, gate_up, run),
                                        .row_weight = only_rows(rig, weight, run),
                                        .offsets = r.offsets_of(run),
                                        .slot_of_expert = r.slots_of(run),
                                        .activation = activation,
                                        .weight_h = keep};
            });
      }
    }
  }
}

TEST_CASE("gated linear units: rows before the first and from the last on are not touched") {
  Rig rig;
  const TensorView in = rig.random({8, 2 * kWidth}, DType::f32, 1),
                   dh = rig.random({8, kWidth}, DType::f32, 2),
                   all = rig.poisoned({8, kWidth}, DType::f32),
                   dall = rig.poisoned({8, 2 * kWidth}, DType::f32),
                   h = rig.poisoned({8, kWidth}, DType::f32),
                   d = rig.poisoned({8, 2 * kWidth}, DType::f32),
                   nothing = rig.poisoned({8, 2 * kWidth}, DType::f32);
  rig.run(GluForward{.h = all, .gate_up = in});
  rig.run(GluBackward{.dgate_up = dall, .dh = dh, .gate_up = in});
  const TensorView first = rig.ints({3}), count = rig.ints({6});
  rig.run(GluForward{.h = h, .gate_up = in, .row_count = count, .first_row = first});
  rig.run(
      GluBackward{.dgate_up = d, .dh = dh, .gate_up = in, .row_count = count, .first_row = first});
  CHECK(same_bits(h.rows(3, 6), all.rows(3, 6)));
  CHECK(same_bits(d.rows(3, 6), dall.rows(3, 6)));
  for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 3}, {6, 8}}) {
    CHECK(same_bits(d.rows(begin, end), nothing.rows(begin, end)));
    CHECK(std::memcmp(h.rows(begin, end).data(), nothing.data(), h.rows(begin, end).bytes()) == 0);
  }
  CHECK_THROWS_AS(
      rig.run(GluForward{.h = h, .gate_up = in, .row_count = count, .first_row = rig.ints({7})}),
      InternalError);
  CHECK_THROWS_AS(rig.run(GluForward{.h = h, .gate_up = in, .first_row = rig.ints({-1})}),
                  InternalError);
}

}  // namespace moesaic::test
