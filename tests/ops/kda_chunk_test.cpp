#include "tests/ops/kda_support.h"
#include "tests/support/catch.h"

using namespace moesaic;
using namespace moesaic::kda_test;

namespace {

/// <o, d_o> + <s_final, ds_final>.
double loss(Cpu& cpu, const CoreCase& c, int chunk_size) {
  const auto r = run_core(cpu, c, {.chunk_size = chunk_size, .backward = false});
  return dot(r.o, c.d_o) + dot(r.s_final, c.ds_final);
}

bool same(const CoreResult& a, const CoreResult& b) {
  return a.o == b.o && a.s_final == b.s_final && a.dq == b.dq && a.dk == b.dk && a.dv == b.dv &&
         a.dg == b.dg && a.dbeta == b.dbeta && a.ds0 == b.ds0;
}

}  // namespace

TEST_CASE("KdaChunk: equals the recurrence around the borders of tiles and chunks") {
  Cpu cpu;
  for (const std::int32_t tokens : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200}) {
    for (const int chunk : {16, 32, 48, 64}) {
      const auto c = random_case({0, tokens}, 2, 10, 7, static_cast<unsigned>(tokens));
      const auto expected = recurrence(c);
      INFO("tokens " << tokens << " chunk " << chunk);
      CHECK(worst_error(run_core(cpu, c, {.chunk_size = chunk, .backward = false}), expected) <
            1e-12);
      CHECK(worst_error(
                run_core(cpu, c, {.dtype = DType::f32, .chunk_size = chunk, .backward = false}),
                expected) < 2e-6);
    }
  }
}

TEST_CASE("KdaChunk: head sizes of the models, in each dtype") {
  Cpu cpu;
  for (const std::int64_t size : {32, 40, 64, 128}) {
    const auto c = random_case({0, 100, 100, 170}, 2, size, size, 7);
    const auto exact = run_core(cpu, c);
    INFO("head size " << size);
    CHECK(worst_error(exact, recurrence(c)) < 1e-12);
    CHECK(worst_error(run_core(cpu, c, {.dtype = DType::f32}), exact) < 3e-6);
    CHECK(worst_error(run_core(cpu, c, {.dtype = DType::bf16}), exact) < 1.5e-2);
  }
}

TEST_CASE("KdaChunk: gradients are those of finite differences") {
  Cpu cpu;
  for (const int chunk : {16, 32, 64}) {
    auto c = random_case({0, 5, 5, 42}, 2, 5, 3, 11);
    const auto r = run_core(cpu, c, {.chunk_size = chunk});
    const auto differs = [&](Values CoreCase::*field, const Values& gradient) {
      const auto fd = central_differences(c.*field, 1e-5, [&](const Values& x) {
        CoreCase moved = c;
        moved.*field = x;
        return loss(cpu, moved, chunk);
      });
      return relative_error(gradient, fd);
    };
    INFO("chunk " << chunk);
    CHECK(differs(&CoreCase::q, r.dq) < 1e-8);
    CHECK(differs(&CoreCase::k, r.dk) < 1e-8);
    CHECK(differs(&CoreCase::v, r.dv) < 1e-8);
    CHECK(differs(&CoreCase::g, r.dg) < 1e-8);
    CHECK(differs(&CoreCase::beta, r.dbeta) < 1e-8);
    CHECK(differs(&CoreCase::s0, r.ds0) < 1e-8);
  }
}

TEST_CASE("KdaChunk: results do not depend on the chunk size") {
  Cpu cpu;
  const auto c = random_case({0, 130, 131, 300}, 2, 24, 16, 13);
  const auto r64 = run_core(cpu, c);
  for (const int chunk : {16, 32, 48}) {
    CHECK(worst_error(run_core(cpu, c, {.chunk_size = chunk}), r64) < 1e-12);
    CHECK(worst_error(run_core(cpu, c, {.dtype = DType::f32, .chunk_size = chunk}), r64) < 3e-6);
  }
}

