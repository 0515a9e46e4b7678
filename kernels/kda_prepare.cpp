#include "kernels/ops/kda_prepare.h"

namespace moesaic {
namespace {

DType wide(DType t) {
  return t == DType::f64 ? DType::f64 : DType::f32;
}

void check_as(const ConstTensorView& view, const Shape& shape, DType dtype, const char* what) {
  check_shape(view, shape, what);
  check_dtype(view, dtype, what);
}

/// Checks what both directions read; `q` gives tokens, heads, key size and the type of activations.
void check_inputs(const ConstTensorView& q,
                  const ConstTensorView& z,
                  const ConstTensorView& beta_logit,
                  const ConstTensorView& a_log,
                  const ConstTensorView& dt_bias,
                  const std::optional<double>& g_min) {
  MOESAIC_CHECK(q.rank() == 3, "q must be [tokens, heads, key size]");
  check_as(z, q.shape(), q.dtype(), "z");
  check_shape(beta_logit, {q.dim(0), q.dim(1)}, "beta_logit");
  MOESAIC_CHECK(beta_logit.dtype() == q.dtype() || beta_logit.dtype() == wide(q.dtype()),
                "beta_logit has another dtype than q or its acc_t");
  check_dtype(a_log, wide(q.dtype()), "a_log");
  check_dtype(dt_bias, wide(q.dtype()), "dt_bias");
  MOESAIC_CHECK(a_log.numel() >= q.dim(1), "a_log needs an entry per head");
  MOESAIC_CHECK(dt_bias.numel() == q.dim(1) * q.dim(2),
                "dt_bias needs an entry per head and channel");
  MOESAIC_CHECK(!g_min || *g_min < 0.0, "g_min must be negative");
}

}  // namespace

void KdaPrepareForward::check() const {
  check_inputs(q_raw, z, beta_logit, a_log, dt_bias, g_min);
  const DType t = q_raw.dtype(), a = wide(t);
  const Shape per_head{q_raw.dim(0), q_raw.dim(1)};
  check_as(k_raw, q_raw.shape(), t, "k_raw");
  check_as(q, q_raw.shape(), t, "q");
  check_as(k, q_raw.shape(), t, "k");
  check_as(g, q_raw.shape(), a, "g");
  check_as(beta, per_head, a, "beta");
  check_as(q_rstd, per_head, a, "q_rstd");
  check_as(k_rstd, per_head, a, "k_rstd");
}

OpCost KdaPrepareForward::cost() const {
  return {20.0 * static_cast<double>(q_raw.numel()),
          static_cast<double>(5 * q_raw.bytes() + g.bytes())};
}

void KdaPrepareBackward::check() const {
  check_inputs(q, z, beta_logit, a_log, dt_bias, g_min);
  const DType t = q.dtype(), a = wide(t);
  const Shape per_head{q.dim(0), q.dim(1)};
  check_as(k, q.shape(), t, "k");
  check_as(dq, q.shape(), t, "dq");
  check_as(dk, q.shape(), t, "dk");
  check_as(dg, q.shape(), a, "dg");
  check_as(dbeta, per_head, a, "dbeta");
  check_as(q_rstd, per_head, a, "q_rstd");
  check_as(k_rstd, per_head, a, "k_rstd");
  check_as(dq_raw, q.shape(), t, "dq_raw");
  check_as(dk_raw, q.shape(), t, "dk_raw");
  check_as(dz, q.shape(), t, "dz");
  check_as(dbeta_logit, per_head, beta_logit.dtype(), "dbeta_logit");
  if (!da_log.empty()) check_as(da_log, a_log.shape(), a, "da_log");
  if (!ddt_bias.empty()) check_as(ddt_bias, dt_bias.shape(), a, "ddt_bias");
}

OpCost KdaPrepareBackward::cost() const {
  return {30.0 * static_cast<double>(q.numel()), static_cast<double>(8 * q.bytes() + dg.bytes())};
}

}  // namespace moesaic
