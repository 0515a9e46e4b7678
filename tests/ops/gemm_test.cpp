#include "kernels/ops/gemm.h"

#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {

struct Sizes {
  std::int64_t m, n, k;
};

// The product by its definition, in double.
std::vector<double> plain(const Gemm& op) {
  const auto a = read(op.a), b = read(op.b);
  std::vector<double> c =
      op.accumulate ? read(op.c) : std::vector<double>(static_cast<std::size_t>(op.m() * op.n()));
  for (std::int64_t i = 0; i < op.m(); ++i) {
    for (std::int64_t j = 0; j < op.n(); ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < op.k(); ++p) {
        sum += a[static_cast<std::size_t>(op.transpose_a ? p * op.m() + i : i * op.k() + p)] *
               b[static_cast<std::size_t>(op.transpose_b ? j * op.k() + p : p * op.n() + j)];
      }
      c[static_cast<std::size_t>(i * op.n() + j)] += op.alpha * sum;
    }
  }
  return c;
}

Gemm product(
    Rig& rig, Sizes s, DType type, DType result, bool ta, bool tb, std::uint64_t seed = 1) {
  Gemm op;
  op.a = rig.random(ta ? Shape{s.k, s.m} : Shape{s.m, s.k}, type, seed);
  op.b = rig.random(tb ? Shape{s.n, s.k} : Shape{s.k, s.n}, type, seed + 1);
  op.c = rig.random({s.m, s.n}, result, seed + 2);
  op.transpose_a = ta;
  op.transpose_b = tb;
  return op;
}

}  // namespace

TEST_CASE("gemm equals its definition") {
  Rig rig;
  const std::pair<DType, DType> types[] = {{DType::f64, DType::f64},
                                           {DType::f32, DType::f32},
                                           {DType::bf16, DType::f32},
                                           {DType::bf16, DType::bf16}};
  for (const auto& [type, result] : types) {
    for (const Sizes s : {Sizes{1, 1, 1},
                          {3, 5, 7},
                          {64, 33, 40},
                          {65, 64, 64},
                          {130, 1100, 17},
                          {70, 9, 1200},
                          {5, 4, 0},
                          {128, 128, 64},
                          {131, 600, 90},
                          {300, 129, 65},
                          {258, 140, 1100}}) {
      for (int bits = 0; bits < 8; ++bits) {
        Gemm op = product(rig, s, type, result, (bits & 1) != 0, (bits & 2) != 0);
        op.accumulate = (bits & 4) != 0;
        op.alpha = op.accumulate ? -0.5 : 1.0;
        const auto want = plain(op);
        rig.run(op);
        const double unit = result == DType::bf16 ? 0x1p-8 : type == DType::f64 ? 4e-15 : 1e-6;
        INFO(name(type) << " " << s.m << " " << s.n << " " << s.k << " form " << bits);
        CHECK(distance(read(op.c), want) <= unit * (4 + 4 * std::sqrt(static_cast<double>(s.k))));
      }
    }
  }
}

TEST_CASE("gemm: the bits of a row depend neither on the number of rows nor on its place") {
  Rig rig;
  constexpr std::int64_t kRows = 200;
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    for (const Sizes s : {Sizes{kRows, 64, 64},
                          {kRows, 192, 48},
                          {kRows, 17, 300},
                          {kRows, 1, 64},
                          {kRows, 73, 65},
                          {kRows, 300, 270},
                          {kRows, 1100, 70},
                          {kRows, 130, 1030}}) {
      for (const bool tb : {false, true}) {
        Gemm op = product(rig, s, type, type, false, tb);
        rig.run(op);
        const TensorView all = op.c;
        const bool costly = s.n * s.k > 64 * 200;
        for (std::int64_t m = 1; m <= kRows; m += costly ? 23 : m < 70 ? 1 : 13) {
          Gemm part = op;
          part.a = op.a.rows(kRows - m, kRows);
          part.c = rig.poisoned({m, s.n}, type);
          rig.run(part);
          INFO(name(type) << " n " << s.n << " k " << s.k << " transposed " << tb << " rows " << m);
          REQUIRE(same_bits(part.c, all.rows(kRows - m, kRows)));
        }
      }
    }
  }
}

TEST_CASE("gemm: accumulating rows do not depend on the number of rows either") {
  Rig rig;
  for (const Sizes s : {Sizes{100, 40, 700}, {100, 150, 1100}}) {
    const Gemm whole = product(rig, s, DType::f32, DType::f32, false, true);
    const TensorView start = rig.random({s.m, s.n}, DType::f32, 9);
    Gemm op = whole;
    op.accumulate = true;
    op.c = rig.values(read(start), {s.m, s.n}, DType::f32);
    rig.run(op);
    Gemm part = op;
    part.a = whole.a.rows(50, s.m);
    part.c = rig.values(read(start.rows(50, s.m)), {s.m - 50, s.n}, DType::f32);
    rig.run(part);
    CHECK(same_bits(part.c, op.c.rows(50, s.m)));
  }
}

TEST_CASE("gemm: same bits on any number of threads") {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const bool ta : {false, true}) {
      check_threads([&](Rig& rig) {
        Gemm op = product(rig, {300, 1300, 600}, type, DType::f32, ta, !ta);
        op.accumulate = true;
        rig.run(op);
        return std::vector<TensorView>{op.c};
      });
    }
  }
}

TEST_CASE("gemm refuses shapes and types that do not fit") {
  Rig rig;
  Gemm op = product(rig, {4, 5, 6}, DType::f32, DType::f32, false, false);
  op.b = rig.zeros({5, 6}, DType::f32);
  CHECK_THROWS_AS(op.check(), InternalError);
  op = product(rig, {4, 5, 6}, DType::f32, DType::bf16, false, false);
  CHECK_THROWS_AS(op.check(), InternalError);
}

}  // namespace moesaic::test
