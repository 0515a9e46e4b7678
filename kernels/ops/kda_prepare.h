#pragma once
#include <optional>

#include "kernels/ops/op.h"

namespace moesaic {

/// Raw head vectors to the operands of the KDA core.
///
///   q = K^-1/2 L2(q_raw),  k = L2(k_raw),   L2(x) = x rstd,  rstd = (sum x^2 + 1e-6)^-1/2  per
///   head g = g_min sigma(e^A (z + b))            bounded gate (g_min < 0 given): g in (g_min, 0)
///   g = -e^A softplus(z + b)                otherwise
///   beta = sigma(beta_logit)
///
///   q_raw, k_raw, q, k  [T, H, K]  f64 | f32 | bf16; q may alias q_raw, k may alias k_raw
///   z                   [T, H, K]  type of q_raw;  beta_logit [T, H] type of q_raw or its acc_t
///   a_log               any shape with at least H entries, stored flat; entry h belongs to head h,
///   the rest is padding dt_bias             [H*K] or [H, K]; it is added before the scale e^A g
///   [T, H, K]  acc_t;  beta, q_rstd, k_rstd [T, H] acc_t
///
/// a_log and dt_bias are of the acc_t. Backward needs q, k and the two rstd, not the raw vectors.
/// Source: SPEC 1.1, 1.3.
struct KdaPrepareForward {
  static constexpr const char* kName = "kda_prepare_forward";
  TensorView q;
  TensorView k;
  TensorView g;
  TensorView beta;
  TensorView q_rstd;
  TensorView k_rstd;
  ConstTensorView q_raw;
  ConstTensorView k_raw;
  ConstTensorView z;
  ConstTensorView beta_logit;
  ConstTensorView a_log;
  ConstTensorView dt_bias;
  std::optional<double> g_min = {};  ///< empty selects the softplus gate
  double eps = 1e-6;

  void check() const;
  OpCost cost() const;
};

/// Gradients of KdaPrepareForward (SPEC 1.3, 1.7); the derivatives of a saturated gate are formed
/// from sigma(-x), so that small ones are not lost.
///
///   dq, dk                [T, H, K]  type of q (gradients of the normalised vectors)
///   dg [T, H, K], dbeta [T, H]       acc_t
///   q, k                  [T, H, K]  results of forward, q_rstd, k_rstd too
///   dq_raw, dk_raw, dz    type of q; overwritten; dq_raw may alias dq, dk_raw may alias dk
///   dbeta_logit           type of beta_logit; overwritten
///   da_log, ddt_bias      acc_t, shapes of a_log and dt_bias; accumulate (padding of a_log is left
///   alone); empty = frozen
///
/// Sums over tokens run over fixed blocks of 64 tokens, then over the blocks in order.
struct KdaPrepareBackward {
  static constexpr const char* kName = "kda_prepare_backward";
  TensorView dq_raw;
  TensorView dk_raw;
  TensorView dz;
  TensorView dbeta_logit;
  TensorView da_log = {};
  TensorView ddt_bias = {};
  ConstTensorView dq;
  ConstTensorView dk;
  ConstTensorView dg;
  ConstTensorView dbeta;
  ConstTensorView q;
  ConstTensorView k;
  ConstTensorView q_rstd;
  ConstTensorView k_rstd;
  ConstTensorView z;
  ConstTensorView beta_logit;
  ConstTensorView a_log;
  ConstTensorView dt_bias;
  std::optional<double> g_min = {};

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const KdaPrepareForward& op);
void launch(CpuContext& context, const KdaPrepareBackward& op);
void launch(CudaContext& context, const KdaPrepareForward& op);
void launch(CudaContext& context, const KdaPrepareBackward& op);

}  // namespace moesaic
