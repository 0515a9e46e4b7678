#include "kernels/ops/glu.h"

#include "tests/ops/op_test.h"

namespace moesaic::test {

TEST_CASE("GLU: gradients by central differences, with and without row weights") {
  Rig rig;
  constexpr std::int64_t kRows = 6, kWidth = 5;
  for (const GluKind kind : {GluKind::swiglu, GluKind::situ}) {
    const GluActivation act{kind, 4.0, 25.0};
    const TensorView in = rig.random({kRows, 2 * kWidth}, DType::f64, 1, 3.0),
                     cot = rig.random({kRows, kWidth}, DType::f64, 2);
    const TensorView weight = rig.random({kRows}, DType::f64, 3),
                     h = rig.zeros({kRows, kWidth}, DType::f64);
    // loss = sum_t w_t <cot_t, h_t>
    const auto loss = [&] {
      rig.run(GluForward{.h = h, .gate_up = in, .activation = act});
      double sum = 0;
      for (std::int64_t t = 0; t < kRows; ++t)
        sum += weight.as<double>()[t] * inner(h.rows(t, t + 1), cot.rows(t, t + 1));
      return sum;
    };
    loss();
    const TensorView d = rig.zeros({kRows, 2 * kWidth}, DType::f64),
                     dweight = rig.poisoned({kRows}, DType::f64),
                     h2 = rig.zeros({kRows, kWidth}, DType::f64);
    rig.run(GluBackward{.dgate_up = d,
                        .drow_weight = dweight,
                        .h = h2,
                        .dh = cot,
                        .gate_up = in,
                        .row_weight = weight,
                        .activation = act});
    check_gradient(in, d, loss);
    check_gradient(weight, dweight, loss);
    CHECK(distance(read(h2), read(h)) < 1e-14);
    rig.run(GluBackward{.dgate_up = d,
                        .h = h2,
                        .dh = cot,
                        .gate_up = in,
                        .row_weight = weight,
                        .activation = act,
                        .weight_h = true});
    for (std::int64_t i = 0; i < kRows * kWidth; ++i) {
      CHECK(h2.as<double>()[i] == Approx(h.as<double>()[i] * weight.as<double>()[i / kWidth]));
    }
    // In place: gradients over the inputs, h over its gradient.
    const TensorView in2 = rig.values(read(in), in.shape(), DType::f64),
                     cot2 = rig.values(read(cot), cot.shape(), DType::f64);
    rig.run(GluBackward{.dgate_up = in2,
                        .h = cot2,
                        .dh = cot2,
                        .gate_up = in2,
                        .row_weight = weight,
                        .activation = act,
                        .weight_h = true});
    CHECK(distance(read(in2), read(d)) < 1e-14);
    CHECK(distance(read(cot2), read(h2)) < 1e-14);
  }
}

TEST_CASE("GLU: rows beyond the count on the device are not touched") {
  Rig rig;
  const TensorView in = rig.random({8, 6}, DType::f32, 1), h = rig.poisoned({8, 3}, DType::f32),
                   d = rig.poisoned({8, 6}, DType::f32);
  rig.run(GluForward{.h = h, .gate_up = in, .row_count = rig.ints({5})});
  rig.run(GluBackward{.dgate_up = d, .dh = h, .gate_up = in, .row_count = rig.ints({5})});
  for (const double v : read(h.rows(0, 5)))
    CHECK(std::isfinite(v));
  CHECK(same_bits(h.rows(5, 8), rig.poisoned({3, 3}, DType::f32)));
  CHECK(same_bits(d.rows(5, 8), rig.poisoned({3, 6}, DType::f32)));
  CHECK_THROWS_AS(rig.run(GluForward{.h = h, .gate_up = in, .row_count = rig.ints({9})}),
                  InternalError);
}

TEST_CASE("GLU: saturated and huge inputs stay finite; same bits on any number of threads") {
  Rig rig;
  const TensorView in = rig.values({3e4, -3e4, 1e30, 3e4}, {1, 4}, DType::f32),
                   h = rig.zeros({1, 2}, DType::f32), d = rig.zeros({1, 4}, DType::f32);
  const GluActivation situ{GluKind::situ, 4.0, 25.0};
  rig.run(GluForward{.h = h, .gate_up = in, .activation = situ});
  CHECK(read(h) == std::vector<double>{100.0, 0.0});
  rig.run(GluBackward{.dgate_up = d, .dh = h, .gate_up = in, .activation = situ});
  for (const double v : read(d))
    CHECK(std::isfinite(v));
  check_threads([&](Rig& r) {
    const TensorView x = r.random({500, 128}, DType::bf16, 4, 2.0),
                     y = r.zeros({500, 64}, DType::bf16), dx = r.zeros({500, 128}, DType::bf16);
    const TensorView w = r.random({500}, DType::f32, 5), dw = r.zeros({500}, DType::f32);
    r.run(GluForward{.h = y, .gate_up = x, .activation = situ});
    r.run(GluBackward{.dgate_up = dx,
                      .drow_weight = dw,
                      .dh = y,
                      .gate_up = x,
                      .row_weight = w,
                      .activation = situ});
    return std::vector<TensorView>{y, dx, dw};
  });
}

}  // namespace moesaic::test
