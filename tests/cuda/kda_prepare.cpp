#include "kernels/ops/kda_prepare.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType wide(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// Both sides round at the same places; the order of sums, the exponential and rounding to bf16 of almost equal numbers
// differ.
double elementwise_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 5e-6 : 1e-3;
}
// f32 also when the activations are bf16, whose fast exponential is off by |x| 6e-8.
double wide_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : 1e-5;
}

struct Case {
  std::int64_t tokens, heads, size;
  DType dtype, logit_dtype;
  std::optional<double> g_min;
  double z_mean = 0.0, z_spread = 1.0, a_mean = 0.5;
  bool in_place = false, frozen = false;
};

void check(BothBackends& both, const Case& c) {
  INFO(c.tokens << " x " << c.heads << " x " << c.size << " " << name(c.dtype) << ", logits "
                << name(c.logit_dtype) << ", g_min " << c.g_min.value_or(0) << ", z " << c.z_mean
                << " +- " << c.z_spread << ", A " << c.a_mean << ", in place " << c.in_place
                << ", frozen " << c.frozen);
  const Shape rows{c.tokens, c.heads, c.size}, per_head{c.tokens, c.heads};
  const DType t = c.dtype, a = wide(t);
  const Twin q_raw(rows, t), k_raw(rows, t), z(rows, t), q(rows, t), k(rows, t), g(rows, a),
      beta(per_head, a), q_rstd(per_head, a), k_rstd(per_head, a), logit(per_head, c.logit_dtype),
      a_log({c.heads + 2}, a), dt_bias({c.heads, c.size}, a);
  fill_normal(q_raw.initial.view(), 1, 2.0);
  fill_normal(k_raw.initial.view(), 2, 0.01);
  fill_normal(z.initial.view(), 3, c.z_spread, c.z_mean);
  fill_normal(logit.initial.view(), 4, 3.0);
  fill_normal(a_log.initial.view(), 5, 0.3, c.a_mean);
  fill_normal(dt_bias.initial.view(), 6);
  if (c.tokens > 1) {  // a row of zeros: normalised to zeros, with a large derivative
    dispatch_float(t, [&]<class T>(TypeTag<T>) {
      std::fill_n(q_raw.initial.data<T>() + c.size, c.size, T(0.0F));
    });
  }
  const Twin& q_out = c.in_place ? q_raw : q;
  const Twin& k_out = c.in_place ? k_raw : k;
  require_cuda_matches_cpu(
      both,
      {&q_raw, &k_raw, &z, &q, &k, &g, &beta, &q_rstd, &k_rstd, &logit, &a_log, &dt_bias},
      {{&q_out, elementwise_tolerance(t)},
       {&k_out, elementwise_tolerance(t)},
       {&g, wide_tolerance(t)},
       {&beta, wide_tolerance(t)},
       {&q_rstd, wide_tolerance(t)},
       {&k_rstd, wide_tolerance(t)}},
      [&](auto side) {
        return KdaPrepareForward{.q = side(q_out),
                                 .k = side(k_out),
                                 .g = side(g),
                                 .beta = side(beta),
                                 .q_rstd = side(q_rstd),
                                 .k_rstd = side(k_rstd),
                                 .q_raw = side(q_raw),
                                 .k_raw = side(k_raw),
                                 .z = side(z),
                                 .beta_logit = side(logit),
                                 .a_log = side(a_log),
                                 .dt_bias = side(dt_bias),
                                 .g_min = c.g_min};
      });
  // Backward starts from the CPU's results on both sides. Gradients come with a mean, so that sums over tokens are large
  // against their rounding errors.
  for (const auto* twin : {&q_out, &k_out, &q_rstd, &k_rstd}) {
    std::memcpy(twin->initial.view().data(), twin->host.view().data(), twin->host.view().bytes());
  }
  const Twin dq(rows, t), dk(rows, t), dg(rows, a), dbeta(per_head, a), dq_raw(rows, t),
      dk_raw(rows, t), dz(rows, t), dlogit(per_head, c.logit_dtype), da_log({c.heads + 2}, a),
      ddt_bias({c.heads, c.size}, a);
  fill_normal(dq.initial.view(), 11);
  fill_normal(dk.initial.view(), 12);
  fill_normal(dg.initial.view(), 13, 1.0, 0.5);
  fill_normal(dbeta.initial.view(), 14);
  for (const auto* twin : {&dq_raw, &dk_raw, &dz, &dlogit, &da_log, &ddt_bias})
    fill_normal(twin->initial.view(), 15, 0.1);
  const Twin& dq_out = c.in_place ? dq : dq_raw;
  const Twin& dk_out = c.in_place ? dk : dk_raw;
  require_cuda_matches_cpu(both,
                           {&dq,
                            &dk,
                            &dg,
                            &dbeta,
                            &dq_raw,
                            &dk_raw,
                            &dz,
                            &dlogit,
                            &da_log,
                            &ddt_bias,
                            &q_out,
                            &k_out,
                            &q_rstd,
                            &k_rstd,
                            &z,
                            &logit,
                            &a_log,
                            &dt_bias},
                           {{&dq_out, elementwise_tolerance(t)},
                            {&dk_out, elementwise_tolerance(t)},
                            {&dz, elementwise_tolerance(t)},
                            {&dlogit, elementwise_tolerance(c.logit_dtype == t ? t : a) * 2},
                            {&da_log, c.frozen ? 0 : wide_tolerance(t)},
                            {&ddt_bias, c.frozen ? 0 : wide_tolerance(t)}},
                           [&](auto side) {
                             return KdaPrepareBackward{
                                 .dq_raw = side(dq_out),
                                 .dk_raw = side(dk_out),
                                 .dz = side(dz),
                                 .dbeta_logit = side(dlogit),
                                 .da_log = c.frozen ? TensorView() : side(da_log),
                                 .ddt_bias = c.frozen ? TensorView() : side(ddt_bias),
                                 .dq = side(dq),
                                 .dk = side(dk),
                                 .dg = side(dg),
                                 .dbeta = side(dbeta),
                                 .q = side(q_out),
                                 .k = side(k_out),
                                 .q_rstd = side(q_rstd),
                                 .k_rstd = side(k_rstd),
                                 .z = side(z),
                                 .beta_logit = side(logit),
                                 .a_log = side(a_log),
                                 .dt_bias = side(dt_bias),
                                 .g_min = c.g_min};
                           });
}

