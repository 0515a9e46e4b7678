#include <algorithm>

#include "kernels/ops/permute.h"
#include "tests/ops/moe_support.h"

namespace moesaic {
namespace {

using moe_test::CpuRunner;
using moe_test::normal;
using moe_test::Tensor;

struct Plan {
  Plan(std::int64_t tokens, std::int64_t k, std::int64_t experts, std::int64_t rows)
      : offsets({experts + 1}, DType::i32),
        row_of_assignment({tokens, k}, DType::i32),
        token_of_row({rows}, DType::i32) {}
  DispatchPlan op(const Tensor& topk, ConstTensorView kept = {}) const {
    return {.offsets = offsets,
            .row_of_assignment = row_of_assignment,
            .token_of_row = token_of_row,
            .topk = topk,
            .kept = kept};
  }
  std::int64_t rows_in_use() const {
    return static_cast<std::int64_t>(offsets.at(offsets.view().dim(0) - 1));
  }
  Tensor offsets, row_of_assignment, token_of_row;
};

/// k different experts per token.
Tensor random_choice(std::int64_t tokens, std::int64_t k, std::int64_t experts, std::uint64_t key) {
  Tensor topk({tokens, k}, DType::i32);
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<std::int64_t> left;
    for (std::int64_t e = 0; e < experts; ++e)
      left.push_back(e);
    for (std::int64_t j = 0; j < k; ++j) {
      const auto pick = static_cast<std::size_t>(
          uniform(key, static_cast<std::uint64_t>(t * k + j)) * static_cast<double>(left.size()));
      topk.set(t * k + j, static_cast<double>(left[pick]));
      left.erase(left.begin() + static_cast<std::ptrdiff_t>(pick));
    }
  }
  return topk;
}

Tensor random_kept(std::int64_t tokens, std::int64_t k, std::uint64_t key) {
  Tensor kept({tokens, k}, DType::u8);
  for (std::int64_t a = 0; a < tokens * k; ++a)
    kept.set(a, uniform(key, static_cast<std::uint64_t>(a)) < 0.7 ? 1 : 0);
  return kept;
}

}  // namespace

TEST_CASE("Dispatch plan: rows by expert, tokens in order, each assignment once") {
  CpuRunner run;
  const std::int64_t tokens = 37, k = 3, experts = 9, rows = tokens * k + 5;
  Tensor topk = random_choice(tokens, k, experts, 31);
  for (std::int64_t a = 0; a < tokens * k; ++a) {
    if (topk.at(a) == 4) topk.set(a, 9);  // expert 4 gets nothing
  }
  for (std::int64_t a = 0; a < tokens * k; ++a)
    topk.set(a, std::min(topk.at(a), 8.0));
  const Tensor kept = random_kept(tokens, k, 32);
  for (const bool with_kept : {false, true}) {
    const Plan plan(tokens, k, experts, rows);
    run(plan.op(topk, with_kept ? kept.view() : TensorView()));
    std::vector<std::int64_t> offsets{0}, token_of_row,
        row_of(static_cast<std::size_t>(tokens * k), -1);
    for (std::int64_t e = 0; e < experts; ++e) {
      for (std::int64_t a = 0; a < tokens * k; ++a) {
        if (topk.at(a) != static_cast<double>(e) || (with_kept && kept.at(a) == 0)) continue;
        row_of[static_cast<std::size_t>(a)] = static_cast<std::int64_t>(token_of_row.size());
        token_of_row.push_back(a / k);
      }
      offsets.push_back(static_cast<std::int64_t>(token_of_row.size()));
    }
    token_of_row.resize(static_cast<std::size_t>(rows), -1);
    CHECK(plan.offsets.ints() == offsets);
    CHECK(plan.token_of_row.ints() == token_of_row);
    CHECK(plan.row_of_assignment.ints() == row_of);
  }
}

