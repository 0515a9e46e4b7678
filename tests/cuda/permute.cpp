#include "kernels/ops/permute.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

// Sums of k products in the CPU's order; it fuses multiply and add as the device does, but nothing
// says it must.
double tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-15 : dtype == DType::f32 ? 1e-6 : 1e-3;
}

enum class Choice { spread, skewed, one_expert, last_expert_only_once };

std::int32_t expert_of(Choice choice, std::int64_t a, std::int64_t experts) {
  const double u = uniform(21, static_cast<std::uint64_t>(a));
  const auto scaled = [&](double x) {
    return static_cast<std::int32_t>(x * static_cast<double>(experts));
  };
  switch (choice) {
    case Choice::spread:
      return scaled(u);
    case Choice::skewed:  // most experts empty
      return scaled(u * u * u * u * u * u);
    case Choice::one_expert:
      return static_cast<std::int32_t>(experts / 2);
    default:
      return static_cast<std::int32_t>(a == 5 ? experts - 1 : 0);
  }
}

void fill_topk(TensorView topk, Choice choice, std::int64_t experts) {
  for (std::int64_t a = 0; a < topk.numel(); ++a)
    topk.as<std::int32_t>()[a] = expert_of(choice, a, experts);
}

void check_plan(BothBackends& both,
                std::int64_t tokens,
                std::int64_t k,
                std::int64_t experts,
                std::int64_t spare_rows,
                Choice choice,
                bool with_kept) {
  INFO(tokens << " tokens, top " << k << " of " << experts << ", choice "
              << static_cast<int>(choice) << ", kept " << with_kept);
  const std::int64_t rows = tokens * k + spare_rows;
  const Twin topk({tokens, k}, DType::i32), kept({tokens, k}, DType::u8),
      offsets({experts + 1}, DType::i32), map({tokens, k}, DType::i32),
      token_of_row({rows}, DType::i32);
  fill_topk(topk.initial.view(), choice, experts);
  for (std::int64_t a = 0; a < tokens * k; ++a)
    kept.initial.data<std::uint8_t>()[a] = uniform(22, static_cast<std::uint64_t>(a)) < 0.7 ? 1 : 0;
  for (const Twin* t : {&offsets, &map, &token_of_row})
    std::memset(t->initial.view().data(), 0x5a, t->initial.view().bytes());
  require_cuda_matches_cpu(both,
                           {&topk, &kept, &offsets, &map, &token_of_row},
                           {{&offsets, 0}, {&map, 0}, {&token_of_row, 0}},
                           [&](auto side) {
                             return DispatchPlan{.offsets = side(offsets),
                                                 .row_of_assignment = side(map),
                                                 .token_of_row = side(token_of_row),
                                                 .topk = side(topk),
                                                 .kept = with_kept ? side(kept) : TensorView()};
                           });
}

// A plan made by the CPU, for the ops that move rows.
struct Plan {
  Plan(BothBackends& both, std::int64_t tokens, std::int64_t k, std::int64_t experts, bool drop)
      : topk({tokens, k}, DType::i32),
        kept({tokens, k}, DType::u8),
        offsets({experts + 1}, DType::i32),
        map({tokens, k}, DType::i32),
        token_of_row({tokens * k + 3}, DType::i32) {
    fill_topk(topk.initial.view(), Choice::skewed, experts);
    for (std::int64_t a = 0; a < tokens * k; ++a)
      kept.initial.data<std::uint8_t>()[a] =
          drop && uniform(23, static_cast<std::uint64_t>(a)) < 0.4 ? 0 : 1;
    run(both.cpu.backend(),
        DispatchPlan{.offsets = offsets.initial.view(),
                     .row_of_assignment = map.initial.view(),
                     .token_of_row = token_of_row.initial.view(),
                     .topk = topk.initial.view(),
                     .kept = kept.initial.view()});
  }
  std::int64_t tokens() const { return map.initial.view().dim(0); }
  std::int64_t rows() const { return token_of_row.initial.view().dim(0); }
  Twin topk, kept, offsets, map, token_of_row;
};