TEST_CASE("KdaChunk: saved tensors and any number of threads give the same bits") {
  Cpu one(1), three(3);
  const auto c = random_case({0, 70, 70, 75, 205}, 3, 16, 24, 17);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    const auto r = run_core(one, c, {.dtype = dtype});
    CHECK(same(r, run_core(one, c, {.dtype = dtype, .save = true})));
    CHECK(same(r, run_core(three, c, {.dtype = dtype})));
    CHECK(same(r, run_core(three, c, {.dtype = dtype, .save = true})));
  }
}

TEST_CASE(
    "KdaChunk: packed documents have the bits of separate runs; an empty one passes its state "
    "through") {
  Cpu cpu;
  const std::vector<std::int32_t> cu{0, 70, 70, 71, 135};
  const auto packed = random_case(cu, 2, 8, 8, 19);
  const auto all = run_core(cpu, packed, {.dtype = DType::f32});
  const auto part = [](const Values& v, std::int64_t begin, std::int64_t end, std::int64_t width) {
    return Values(v.begin() + begin * width, v.begin() + end * width);
  };
  for (std::int64_t n = 0; n < 4; ++n) {
    const std::int64_t b = cu[static_cast<std::size_t>(n)], e = cu[static_cast<std::size_t>(n) + 1],
                       keys = 2 * 8, state = 2 * 8 * 8;
    CoreCase c{.H = 2, .K = 8, .V = 8, .cu = {0, static_cast<std::int32_t>(e - b)}};
    c.q = part(packed.q, b, e, keys), c.k = part(packed.k, b, e, keys),
    c.v = part(packed.v, b, e, keys), c.g = part(packed.g, b, e, keys);
    c.beta = part(packed.beta, b, e, 2), c.d_o = part(packed.d_o, b, e, keys);
    c.s0 = part(packed.s0, n, n + 1, state), c.ds_final = part(packed.ds_final, n, n + 1, state);
    const auto alone = run_core(cpu, c, {.dtype = DType::f32});
    CHECK(alone.o == part(all.o, b, e, keys));
    CHECK(alone.s_final == part(all.s_final, n, n + 1, state));
    CHECK(alone.dq == part(all.dq, b, e, keys));
    CHECK(alone.dk == part(all.dk, b, e, keys));
    CHECK(alone.dv == part(all.dv, b, e, keys));
    CHECK(alone.dg == part(all.dg, b, e, keys));
    CHECK(alone.dbeta == part(all.dbeta, b, e, 2));
    CHECK(alone.ds0 == part(all.ds0, n, n + 1, state));
  }
  const auto single = run_core(cpu, packed);  // f64: the state's values survive the round trip
  CHECK(part(single.s_final, 1, 2, 128) == part(packed.s0, 1, 2, 128));
  CHECK(part(single.ds0, 1, 2, 128) == part(packed.ds_final, 1, 2, 128));
}

TEST_CASE("KdaChunk: later tokens never change the bits of earlier outputs") {
  Cpu cpu;
  const auto c = random_case({0, 150}, 2, 16, 16, 23);
  const auto r = run_core(cpu, c, {.dtype = DType::f32, .backward = false});
  for (const std::int64_t t : {1, 15, 16, 40, 64, 79, 149}) {
    auto changed = c;
    Random random(static_cast<unsigned>(t));
    const auto from = static_cast<std::size_t>(t * 2 * 16);
    const auto fresh = random.normal(static_cast<std::int64_t>(changed.k.size()));
    for (std::size_t i = from; i < changed.k.size(); ++i)
      changed.k[i] = fresh[i], changed.v[i] = -fresh[i], changed.q[i] = fresh[i],
      changed.g[i] = -5.0;
    const auto other = run_core(cpu, changed, {.dtype = DType::f32, .backward = false});
    CHECK(
        std::equal(r.o.begin(), r.o.begin() + static_cast<std::ptrdiff_t>(from), other.o.begin()));
    CHECK(r.o != other.o);
    // Nor does their absence: a document cut off before t.
    auto cut = c;
    cut.cu = {0, static_cast<std::int32_t>(t)};
    for (Values* v : {&cut.q, &cut.k, &cut.v, &cut.g, &cut.d_o})
      v->resize(from);
    cut.beta.resize(static_cast<std::size_t>(t * 2));
    const auto prefix = run_core(cpu, cut, {.dtype = DType::f32, .backward = false});
    CHECK(std::equal(prefix.o.begin(), prefix.o.end(), r.o.begin()));
  }
}