TEST_CASE("Dispatch plan: one token, no token, everything dropped, a number that is no expert") {
  CpuRunner run;
  const Plan single(1, 2, 4, 2);
  run(single.op(Tensor({1, 2}, DType::i32, std::vector<int>{3, 1})));
  CHECK(single.offsets.ints() == std::vector<std::int64_t>{0, 0, 1, 1, 2});
  CHECK(single.row_of_assignment.ints() == std::vector<std::int64_t>{1, 0});

  const Plan none(0, 2, 4, 3);
  run(none.op(Tensor({0, 2}, DType::i32)));
  CHECK(none.offsets.ints() == std::vector<std::int64_t>(5, 0));
  CHECK(none.token_of_row.ints() == std::vector<std::int64_t>(3, -1));

  const Plan dropped(1, 2, 4, 2);
  run(dropped.op(Tensor({1, 2}, DType::i32, std::vector<int>{3, 1}),
                 moe_test::filled({1, 2}, DType::u8, 0)));
  CHECK(dropped.rows_in_use() == 0);
  const Tensor u({1, 3}, DType::f32), y({2, 3}, DType::f32);
  run(combine_rows(u, y, normal({1, 2}, DType::f32, 1), dropped.row_of_assignment));
  CHECK(u.values() ==
        std::vector<double>(3, 0.0));  // y holds NaN: rows that are not in use are not read

  CHECK_THROWS_AS(run(single.op(Tensor({1, 2}, DType::i32, std::vector<int>{4, 1}))),
                  InternalError);
  CHECK_THROWS_AS(
      run(Plan(2, 2, 4, 3).op(Tensor({2, 2}, DType::i32, std::vector<int>{0, 1, 2, 3}))),
      InternalError);
}

TEST_CASE("Dispatch plan: no choice, tokens beyond a count, more assignments than rows") {
  CpuRunner run;
  const Tensor topk(
      {3, 2}, DType::i32, std::vector<int>{1, -1, 0, 1, 7, 7});  // the last token is no one's
  const Tensor count({1}, DType::i32, std::vector<int>{2}), overflow({1}, DType::i32);
  const Plan plan(3, 2, 2, 4);
  DispatchPlan op = plan.op(topk);
  op.token_count = count;
  run(op);
  CHECK(plan.offsets.ints() == std::vector<std::int64_t>{0, 1, 3});
  CHECK(plan.row_of_assignment.ints() == std::vector<std::int64_t>{1, -1, 0, 2, -1, -1});
  CHECK(plan.token_of_row.ints() == std::vector<std::int64_t>{1, 0, 1, -1});
  op.overflow = overflow;
  run(op);
  CHECK(overflow.at(0) == 0);

  const Plan small(3, 2, 2, 2);
  op = small.op(topk);
  op.token_count = count;
  CHECK_THROWS_AS(run(op), InternalError);
  op.overflow = overflow;
  run(op);
  CHECK(overflow.at(0) == 1);
  CHECK(small.offsets.ints() == std::vector<std::int64_t>{0, 1, 2});
  CHECK(small.row_of_assignment.ints() == std::vector<std::int64_t>{1, -1, 0, -1, -1, -1});
  CHECK(small.token_of_row.ints() == std::vector<std::int64_t>{1, 0});

  // Sums of the tokens within the count only; the others stay as they are.
  const Tensor y = normal({2, 3}, DType::f32, 5), u({3, 3}, DType::f32);
  CombineRows sums = dispatch_rows_backward(u, y, small.row_of_assignment);
  sums.token_count = count;
  run(sums);
  for (std::int64_t c = 0; c < 3; ++c) {
    CHECK(u.at(c) == y.at(3 + c));
    CHECK(u.at(3 + c) == y.at(c));
    CHECK(std::isnan(u.at(6 + c)));
  }
  // Without a number of rows all are gathered.
  const Tensor xs({2, 3}, DType::f32);
  run(GatherRows{.y = xs,
                 .x = y,
                 .token_of_row = Tensor({2}, DType::i32, std::vector<int>{1, 0}),
                 .num_rows = {}});
  CHECK(xs.at(0) == y.at(3));
  CHECK(xs.at(3) == y.at(0));
}