const DType kTypes[][2] = {{DType::f64, DType::f64},
                           {DType::f32, DType::f32},
                           {DType::bf16, DType::bf16},
                           {DType::bf16, DType::f32}};

}  // namespace

TEST_CASE("KDA operands on CUDA match the CPU for all sizes", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  // (A head of one channel has no direction: its gradient is what rounding leaves of 1 - 1.)
  // Rows shorter than a lane's access, odd, seen at once by 16 or 32 lanes, longer; tokens around the blocks of 256.
  const std::int64_t sizes[][3] = {{1, 1, 2},
                                   {3, 2, 7},
                                   {17, 3, 8},
                                   {65, 2, 64},
                                   {300, 3, 128},
                                   {33, 1, 200},
                                   {257, 1, 256},
                                   {40, 2, 520},
                                   {9, 5, 33}};
  int flags = 0;
  for (const auto& s : sizes) {
    for (const auto& type : kTypes) {
      for (const auto g_min : {std::optional<double>(), std::optional<double>(-5.0)}) {
        ++flags;
        check(both,
              {s[0],
               s[1],
               s[2],
               type[0],
               type[1],
               g_min,
               0.0,
               1.0,
               0.5,
               flags % 3 == 0,
               flags % 5 == 0});
      }
    }
  }
}

TEST_CASE("KDA operands on CUDA match the CPU for saturated gates", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  // The derivative of a saturated bounded gate is e^-|x|: it must come out with its relative accuracy. Softplus' decays
  // reach -1600.
  for (const double mean : {-60.0, -20.0, 20.0, 60.0, 100.0}) {
    for (const auto g_min : {std::optional<double>(), std::optional<double>(-5.0)}) {
      check(both, {70, 2, 64, DType::f64, DType::f64, g_min, mean, 0.3, 0.0});
      check(both, {70, 2, 64, DType::f32, DType::f32, g_min, mean, 0.3, 0.0});
      if (mean < 50) check(both, {70, 2, 64, DType::bf16, DType::f32, g_min, mean, 0.3, 0.0});
    }
  }
  check(both, {70, 2, 64, DType::f32, DType::f32, {}, 0.0, 40.0, 2.7});
  check(both, {70, 2, 64, DType::bf16, DType::f32, {}, 0.0, 40.0, 2.7});
}

TEST_CASE("KDA operands on CUDA match the CPU for a large shape", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  check(both, {1500, 8, 128, DType::bf16, DType::bf16, -5.0});
  check(both, {1030, 8, 128, DType::bf16, DType::f32, {}});
}

TEST_CASE("KDA operands on CUDA: sums over more tokens than the blocks' number bounds", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  // More than 512 blocks of 256 tokens. The CPU adds blocks of 64 one after the other in f32.
  check(both, {140000, 1, 2, DType::f64, DType::f64, -5.0});
}

}  // namespace moesaic::test