void check_rows(
    BothBackends& both, const Plan& plan, std::int64_t width, DType dtype, DType sum_dtype) {
  INFO(plan.tokens() << " tokens, " << plan.rows() << " rows of " << width << " " << name(dtype)
                     << ", sums " << name(sum_dtype));
  const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
  const Twin x({plan.tokens(), width}, dtype), xs({plan.rows(), width}, dtype),
      u({plan.tokens(), width}, sum_dtype), weights(plan.map.initial.view().shape(), wide);
  fill_normal(x.initial.view(), 1);
  fill_normal(xs.initial.view(), 2);
  fill_normal(u.initial.view(), 3);
  fill_normal(weights.initial.view(), 4);
  // Rows beyond those in use keep what they hold: NaN here, which no sum may meet.
  const std::int32_t used =
      plan.offsets.initial.data<std::int32_t>()[plan.offsets.initial.view().dim(0) - 1];
  const TensorView unused = xs.initial.view().rows(used, plan.rows());
  std::memset(unused.data(), 0xff, unused.bytes());
  require_cuda_matches_cpu(
      both, {&x, &xs, &plan.token_of_row, &plan.offsets}, {{&xs, 0}}, [&](auto side) {
        return dispatch_rows(side(xs), side(x), side(plan.token_of_row), side(plan.offsets));
      });
  for (const bool weighted : {false, true}) {
    for (const bool accumulate : {false, true}) {
      INFO("weighted " << weighted << ", accumulate " << accumulate);
      require_cuda_matches_cpu(
          both, {&u, &xs, &weights, &plan.map}, {{&u, tolerance(sum_dtype)}}, [&](auto side) {
            return CombineRows{.u = side(u),
                               .y = side(xs),
                               .weights = weighted ? side(weights) : TensorView(),
                               .row_of_assignment = side(plan.map),
                               .accumulate = accumulate};
          });
    }
  }
}

}  // namespace

TEST_CASE("DispatchPlan on CUDA is the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto choice :
       {Choice::spread, Choice::skewed, Choice::one_expert, Choice::last_expert_only_once}) {
    for (const bool kept : {false, true}) {
      check_plan(both, 1, 1, 1, 0, choice, kept);
      check_plan(both, 7, 3, 5, 4, choice, kept);
      check_plan(both, 256, 1, 33, 0, choice, kept);    // exactly one tile
      check_plan(both, 257, 2, 1500, 9, choice, kept);  // more experts than one scan round
      check_plan(both, 2048, 8, 256, 100, choice, kept);
    }
    check_plan(both, 8192, 16, 896, 1000, choice, false);
  }
  check_plan(both, 0, 4, 12, 0, Choice::spread, false);
  check_plan(both, 0, 4, 12, 5, Choice::spread, false);
  check_plan(both, 20000, 16, 896, 0, Choice::skewed, true);  // several tiles per segment
}

TEST_CASE("DispatchPlan on CUDA: no choices, a count of tokens, fewer rows than assignments",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t tokens : {0, 1, 40, 1000}) {
    const std::int64_t k = 6, experts = 24;
    const Twin topk({tokens, k}, DType::i32), offsets({experts + 1}, DType::i32),
        map({tokens, k}, DType::i32), count({1}, DType::i32), overflow({1}, DType::i32);
    fill_topk(topk.initial.view(), Choice::skewed, experts);
    for (std::int64_t a = 0; a < tokens * k; a += 3)
      topk.initial.data<std::int32_t>()[a] = -1;
    for (const std::int64_t used : {std::int64_t{0}, tokens / 2, tokens}) {
      *count.initial.data<std::int32_t>() = static_cast<std::int32_t>(used);
      for (const std::int64_t rows : {std::int64_t{1}, tokens, tokens * k + 7}) {
        INFO(tokens << " tokens, " << used << " count, " << rows << " rows");
        const Twin token_of_row({rows}, DType::i32);
        for (const Twin* t : {&offsets, &map, &token_of_row, &overflow})
          std::memset(t->initial.view().data(), 0x5a, t->initial.view().bytes());
        require_cuda_matches_cpu(both,
                                 {&topk, &offsets, &map, &token_of_row, &count, &overflow},
                                 {{&offsets, 0}, {&map, 0}, {&token_of_row, 0}, {&overflow, 0}},
                                 [&](auto side) {
                                   return DispatchPlan{.offsets = side(offsets),
                                                       .row_of_assignment = side(map),
                                                       .token_of_row = side(token_of_row),
                                                       .topk = side(topk),
                                                       .kept = {},
                                                       .token_count = side(count),
                                                       .overflow = side(overflow)};
                                 });
      }
    }
  }
}