TEST_CASE("Gather and combine against loops over tokens") {
  CpuRunner run(2);
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    const DType wide = type == DType::f64 ? DType::f64 : DType::f32;
    const std::int64_t tokens = 29, k = 4, experts = 6, rows = tokens * k + 3, width = 301;
    const Tensor topk = random_choice(tokens, k, experts, 33), kept = random_kept(tokens, k, 34);
    const Plan plan(tokens, k, experts, rows);
    run(plan.op(topk, kept));
    const Tensor x = normal({tokens, width}, type, 35), xs({rows, width}, type);
    run(dispatch_rows(xs, x, plan.token_of_row, plan.offsets));
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < width; c += 50) {
        if (r < plan.rows_in_use()) {
          REQUIRE(xs.at(r * width + c) ==
                  x.at(static_cast<std::int64_t>(plan.token_of_row.at(r)) * width + c));
        } else {
          REQUIRE(std::isnan(xs.at(r * width + c)));  // left as it was
        }
      }
    }
    const Tensor weights = normal({tokens, k}, wide, 36),
                 before = normal({tokens, width}, type, 37);
    for (const bool weighted : {true, false}) {
      for (const bool accumulate : {false, true}) {
        for (const DType out : {type, wide}) {
          const Tensor u(before.view().shape(), out, before.values());
          auto op = weighted ? combine_rows(u, xs, weights, plan.row_of_assignment)
                             : dispatch_rows_backward(u, xs, plan.row_of_assignment);
          op.accumulate = accumulate;
          run(op);
          std::vector<double> want(static_cast<std::size_t>(tokens * width), 0.0);
          for (std::int64_t a = 0; a < tokens * k; ++a) {
            const auto row = static_cast<std::int64_t>(plan.row_of_assignment.at(a));
            for (std::int64_t c = 0; row >= 0 && c < width; ++c) {
              want[static_cast<std::size_t>(a / k * width + c)] +=
                  (weighted ? weights.at(a) : 1.0) * xs.at(row * width + c);
            }
          }
          for (std::size_t i = 0; accumulate && i < want.size(); ++i)
            want[i] += before.at(static_cast<std::int64_t>(i));
          const double limit = out == DType::f64 ? 1e-15 : out == DType::f32 ? 2e-7 : 3e-3;
          REQUIRE(moe_test::relative_error(u.values(), want) < limit);
        }
      }
    }
  }
}

TEST_CASE("Gather and its backward are transposes, and so are the row weights") {
  CpuRunner run;
  const std::int64_t tokens = 21, k = 3, experts = 8, rows = tokens * k, width = 10;
  const Tensor kept = random_kept(tokens, k, 41);
  const Plan plan(tokens, k, experts, rows);
  run(plan.op(random_choice(tokens, k, experts, 40), kept));
  const std::int64_t used = plan.rows_in_use();
  const auto dot = [](const Tensor& a, const Tensor& b, std::int64_t n) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i)
      sum += a.at(i) * b.at(i);
    return sum;
  };
  const Tensor x = normal({tokens, width}, DType::f64, 42),
               dxs = normal({rows, width}, DType::f64, 43);
  const Tensor xs({rows, width}, DType::f64), dx({tokens, width}, DType::f64);
  run(dispatch_rows(xs, x, plan.token_of_row, plan.offsets));
  run(dispatch_rows_backward(dx, dxs, plan.row_of_assignment));
  CHECK(dot(xs, dxs, used * width) == Approx(dot(x, dx, tokens * width)).epsilon(1e-13));

  const Tensor w = normal({tokens, k}, DType::f64, 44), drow = normal({rows}, DType::f64, 45),
               row({rows}, DType::f64), dw({tokens, k}, DType::f64);
  run(RowWeightForward{
      .row_weight = row, .weights = w, .row_of_assignment = plan.row_of_assignment});
  run(RowWeightBackward{
      .dweights = dw, .drow_weight = drow, .row_of_assignment = plan.row_of_assignment});
  CHECK(dot(row, drow, used) == Approx(dot(w, dw, tokens * k)).epsilon(1e-13));
  for (std::int64_t a = 0; a < tokens * k; ++a) {
    if (kept.at(a) == 0) REQUIRE(dw.at(a) == 0);
  }
}

TEST_CASE("Combine: neither the order of the experts nor the number of threads changes a bit") {
  const std::int64_t tokens = 50, k = 5, experts = 16, rows = tokens * k, width = 33;
  const Tensor topk = random_choice(tokens, k, experts, 46),
               x = normal({tokens, width}, DType::f32, 47);
  const Tensor weights = normal({tokens, k}, DType::f32, 48);
  const auto combined = [&](int threads, const Tensor& choice) {
    CpuRunner run(threads);
    const Plan plan(tokens, k, experts, rows);
    run(plan.op(choice));
    const Tensor xs({rows, width}, DType::f32), u({tokens, width}, DType::f32);
    run(dispatch_rows(xs, x, plan.token_of_row, plan.offsets));
    run(combine_rows(u, xs, weights, plan.row_of_assignment));
    return u;
  };
  Tensor other = copy_of(topk);
  for (std::int64_t a = 0; a < tokens * k; ++a)
    other.set(a, static_cast<double>((static_cast<std::int64_t>(topk.at(a)) * 5 + 2) % experts));
  const Tensor u = combined(1, topk);
  CHECK(same_bits(u, combined(3, topk)));
  CHECK(same_bits(u, combined(1, other)));
}

}  // namespace moesaic
