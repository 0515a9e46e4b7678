#include "kernels/ops/kda_prepare.h"

#include "tests/ops/kda_support.h"
#include "tests/support/catch.h"

using namespace moesaic;
using namespace moesaic::kda_test;

namespace {

constexpr std::int64_t kHeads = 2, kSize = 5, kStored = 4;  // A_log is stored with padding

struct PrepareCase {
  std::int64_t tokens;
  Values q, k, z, logit, a_log, bias;
  Values dq, dk, dg, dbeta;
  std::optional<double> g_min;
  Shape keys() const { return {tokens, kHeads, kSize}; }
  Shape heads() const { return {tokens, kHeads}; }
};

PrepareCase random_prepare(std::int64_t tokens, std::optional<double> g_min, unsigned seed) {
  Random random(seed);
  const std::int64_t n = tokens * kHeads * kSize;
  PrepareCase c{tokens,
                random.normal(n),
                random.normal(n),
                random.normal(n, 2.0),
                random.normal(tokens * kHeads),
                random.normal(kStored, 0.5),
                random.normal(kHeads * kSize),
                random.normal(n),
                random.normal(n),
                random.normal(n),
                random.normal(tokens * kHeads),
                g_min};
  return c;
}

struct PrepareResult {
  Values q, k, g, beta, dq_raw, dk_raw, dz, dlogit, da_log, dbias;
};

PrepareResult run_prepare(Cpu& cpu, const PrepareCase& c, DType t) {
  const DType a = wide(t);
  const Tensor qr(c.keys(), t, c.q), kr(c.keys(), t, c.k), z(c.keys(), t, c.z),
      logit(c.heads(), t, c.logit), a_log({kStored}, a, c.a_log), bias({kHeads * kSize}, a, c.bias);
  const Tensor q(c.keys(), t), k(c.keys(), t), g(c.keys(), a), beta(c.heads(), a),
      q_rstd(c.heads(), a), k_rstd(c.heads(), a);
  cpu.run(KdaPrepareForward{.q = q,
                            .k = k,
                            .g = g,
                            .beta = beta,
                            .q_rstd = q_rstd,
                            .k_rstd = k_rstd,
                            .q_raw = qr,
                            .k_raw = kr,
                            .z = z,
                            .beta_logit = logit,
                            .a_log = a_log,
                            .dt_bias = bias,
                            .g_min = c.g_min});
  const Tensor dq(c.keys(), t, c.dq), dk(c.keys(), t, c.dk), dg(c.keys(), a, c.dg),
      dbeta(c.heads(), a, c.dbeta);
  const Tensor dz(c.keys(), t), dlogit(c.heads(), t), da_log({kStored}, a),
      dbias({kHeads * kSize}, a);
  da_log.zero();
  dbias.zero();
  cpu.run(KdaPrepareBackward{.dq_raw = dq,
                             .dk_raw = dk,
                             .dz = dz,
                             .dbeta_logit = dlogit,
                             .da_log = da_log,
                             .ddt_bias = dbias,
                             .dq = dq,
                             .dk = dk,
                             .dg = dg,
                             .dbeta = dbeta,
                             .q = q,
                             .k = k,
                             .q_rstd = q_rstd,
                             .k_rstd = k_rstd,
                             .z = z,
                             .beta_logit = logit,
                             .a_log = a_log,
                             .dt_bias = bias,
                             .g_min = c.g_min});
  return {q.values(),
          k.values(),
          g.values(),
          beta.values(),
          dq.values(),
          dk.values(),
          dz.values(),
          dlogit.values(),
          da_log.values(),
          dbias.values()};
}

double loss(Cpu& cpu, const PrepareCase& c) {
  const auto r = run_prepare(cpu, c, DType::f64);
  return dot(r.q, c.dq) + dot(r.k, c.dk) + dot(r.g, c.dg) + dot(r.beta, c.dbeta);
}

}  // namespace