TEST_CASE("KdaChunk: extreme gates neither overflow nor lose precision") {
  Cpu cpu;
  const auto judge = [&](CoreCase c, double limit, double gradient_limit) {
    const auto exact = run_core(cpu, c);
    CHECK(worst_error(exact, recurrence(c)) < 1e-12);
    const auto r = run_core(cpu, c, {.dtype = DType::f32});
    CHECK(relative_error(r.o, exact.o) < limit);
    CHECK(relative_error(r.s_final, exact.s_final) < limit);
    CHECK(worst_error(r, exact) < gradient_limit);
  };
  auto c = random_case({0, 130}, 2, 16, 16, 29);
  SECTION("g = -5 on all tokens and channels") {
    std::fill(c.g.begin(), c.g.end(), -5.0);
    judge(c, 1e-6, 1e-5);
  }
  SECTION("no decay, equal keys, beta near 1") {
    std::fill(c.g.begin(), c.g.end(), -1e-7);
    std::fill(c.beta.begin(), c.beta.end(), 0.99);
    for (std::size_t i = 0; i < c.k.size(); ++i)
      c.k[i] = c.k[i % 16];
    judge(c, 1e-5, 1e-4);
  }
  SECTION("softplus gates: decays of -1600 next to mild ones") {
    for (std::size_t i = 0; i < c.g.size(); ++i)
      c.g[i] = i % 7 == 0 ? -1600.0 : (i % 5 == 0 ? -95.0 : c.g[i]);
    judge(c, 1e-6, 1e-5);
  }
  SECTION("the lower bound swept") {
    for (const double low : {-1.0, -2.0, -3.0, -4.0, -5.0}) {
      std::fill(c.g.begin(), c.g.end(), low);
      judge(c, 1e-6, 1e-5);
    }
  }
}

TEST_CASE("KdaStep: token by token equals the chunk form, in place") {
  Cpu cpu;
  const std::int64_t T = 37, H = 3, K = 10, V = 70;
  const auto c = random_case({0, T}, H, K, V, 31);
  const auto expected = run_core(cpu, c, {.backward = false});
  const Tensor state({1, H, K, V}, DType::f64, c.s0);
  Values o;
  for (std::int64_t t = 0; t < T; ++t) {
    const auto row = [&](const Values& v, std::int64_t width) {
      return Values(v.begin() + t * H * width, v.begin() + (t + 1) * H * width);
    };
    const Tensor q({1, H, K}, DType::f64, row(c.q, K)), k({1, H, K}, DType::f64, row(c.k, K)),
        v({1, H, V}, DType::f64, row(c.v, V)), g({1, H, K}, DType::f64, row(c.g, K)),
        beta({1, H}, DType::f64, row(c.beta, 1)), out({1, H, V}, DType::f64);
    cpu.run(KdaStep{
        .o = out, .s_out = state, .q = q, .k = k, .v = v, .g = g, .beta = beta, .s_in = state});
    const auto values = out.values();
    o.insert(o.end(), values.begin(), values.end());
  }
  CHECK(relative_error(o, expected.o) < 1e-12);
  CHECK(relative_error(state.values(), expected.s_final) < 1e-12);
}

TEST_CASE("KdaChunk: wrong arguments are refused") {
  const auto c = random_case({0, 4}, 1, 4, 4, 37);
  Cpu cpu;
  CHECK_THROWS_AS(run_core(cpu, c, {.chunk_size = 24}), InternalError);
  auto broken = c;
  broken.cu = {0, 3};  // tensors hold four tokens
  const Tensor q(c.keys(), DType::f64, c.q), v(c.rows(), DType::f64, c.v),
      beta(c.heads(), DType::f64, c.beta), o(c.rows(), DType::f64);
  CHECK_THROWS_AS(cpu.run(KdaChunkForward{.o = o,
                                          .q = q,
                                          .k = q,
                                          .v = v,
                                          .g = q,
                                          .beta = beta,
                                          .cu_seqlens = documents_tensor(broken.cu)}),
                  InternalError);
}