TEST_CASE("Sums of a count of tokens, gathers of all rows, on CUDA as on the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Plan plan(both, 300, 5, 20, true);
  const std::int32_t used = plan.offsets.initial.data<std::int32_t>()[20];
  for (const std::int64_t width : {7, 264}) {
    const Twin u({300, width}, DType::bf16), xs({plan.rows(), width}, DType::bf16),
        count({1}, DType::i32);
    fill_normal(u.initial.view(), 1);
    fill_normal(xs.initial.view(), 2);
    *count.initial.data<std::int32_t>() = 123;
    require_cuda_matches_cpu(
        both, {&u, &xs, &plan.map, &count}, {{&u, tolerance(DType::bf16)}}, [&](auto side) {
          CombineRows op = dispatch_rows_backward(side(u), side(xs), side(plan.map));
          op.token_count = side(count);
          return op;
        });
    require_cuda_matches_cpu(both, {&u, &xs, &plan.token_of_row}, {{&xs, 0}}, [&](auto side) {
      return GatherRows{.y = side(xs).rows(0, used),
                        .x = side(u),
                        .token_of_row = side(plan.token_of_row).rows(0, used),
                        .num_rows = {}};
    });
  }
}

TEST_CASE("Rows go to their experts and back on CUDA as on the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Plan few(both, 9, 3, 4, true), one(both, 1, 1, 1, false), many(both, 700, 40, 60, true),
      none(both, 0, 2, 4, false);
  for (const Plan* plan : {&few, &one, &many, &none}) {
    for (const std::int64_t width : {1, 7, 64, 264}) {
      check_rows(both, *plan, width, DType::f64, DType::f64);
      check_rows(both, *plan, width, DType::f32, DType::f32);
      check_rows(both, *plan, width, DType::bf16, DType::bf16);
      check_rows(both, *plan, width, DType::bf16, DType::f32);
    }
  }
  const Plan large(both, 60, 16, 96, false);
  check_rows(both, large, 3584, DType::bf16, DType::bf16);
  check_rows(both, large, 9000, DType::bf16, DType::f32);  // more pieces than blocks in y
}

TEST_CASE("Rows that are not 16-byte aligned move on CUDA", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Plan plan(both, 50, 3, 4, true);
  const std::int64_t tokens = plan.tokens(), rows = plan.rows();
  const Twin x({tokens * 16 + 1, 1}, DType::bf16), xs({rows * 16 + 1, 1}, DType::bf16);
  fill_normal(x.initial.view(), 1);
  fill_normal(xs.initial.view(), 2);
  const auto shifted = [](TensorView v, std::int64_t n) {
    return v.rows(1, n * 16 + 1).reshaped({n, 16});
  };
  require_cuda_matches_cpu(
      both, {&x, &xs, &plan.token_of_row, &plan.offsets}, {{&xs, 0}}, [&](auto side) {
        return dispatch_rows(shifted(side(xs), rows),
                             shifted(side(x), tokens),
                             side(plan.token_of_row),
                             side(plan.offsets));
      });
  require_cuda_matches_cpu(
      both, {&x, &xs, &plan.map}, {{&x, tolerance(DType::bf16)}}, [&](auto side) {
        return dispatch_rows_backward(
            shifted(side(x), tokens), shifted(side(xs), rows), side(plan.map), true);
      });
}

TEST_CASE("Weights of rows on CUDA are the CPU's", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f64, DType::f32}) {
    for (const std::int64_t tokens : {0, 1, 333}) {
      INFO(name(dtype) << " " << tokens);
      const Plan plan(both, tokens, 5, 20, true);
      const Twin weights({tokens, 5}, dtype), row_weight({plan.rows()}, dtype);
      fill_normal(weights.initial.view(), 1);
      fill_normal(row_weight.initial.view(), 2);
      require_cuda_matches_cpu(
          both, {&weights, &row_weight, &plan.map}, {{&row_weight, 0}}, [&](auto side) {
            return RowWeightForward{.row_weight = side(row_weight),
                                    .weights = side(weights),
                                    .row_of_assignment = side(plan.map)};
          });
      require_cuda_matches_cpu(
          both, {&weights, &row_weight, &plan.map}, {{&weights, 0}}, [&](auto side) {
            return RowWeightBackward{.dweights = side(weights),
                                     .drow_weight = side(row_weight),
                                     .row_of_assignment = side(plan.map)};
          });
    }
  }
}

}  // namespace moesaic::test