TEST_CASE("KdaPrepare: gradients are those of finite differences, for both gates") {
  Cpu cpu;
  for (const std::optional<double> g_min : {std::optional<double>(-5.0), std::optional<double>()}) {
    auto c = random_prepare(3, g_min, 41);
    for (std::int64_t i = 0; i < kSize; ++i)
      c.z[static_cast<std::size_t>(i)] = -c.bias[static_cast<std::size_t>(i)];  // z + b = 0 exactly
    const auto r = run_prepare(cpu, c, DType::f64);
    const auto differs = [&](Values PrepareCase::*field, const Values& gradient) {
      const auto fd = central_differences(c.*field, 1e-5, [&](const Values& x) {
        auto moved = c;
        moved.*field = x;
        return loss(cpu, moved);
      });
      return relative_error(gradient, fd);
    };
    CHECK(differs(&PrepareCase::q, r.dq_raw) < 1e-8);
    CHECK(differs(&PrepareCase::k, r.dk_raw) < 1e-8);
    CHECK(differs(&PrepareCase::z, r.dz) < 1e-8);
    CHECK(differs(&PrepareCase::logit, r.dlogit) < 1e-8);
    CHECK(differs(&PrepareCase::a_log, r.da_log) < 1e-8);
    CHECK(differs(&PrepareCase::bias, r.dbias) < 1e-8);
    CHECK(r.da_log[2] == 0.0);  // padding
  }
}

TEST_CASE("KdaPrepare: lower precision, saturated gates, a zero row") {
  Cpu cpu;
  for (const std::optional<double> g_min : {std::optional<double>(-5.0), std::optional<double>()}) {
    auto c = random_prepare(150, g_min, 43);
    for (auto* v : {&c.q, &c.k, &c.z, &c.logit, &c.dq, &c.dk}) {
      for (auto& x : *v)
        x = static_cast<float>(bf16(x));  // the same inputs in every dtype
    }
    for (std::int64_t i = 0; i < kSize; ++i)
      c.q[static_cast<std::size_t>(i)] = 0.0;
    const auto exact = run_prepare(cpu, c, DType::f64);
    CHECK(exact.dq_raw[0] == Approx(1000.0 * c.dq[0] / std::sqrt(static_cast<double>(kSize))));
    for (const auto& [dtype, limit] : {std::pair{DType::f32, 2e-6}, std::pair{DType::bf16, 1e-2}}) {
      const auto r = run_prepare(cpu, c, dtype);
      CHECK(relative_error(r.q, exact.q) < limit);
      CHECK(relative_error(r.k, exact.k) < limit);
      CHECK(relative_error(r.g, exact.g) < 2e-6);
      CHECK(relative_error(r.beta, exact.beta) < 2e-6);
      CHECK(relative_error(r.dq_raw, exact.dq_raw) < limit);
      CHECK(relative_error(r.dk_raw, exact.dk_raw) < limit);
      CHECK(relative_error(r.dz, exact.dz) < limit);
      CHECK(relative_error(r.dlogit, exact.dlogit) < limit);
      CHECK(relative_error(r.da_log, exact.da_log) < 1e-5);
      CHECK(relative_error(r.dbias, exact.dbias) < 1e-5);
    }
  }
  auto c = random_prepare(2, -5.0, 47);
  std::fill(c.a_log.begin(), c.a_log.end(), 0.0);
  std::fill(c.bias.begin(), c.bias.end(), 0.0);
  std::fill(c.z.begin(), c.z.end(), 30.0);  // 1 - sigma(30) is 9e-14: lost from a rounded sigma
  for (const DType dtype : {DType::f64, DType::f32}) {
    CHECK(run_prepare(cpu, c, dtype).dz[0] ==
          Approx(-5.0 * std::exp(-30.0) * c.dg[0]).epsilon(1e-5));
  }
}

TEST_CASE("KdaPrepare: any number of threads gives the same bits") {
  Cpu one(1), three(3);
  const auto c = random_prepare(200, -5.0, 53);
  const auto a = run_prepare(one, c, DType::f32), b = run_prepare(three, c, DType::f32);
  CHECK(a.q == b.q);
  CHECK(a.g == b.g);
  CHECK(a.dz == b.dz);
  CHECK(a.dq_raw == b.dq_raw);
  CHECK(a.da_log == b.da_log);
  CHECK(a.dbias == b.dbias);
}
