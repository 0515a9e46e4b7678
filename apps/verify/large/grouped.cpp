// Grouped linear layers: experts with no row, with one, around multiples of 16 and of 64; slots that nobody uses; rows
// beyond the last expert's.
#include <numeric>

#include <fmt/format.h>

#include "apps/verify/case_run.h"
#include "apps/verify/large/case_builder.h"
#include "kernels/ops/grouped_gemm.h"

namespace moesaic::verify {
namespace {

void run_grouped(CaseRun& run) {
  const TensorView x = run.load("in.x"), w = run.load("w.w"), dy = run.load("cot.y"),
                   offsets = run.load_i32("in.offsets"), slots = run.load_i32("in.slots");
  const std::int64_t used = run.host_ints("in.offsets").back();
  const DType compute = run.precision().compute;
  // What the op must not touch is not compared: y's rows beyond the last expert's hold NaN.
  const TensorView y = run.poisoned(dy.shape(), compute),
                   wide = run.poisoned(dy.shape(), run.precision().stats);
  moesaic::run(run.backend(), GroupedLinearForward{y, x, w, offsets, slots});
  moesaic::run(run.backend(), GroupedLinearForward{wide, x, w, offsets, slots});
  run.expect("out.y", y.rows(0, used));
  run.expect("out.wide", wide.rows(0, used));
  const TensorView dx = run.poisoned(x.shape(), compute),
                   sum = run.upload(run.host_reals("in.dx"), x.shape(), run.precision().stats);
  moesaic::run(run.backend(), GroupedLinearBackwardInput{dx, dy, w, offsets, slots});
  moesaic::run(run.backend(), GroupedLinearBackwardInput{sum, dy, w, offsets, slots, true});
  run.expect("grad.in.x", dx.rows(0, used));
  run.expect("aux.sum", sum);
  const TensorView dw = run.zeros(w.shape(), run.precision().grad);
  moesaic::run(run.backend(), GroupedLinearBackwardWeight{dw, dy, x, offsets, slots});
  run.expect("grad.w.w", dw);
}

const RegisterFamily family{{"grouped__", run_grouped}};

void grouped(CaseBuilder& b,
             const std::vector<std::int64_t>& rows,
             std::int64_t n,
             std::int64_t k) {
  constexpr std::int64_t kSpareRows = 9, kSpareSlots = 2;
  const auto experts = static_cast<std::int64_t>(rows.size());
  std::vector<std::int64_t> offsets{0}, slots;
  for (std::int64_t e = 0; e < experts; ++e) {
    offsets.push_back(offsets.back() + rows[static_cast<std::size_t>(e)]);
    slots.push_back((experts - 1 - e + kSpareSlots) % (experts + kSpareSlots));
  }
  const std::int64_t bound = offsets.back() + kSpareRows;
  b.ints("in.offsets", {experts + 1}, offsets);
  b.ints("in.slots", {experts}, slots);
  b.normal("in.x", {bound, k});
  b.normal("in.dx", {bound, k});
  b.normal("w.w", {experts + kSpareSlots, n, k}, 0.1);
  b.normal("cot.y", {bound, n});
  b.accuracy(std::max({n, k, bound}), 2);
  for (const char* op : {"forward", "backward_input", "backward_weight"})
    b.expect_path(std::string("grouped_linear_") + op, "tiled");
}

}  // namespace

void add_grouped_cases(LargeCases& cases) {
  const auto add =
      [&](const std::string& name, std::vector<std::int64_t> rows, std::int64_t n, std::int64_t k) {
        cases.push_back({"grouped__" + name, [=](CaseBuilder& b) { grouped(b, rows, n, k); }});
      };
  add("large_uneven", {0, 1, 15, 16, 17, 127, 0, 33}, 192, 128);
  add("large_one_expert", {257}, 256, 192);
  add("large_tails", {63, 64, 65, 0, 129, 2}, 200, 136);
  add("large_many_small", {3, 0, 1, 7, 2, 0, 0, 5, 1, 1, 4, 16, 0, 2, 31, 9}, 128, 256);
}

}  // namespace moesaic::verify
