#include "kernels/ops/muon.h"
#include "tests/ops/moe_support.h"

namespace moesaic {
namespace {

using moe_test::CpuRunner;
using moe_test::filled;
using moe_test::normal;
using moe_test::Tensor;

Tensor scalars_of(DType type, const StepScalars& s) {
  const Tensor t({kNumStepScalars}, type);
  s.write(t);
  return t;
}

using Matrix = std::vector<double>;

Matrix product(const Matrix& a, const Matrix& b, std::int64_t m, std::int64_t k, std::int64_t n) {
  Matrix c(static_cast<std::size_t>(m * n), 0.0);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t l = 0; l < k; ++l) {
      for (std::int64_t j = 0; j < n; ++j)
        c[static_cast<std::size_t>(i * n + j)] +=
            a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(l * n + j)];
    }
  }
  return c;
}

Matrix transposed(const Matrix& a, std::int64_t m, std::int64_t n) {
  Matrix t(a.size());
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j)
      t[static_cast<std::size_t>(j * m + i)] = a[static_cast<std::size_t>(i * n + j)];
  }
  return t;
}

/// The iteration written with plain products, on the orientation with m <= n.
Matrix iterate(Matrix x, std::int64_t m, std::int64_t n) {
  if (m > n) return transposed(iterate(transposed(x, m, n), n, m), n, m);
  double norm = 0;
  for (const double v : x)
    norm += v * v;
  for (double& v : x)
    v /= std::sqrt(norm) + 1e-7;
  for (int i = 0; i < 5; ++i) {
    const Matrix y = product(x, transposed(x, m, n), m, n, m), yy = product(y, y, m, m, m);
    Matrix p(y.size());
    for (std::size_t j = 0; j < p.size(); ++j)
      p[j] = -4.7750 * y[j] + 2.0315 * yy[j];
    const Matrix px = product(p, x, m, m, n);
    for (std::size_t j = 0; j < x.size(); ++j)
      x[j] = 3.4445 * x[j] + px[j];
  }
  return x;
}

/// w, momentum and gradient of one update, and its result.
struct Muon {
  Muon(Shape shape, DType type, std::uint64_t key)
      : w(normal(shape, type, key)),
        momentum(normal(shape, type, key + 1)),
        dw(normal(shape, type, key + 2)),
        scalars(scalars_of(
            type, {.learning_rate = 0.02, .weight_decay_scale = 0.5, .clip_factor = 0.75})) {}
  MuonUpdate op() const {
    return {.w = w,
            .momentum = momentum,
            .w_compute = {},
            .dw = dw,
            .scalars = scalars,
            .blocks = {},
            .lr_scale = 2,
            .weight_decay = 0.1};
  }
  Tensor w, momentum, dw, scalars;
};

}  // namespace

TEST_CASE("Newton-Schulz: against plain products in every orientation and over tile borders") {
  CpuRunner run(2);
  for (const auto& [m, n] : {std::pair<std::int64_t, std::int64_t>{1, 1},
                             {1, 9},
                             {9, 1},
                             {5, 8},
                             {70, 65},
                             {64, 130},
                             {150, 131},
                             {257, 300},
                             {390, 256}}) {
    const Tensor x = normal({m, n}, DType::f64, 61);
    const Matrix want = iterate(x.values(), m, n);
    run(NewtonSchulz{.x = x, .blocks = {}});
    CHECK(moe_test::relative_error(x.values(), want) < 1e-12);
  }
}

TEST_CASE("Newton-Schulz: rows of an orthogonal matrix keep their directions, zero stays zero") {
  CpuRunner run;
  Tensor x = filled({3, 4}, DType::f64, 0);
  for (std::int64_t i = 0; i < 3; ++i)
    x.set(i * 4 + i + 1, 5.0);
  run(NewtonSchulz{.x = x, .blocks = {}});
  double s = 1 / std::sqrt(3.0);  // each singular value, through the scalar map
  for (int i = 0; i < 5; ++i)
    s = s * (3.4445 + s * s * (-4.7750 + 2.0315 * s * s));
  for (std::int64_t i = 0; i < 12; ++i)
    CHECK(x.at(i) == Approx(i % 4 == i / 4 + 1 ? s : 0.0).margin(1e-7));
  const Tensor zero = filled({2, 3}, DType::f32, 0);
  run(NewtonSchulz{.x = zero, .blocks = {}});
  CHECK(zero.values() == std::vector<double>(6, 0.0));
}

TEST_CASE("Muon: the update, with clip factor, scales and decay from the step's scalars") {
  CpuRunner run;
  for (const bool nesterov : {true, false}) {
    const std::int64_t rows = 12, cols = 7;
    const Muon p({rows, cols}, DType::f64, 62);
    const auto w = p.w.values(), m0 = p.momentum.values(), g = p.dw.values();
    auto op = p.op();
    op.nesterov = nesterov;
    run(op);
    Matrix m, u;
    for (std::size_t i = 0; i < g.size(); ++i) {
      m.push_back(0.95 * m0[i] + 0.75 * g[i]);
      u.push_back(nesterov ? 0.75 * g[i] + 0.95 * m[i] : m[i]);
    }
    const Matrix direction = iterate(u, rows, cols);
    Matrix want;
    for (std::size_t i = 0; i < g.size(); ++i)
      want.push_back((1 - 0.04 * 0.1 * 0.5) * w[i] - 0.04 * 0.2 * std::sqrt(12.0) * direction[i]);
    CHECK(moe_test::relative_error(p.momentum.values(), m) < 1e-15);
    CHECK(moe_test::relative_error(p.w.values(), want) < 1e-14);
  }
}

