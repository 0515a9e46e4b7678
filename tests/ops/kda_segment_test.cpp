#include "kernels/ops/kda_segment.h"

#include "tests/ops/kda_support.h"
#include "tests/support/catch.h"

using namespace moesaic;
using namespace moesaic::kda_test;

namespace {

/// Part n of a tensor cut into parts of `size` elements.
Values part(const Values& all, std::int64_t n, std::int64_t size) {
  return {all.begin() + n * size, all.begin() + (n + 1) * size};
}

struct Segment {
  Values m, e, f;
};
Segment segment(Cpu& cpu, const CoreCase& c, DType t = DType::f64) {
  const DType a = wide(t);
  const Tensor q(c.keys(), t, c.q), k(c.keys(), t, c.k), v(c.rows(), t, c.v), g(c.keys(), a, c.g),
      beta(c.heads(), a, c.beta), d_o(c.rows(), t, c.d_o), cu = documents_tensor(c.cu);
  const Tensor m({c.H, c.K, c.K}, a), e({c.H, c.K, c.V}, a), f({c.H, c.K, c.V}, a);
  cpu.run(KdaSegmentMap{.m = m, .e = e, .k = k, .v = v, .g = g, .beta = beta, .cu_seqlens = cu});
  cpu.run(KdaSegmentGradient{
      .f = f, .d_o = d_o, .q = q, .k = k, .g = g, .beta = beta, .cu_seqlens = cu});
  return {m.values(), e.values(), f.values()};
}

/// m s + e or m^T s + e of every head.
Values mapped(
    const CoreCase& c, const Values& m, const Values& s, const Values& e, bool transposed) {
  Values out = e;
  for (std::int64_t h = 0; h < c.H; ++h) {
    for (std::int64_t i = 0; i < c.K; ++i) {
      for (std::int64_t j = 0; j < c.V; ++j) {
        for (std::int64_t x = 0; x < c.K; ++x) {
          const std::int64_t at = transposed ? x * c.K + i : i * c.K + x;
          out[static_cast<std::size_t>((h * c.K + i) * c.V + j)] +=
              m[static_cast<std::size_t>(h * c.K * c.K + at)] *
              s[static_cast<std::size_t>((h * c.K + x) * c.V + j)];
        }
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("KdaSegment: the map of the last document's state, at any sizes") {
  Cpu cpu;
  for (const auto& [K, V] : {std::pair<std::int64_t, std::int64_t>{5, 3}, {64, 64}, {70, 65}}) {
    for (const std::vector<std::int32_t>& cu :
         {std::vector<std::int32_t>{0, 1}, {0, 40}, {0, 7, 7, 30}, {0, 12, 13}}) {
      const auto c = random_case(cu, 2, K, V, 3);
      const Segment s = segment(cpu, c);
      const std::int64_t size = c.H * K * V, last = c.documents() - 1;
      const auto whole = run_core(cpu, c, {.backward = false});
      INFO("K " << K << " V " << V << " documents " << c.documents() << " tokens " << c.tokens());
      CHECK(relative_error(mapped(c, s.m, part(c.s0, last, size), s.e, false),
                           part(whole.s_final, last, size)) < 1e-12);
      const Segment rounded = segment(cpu, c, DType::f32);
      CHECK(relative_error(rounded.m, s.m) < 3e-6);
      CHECK(relative_error(rounded.e, s.e) < 3e-6);
    }
  }
}

TEST_CASE("KdaSegment: F and M are the derivatives of the recurrence") {
  Cpu cpu;
  // With one document the gradient of the state before it is F + M^T (that of the state after it).
  auto c = random_case({0, 23}, 2, 5, 3, 4);
  const Segment s = segment(cpu, c);
  const auto loss = [&](const Values& s0) {
    CoreCase moved = c;
    moved.s0 = s0;
    const auto r = run_core(cpu, moved, {.backward = false});
    return dot(r.o, c.d_o) + dot(r.s_final, c.ds_final);
  };
  const Values expected = central_differences(c.s0, 1e-5, loss);
  CHECK(relative_error(mapped(c, s.m, c.ds_final, s.f, true), expected) < 1e-8);
  // F is of the first document alone.
  const auto two = random_case({0, 9, 23}, 2, 5, 3, 5);
  const auto whole = run_core(cpu, two);
  CoreCase none = two;
  none.ds_final.assign(none.ds_final.size(), 0.0);
  CHECK(relative_error(segment(cpu, two).f, part(run_core(cpu, none).ds0, 0, 2 * 5 * 3)) < 1e-12);
}

TEST_CASE("KdaSegment: a decay of minus infinity forgets the state") {
  Cpu cpu;
  auto c = random_case({0, 20}, 1, 6, 4, 6);
  std::fill_n(c.g.begin() + 11 * 6, 6, -1e4);
  const Segment s = segment(cpu, c);
  for (const double x : s.m)
    CHECK(x == 0.0);
}

TEST_CASE("KdaSegment: chains of maps, both ways") {
  Cpu cpu(2);
  const CoreCase c{.H = 3, .K = 7, .V = 5, .cu = {0, 1}};
  Random random(8);
  for (const std::int64_t pieces : {1, 2, 5}) {
    const Values m = random.normal(pieces * c.H * c.K * c.K, 0.4),
                 e = random.normal(pieces * c.H * c.K * c.V);
    const Tensor maps({pieces, c.H, c.K, c.K}, DType::f64, m),
        offsets({pieces, c.H, c.K, c.V}, DType::f64, e), state({c.H, c.K, c.V}, DType::f64);
    const std::int64_t of_m = c.H * c.K * c.K, of_e = c.H * c.K * c.V;
    Values forward = part(e, 0, of_e), back = part(e, pieces - 1, of_e);
    for (std::int64_t i = 1; i < pieces; ++i) {
      forward = mapped(c, part(m, i, of_m), forward, part(e, i, of_e), false);
      back = mapped(c, part(m, pieces - 1 - i, of_m), back, part(e, pieces - 1 - i, of_e), true);
    }
    cpu.run(KdaSegmentChain{.state = state, .m = maps, .e = offsets});
    CHECK(relative_error(state.values(), forward) < 1e-14);
    cpu.run(KdaSegmentChain{.state = state, .m = maps, .e = offsets, .reversed = true});
    CHECK(relative_error(state.values(), back) < 1e-14);
  }
}

TEST_CASE("KdaChunk: one state in and one out are those of the first and the last document") {
  Cpu cpu;
  for (const bool save : {false, true}) {
    auto c = random_case({0, 5, 5, 42, 60}, 2, 6, 4, 12);
    const std::int64_t size = c.H * c.K * c.V, last = c.documents() - 1;
    std::fill(c.s0.begin() + size, c.s0.end(), 0.0);
    std::fill(c.ds_final.begin(), c.ds_final.begin() + last * size, 0.0);
    const auto expected = run_core(cpu, c, {.save = save});
    const Shape one{1, c.H, c.K, c.V};
    const DType t = DType::f64;
    const Tensor q(c.keys(), t, c.q), k(c.keys(), t, c.k), v(c.rows(), t, c.v), g(c.keys(), t, c.g),
        beta(c.heads(), t, c.beta), s0(one, t, part(c.s0, 0, size)),
        ds_final(one, t, part(c.ds_final, last, size)), d_o(c.rows(), t, c.d_o);
    const Tensor o(c.rows(), t), s_final(one, t), cu = documents_tensor(c.cu), dq(c.keys(), t),
                                                  dk(c.keys(), t), dv(c.rows(), t), dg(c.keys(), t),
                                                  dbeta(c.heads(), t), ds0(one, t);
    Tensor saved;
    if (save) saved = Tensor({kda_saved_numel(c.tokens(), c.documents(), c.H, c.K, c.V, 64)}, t);
    cpu.run(KdaChunkForward{.o = o,
                            .s_final = s_final,
                            .saved = saved,
                            .q = q,
                            .k = k,
                            .v = v,
                            .g = g,
                            .beta = beta,
                            .s0 = s0,
                            .cu_seqlens = cu});
    cpu.run(KdaChunkBackward{.dq = dq,
                             .dk = dk,
                             .dv = dv,
                             .dg = dg,
                             .dbeta = dbeta,
                             .ds0 = ds0,
                             .d_o = d_o,
                             .ds_final = ds_final,
                             .q = q,
                             .k = k,
                             .v = v,
                             .g = g,
                             .beta = beta,
                             .s0 = s0,
                             .saved = saved,
                             .cu_seqlens = cu});
    CHECK(o.values() == expected.o);
    CHECK(s_final.values() == part(expected.s_final, last, size));
    CHECK(dq.values() == expected.dq);
    CHECK(dg.values() == expected.dg);
    CHECK(ds0.values() == part(expected.ds0, 0, size));
  }
}

TEST_CASE("KdaSegment: wrong arguments are refused") {
  Cpu cpu;
  const auto c = random_case({0, 4}, 1, 3, 2, 1);
  const DType t = DType::f64;
  const Tensor k(c.keys(), t, c.k), v(c.rows(), t, c.v), g(c.keys(), t, c.g),
      beta(c.heads(), t, c.beta), cu = documents_tensor(c.cu), nothing = documents_tensor({0}),
                                  m({1, 3, 3}, t), e({1, 3, 2}, t);
  KdaSegmentMap op{.m = m, .e = e, .k = k, .v = v, .g = g, .beta = beta, .cu_seqlens = cu};
  CHECK_NOTHROW(cpu.run(op));
  op.cu_seqlens = nothing;
  CHECK_THROWS_AS(cpu.run(op), InternalError);
  op.cu_seqlens = cu;
  op.m = e;
  CHECK_THROWS_AS(cpu.run(op), InternalError);
}
