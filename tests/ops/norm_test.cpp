#include "kernels/ops/elementwise.h"
#include "kernels/ops/gated_norm.h"
#include "kernels/ops/layer_norm.h"
#include "tests/ops/op_test.h"

namespace moesaic::test {

constexpr DType kD = DType::f64;

TEST_CASE("layer norm: gradients by central differences") {
  Rig rig;
  const Shape shape{7, 11};
  const TensorView x = rig.random(shape, kD, 1), w = rig.random({11}, kD, 2),
                   b = rig.random({11}, kD, 3), dy = rig.random(shape, kD, 4);
  const TensorView y = rig.zeros(shape, kD), mean = rig.zeros({7}, kD), inv = rig.zeros({7}, kD);
  const auto loss = [&] {
    rig.run(LayerNormForward{y, mean, inv, x, w, b, 1e-6});
    return inner(y, dy);
  };
  loss();
  const TensorView dx = rig.values(read(dy), shape, kD), dw = rig.zeros({11}, kD),
                   db = rig.zeros({11}, kD);
  rig.run(LayerNormBackward{dx, dw, db, dx, x, w, mean, inv});  // in place
  check_gradient(x, dx, loss);
  check_gradient(w, dw, loss);
  check_gradient(b, db, loss);
}

TEST_CASE("layer norm has mean 0 and variance 1 next to a large offset") {
  Rig rig;
  const TensorView x = rig.random({1, 64}, DType::f32, 1), y = rig.zeros({1, 64}, DType::f32);
  for (int c = 0; c < 64; ++c)
    x.as<float>()[c] += 4096.0F;
  const TensorView one = rig.values(std::vector<double>(64, 1.0), {64}, DType::f32),
                   zero = rig.zeros({64}, DType::f32);
  rig.run(LayerNormForward{
      y, rig.zeros({1}, DType::f32), rig.zeros({1}, DType::f32), x, one, zero, 0.0});
  double sum = 0, squares = 0;
  for (const double v : read(y)) {
    sum += v;
    squares += v * v;
  }
  CHECK(std::abs(sum) < 0.05);
  CHECK(squares == Approx(64).epsilon(1e-3));
}

TEST_CASE("L2 norm: gradients, unit length, zero row") {
  Rig rig;
  const Shape shape{4, 9};
  const TensorView x = rig.random(shape, kD, 1), dy = rig.random(shape, kD, 2),
                   y = rig.zeros(shape, kD), inv = rig.zeros({4}, kD);
  const double scale = 0.25;
  const auto loss = [&] {
    rig.run(L2NormForward{y, inv, x, 1e-6, scale});
    return inner(y, dy);
  };
  loss();
  CHECK(inner(y.rows(0, 1), y.rows(0, 1)) == Approx(scale * scale).epsilon(1e-5));
  const TensorView dx = rig.zeros(shape, kD);
  rig.run(L2NormBackward{dx, dy, x, inv, scale});
  check_gradient(x, dx, loss);
  const TensorView zero = rig.zeros({1, 9}, kD), out = rig.poisoned({1, 9}, kD),
                   r = rig.zeros({1}, kD);
  rig.run(L2NormForward{out, r, zero, 1e-6, 1.0});
  CHECK(read(out) == std::vector<double>(9, 0.0));
  CHECK(read(r)[0] == Approx(1000));
}

TEST_CASE("gated RMS norm: gradients by central differences, in place too") {
  Rig rig;
  const Shape shape{5, 3, 8};
  const TensorView x = rig.random(shape, kD, 1), gate = rig.random(shape, kD, 2, 3.0),
                   w = rig.random({8}, kD, 3), dy = rig.random(shape, kD, 4);
  const TensorView y = rig.zeros(shape, kD), inv = rig.zeros({5, 3}, kD);
  const auto loss = [&] {
    rig.run(GatedRmsNormForward{y, inv, x, gate, w, 1e-5});
    return inner(y, dy);
  };
  loss();
  const TensorView dx = rig.values(read(dy), shape, kD), dgate = rig.zeros(shape, kD),
                   dw = rig.zeros({8}, kD);
  rig.run(GatedRmsNormBackward{dx, dgate, dw, dx, x, gate, w, inv});
  check_gradient(x, dx, loss);
  check_gradient(gate, dgate, loss);
  check_gradient(w, dw, loss);
  // A frozen weight changes nothing else.
  const TensorView dx2 = rig.zeros(shape, kD), dgate2 = rig.zeros(shape, kD);
  rig.run(GatedRmsNormBackward{dx2, dgate2, {}, dy, x, gate, w, inv});
  CHECK(same_bits(dx, dx2));
}

TEST_CASE("sigmoid gate: gradients, and none is lost where the gate is shut") {
  Rig rig;
  const Shape shape{40};
  const TensorView x = rig.random(shape, kD, 1), gate = rig.random(shape, kD, 2, 2.0),
                   dy = rig.random(shape, kD, 3);
  const TensorView y = rig.zeros(shape, kD), dx = rig.zeros(shape, kD),
                   dgate = rig.zeros(shape, kD);
  const auto loss = [&] {
    rig.run(SigmoidGateForward{y, x, gate});
    return inner(y, dy);
  };
  rig.run(SigmoidGateBackward{dx, dgate, dy, x, gate});
  check_gradient(x, dx, loss);
  check_gradient(gate, dgate, loss);
  const TensorView one = rig.values({1.0}, {1}, DType::f32),
                   shut = rig.values({40.0}, {1}, DType::f32), d = rig.zeros({1}, DType::f32);
  rig.run(SigmoidGateBackward{rig.zeros({1}, DType::f32), d, one, one, shut});
  CHECK(read(d)[0] ==
        Approx(std::exp(-40.0)).epsilon(1e-5));  // 1 - sigma rounded first would give 0
}

TEST_CASE("norms: same bits on any number of threads") {
  for (const DType type : {DType::f32, DType::bf16}) {
    check_threads([&](Rig& rig) {
      constexpr std::int64_t kRows = 333, kWidth = 48;
      const Shape shape{kRows, kWidth}, heads{kRows / 3, 3, kWidth};
      const TensorView x = rig.random(shape, type, 1), dy = rig.random(shape, type, 2),
                       w = rig.random({kWidth}, type, 3), b = rig.random({kWidth}, type, 4);
      const TensorView y = rig.zeros(shape, type), y2 = rig.zeros(shape, type),
                       dx = rig.zeros(shape, type), dx2 = rig.zeros(shape, type),
                       dgate = rig.zeros(shape, type);
      const TensorView s1 = rig.zeros({kRows}, DType::f32), s2 = rig.zeros({kRows}, DType::f32),
                       s3 = rig.zeros({kRows / 3, 3}, DType::f32);
      const TensorView dw = rig.zeros({kWidth}, DType::f32), db = rig.zeros({kWidth}, DType::f32),
                       dw2 = rig.zeros({kWidth}, DType::f32);
      rig.run(LayerNormForward{y, s1, s2, x, w, b, 1e-6});
      rig.run(LayerNormBackward{dx, dw, db, dy, x, w, s1, s2});
      rig.run(GatedRmsNormForward{
          y2.reshaped(heads), s3, x.reshaped(heads), dy.reshaped(heads), w, 1e-5});
      rig.run(GatedRmsNormBackward{dx2.reshaped(heads),
                                   dgate.reshaped(heads),
                                   dw2,
                                   dy.reshaped(heads),
                                   x.reshaped(heads),
                                   y.reshaped(heads),
                                   w,
                                   s3});
      return std::vector<TensorView>{y, y2, dx, dx2, dgate, dw, db, dw2};
    });
  }
}

}  // namespace moesaic::test