TEST_CASE("Muon: a batch, blocks of rows and single matrices give the same bits; so do threads") {
  const std::int64_t batch = 11, rows = 20, cols = 24;
  const Muon all({batch, rows, cols}, DType::f32, 63), single({batch, rows, cols}, DType::f32, 63),
      threads({batch, rows, cols}, DType::f32, 63);
  const auto blocks = head_row_blocks(2, {4, 6});
  REQUIRE(blocks == std::vector<RowBlock>{{0, 4}, {4, 10}, {10, 14}, {14, 20}});
  CpuRunner one(1), three(3);
  auto op = all.op();
  op.blocks = blocks;
  one(op);
  op = threads.op();
  op.blocks = blocks;
  three(op);
  const auto part = [&](const Tensor& t, std::int64_t i, const RowBlock& b) {
    return t.view().rows(i, i + 1).reshaped({rows, cols}).rows(b.begin, b.end);
  };
  for (std::int64_t i = 0; i < batch; ++i) {
    for (const RowBlock& b : blocks) {
      op = single.op();
      op.w = part(single.w, i, b);
      op.momentum = part(single.momentum, i, b);
      op.dw = part(single.dw, i, b);
      one(op);
    }
  }
  CHECK(same_bits(all.w, threads.w));
  CHECK(same_bits(all.w, single.w));
  CHECK(same_bits(all.momentum, single.momentum));
}

TEST_CASE("Muon: threads that share the rows of a large matrix do not change a bit") {
  const Muon a({270, 300}, DType::f32, 64), b({270, 300}, DType::f32, 64),
      tall_a({300, 270}, DType::f32, 65), tall_b({300, 270}, DType::f32, 65);
  CpuRunner one(1), three(3);
  one(a.op());
  three(b.op());
  one(tall_a.op());
  three(tall_b.op());
  CHECK(same_bits(a.w, b.w));
  CHECK(same_bits(tall_a.w, tall_b.w));
}

TEST_CASE("Muon: a skipped step writes nothing, whatever the gradient holds") {
  CpuRunner run;
  const Muon p({4, 6}, DType::f32, 66);
  const Tensor w = copy_of(p.w), m = copy_of(p.momentum), compute({4, 6}, DType::bf16),
               compute_before = copy_of(compute);
  p.dw.set(3, std::numeric_limits<double>::quiet_NaN());
  p.scalars.set(index_of(StepScalar::skip), 1);
  auto op = p.op();
  op.w_compute = compute;
  run(op);
  CHECK(same_bits(p.w, w));
  CHECK(same_bits(p.momentum, m));
  CHECK(same_bits(compute, compute_before));
}

TEST_CASE("Muon: experts without tokens decay and keep moving by their momentum") {
  CpuRunner run;
  const Muon p({2, 4, 6}, DType::f64, 67);
  for (std::int64_t i = 0; i < 48; ++i)
    p.dw.set(i, 0);
  for (std::int64_t i = 24; i < 48; ++i)
    p.momentum.set(i, 0);
  const auto w = p.w.values(), m = p.momentum.values();
  run(p.op());
  for (std::int64_t i = 0; i < 24; ++i)
    REQUIRE(p.momentum.at(i) == 0.95 * m[static_cast<std::size_t>(i)]);
  CHECK_FALSE(p.w.at(0) == Approx(w[0] * (1 - 0.002)).epsilon(1e-6));
  for (std::int64_t i = 24; i < 48; ++i)
    REQUIRE(p.w.at(i) == Approx(w[static_cast<std::size_t>(i)] * (1 - 0.002)).epsilon(1e-14));
}

TEST_CASE("Muon: bf16 gradients and compute weights next to f32 masters") {
  CpuRunner run;
  const Muon narrow({6, 9}, DType::f32, 68), wide({6, 9}, DType::f32, 68);
  const Tensor dw({6, 9}, DType::bf16, narrow.dw.values()), compute({6, 9}, DType::bf16);
  auto op = narrow.op();
  op.dw = dw;
  op.w_compute = compute;
  run(op);
  const Tensor rounded({6, 9}, DType::f32, dw.values());
  op = wide.op();
  op.dw = rounded;
  run(op);
  CHECK(same_bits(narrow.w, wide.w));
  CHECK(same_bits(compute, Tensor({6, 9}, DType::bf16, narrow.w.values())));
}

TEST_CASE("Muon: blocks that do not cover the rows are refused") {
  CpuRunner run;
  const Muon p({6, 4}, DType::f32, 69);
  for (const auto& blocks : {std::vector<RowBlock>{{0, 3}},
                             {{0, 3}, {4, 6}},
                             {{0, 3}, {3, 3}, {3, 6}},
                             {{0, 3}, {3, 7}}}) {
    auto op = p.op();
    op.blocks = blocks;
    CHECK_THROWS_AS(run(op), InternalError);
  }
}

}  // namespace moesaic
