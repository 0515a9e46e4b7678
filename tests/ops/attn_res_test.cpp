#include "kernels/ops/attn_res.h"

#include "tests/ops/op_test.h"

namespace moesaic::test {

TEST_CASE("depth mix: gradients by central differences; accumulators add; empty ones are skipped") {
  Rig rig;
  constexpr std::int64_t kTokens = 5, kWidth = 7;
  constexpr DType kD = DType::f64;
  const TensorView query = rig.random({kWidth}, kD, 1), norm = rig.random({kWidth}, kD, 2),
                   dh = rig.random({kTokens, kWidth}, kD, 3);
  std::vector<TensorView> v, dv;
  for (std::uint64_t i = 0; i < 4; ++i) {
    v.push_back(rig.random({kTokens, kWidth}, kD, 10 + i, 1.0 + static_cast<double>(i)));
    dv.push_back(i == 2 ? TensorView{} : rig.zeros({kTokens, kWidth}, kD));
  }
  const std::vector<ConstTensorView> sources(v.begin(), v.end());
  const TensorView h = rig.zeros({kTokens, kWidth}, kD), p = rig.zeros({kTokens, 4}, kD);
  const auto loss = [&] {
    rig.run(AttnResForward{h, p, sources, query, norm, 1e-5});
    return inner(h, dh);
  };
  loss();
  const TensorView dquery = rig.zeros({kWidth}, kD), dnorm = rig.zeros({kWidth}, kD);
  const AttnResBackward op{dv, dquery, dnorm, dh, p, sources, query, norm, 1e-5};
  rig.run(op);
  for (const std::size_t i : {0U, 1U, 3U})
    check_gradient(v[i], dv[i], loss);
  check_gradient(query, dquery, loss);
  check_gradient(norm, dnorm, loss);
  const auto once = read(dv[0]);
  loss();
  rig.run(op);
  for (std::size_t i = 0; i < once.size(); ++i)
    CHECK(read(dv[0])[i] == Approx(2 * once[i]));
}

TEST_CASE("depth mix: a zero query is the plain mean, and one source is passed on") {
  Rig rig;
  const TensorView zero = rig.zeros({300}, DType::bf16), norm = rig.random({300}, DType::bf16, 1),
                   a = rig.random({3, 300}, DType::bf16, 2),
                   b = rig.random({3, 300}, DType::bf16, 3);
  const TensorView h = rig.poisoned({3, 300}, DType::bf16), p = rig.poisoned({3, 2}, DType::f32),
                   p1 = rig.poisoned({3, 1}, DType::f32);
  rig.run(AttnResForward{h, p, {a, b}, zero, norm, 1e-5});
  CHECK(read(p) == std::vector<double>(6, 0.5));
  CHECK(read(h)[299] == static_cast<double>(static_cast<float>(
                            bf16(static_cast<float>(0.5 * (read(a)[299] + read(b)[299]))))));
  rig.run(AttnResForward{h, p1, {a}, norm, norm, 1e-5});
  CHECK(same_bits(h, a));
}

TEST_CASE("depth mix: same bits on any number of threads") {
  for (const DType type : {DType::f32, DType::bf16}) {
    check_threads([&](Rig& rig) {
      constexpr std::int64_t kTokens = 200, kWidth = 300;
      const TensorView a = rig.random({kTokens, kWidth}, type, 1),
                       b = rig.random({kTokens, kWidth}, type, 2),
                       c = rig.random({kTokens, kWidth}, type, 3);
      const TensorView q = rig.random({kWidth}, type, 4), n = rig.random({kWidth}, type, 5),
                       h = rig.zeros({kTokens, kWidth}, type),
                       p = rig.zeros({kTokens, 3}, DType::f32);
      std::vector<TensorView> d;
      for (int i = 0; i < 3; ++i)
        d.push_back(rig.zeros({kTokens, kWidth}, DType::f32));
      const TensorView dq = rig.zeros({kWidth}, DType::f32), dn = rig.zeros({kWidth}, DType::f32);
      rig.run(AttnResForward{h, p, {a, b, c}, q, n, 1e-5});
      rig.run(AttnResBackward{d, dq, dn, h, p, {a, b, c}, q, n, 1e-5});
      return std::vector<TensorView>{h, p, d[0], d[1], d[2], dq, dn};
    });
  }
}

}  // namespace moesaic::test
