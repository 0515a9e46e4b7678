#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

constexpr std::int32_t kIgnoredTarget = -100;

/// Cross-entropy of a chunk of rows, value and gradient (SPEC 9). With p = softmax(logits), w_t = weight of row t (0 when
/// its target is -100) and lse = log sum exp:
///
///   loss_sum += sum_t w_t (lse_t - logits[t, target_t])
///   z_sum    += sum_t w_t lse_t^2
///   dlogits   = grad_scale / divisor * w_t (p - onehot(target_t) + 2 z_coef lse_t p)
///
///   logits    [rows, vocabulary]  f64 | f32 | bf16
///   targets   [rows] i32
///   weight    [rows] acc_t        optional (1)
///   divisor   scalar acc_t        read inside the stream: the global sum of weights; only used with dlogits
///   dlogits   [rows, vocabulary]  optional; the type of logits (may then alias them) or bf16 from f32 logits
///   loss_sum  scalar acc_t        accumulates; not divided
///   z_sum     scalar acc_t        optional; accumulates; not divided
///   logp      [rows] acc_t        optional: log p of the target, 0 on ignored rows
///
/// Everything in acc_t. Row sums are added in row order.
struct CrossEntropy {
  static constexpr const char* kName = "cross_entropy";
  TensorView loss_sum{};
  TensorView z_sum{};
  TensorView logp{};
  TensorView dlogits{};
  ConstTensorView logits{};
  ConstTensorView targets{};
  ConstTensorView weight{};
  ConstTensorView divisor{};
  double z_coef = 0.0;
  double grad_scale = 1.0;

  void check() const;
  OpCost cost() const;
};

enum class DivergenceKind : std::uint8_t {
  forward_kl,  ///< sum_v p_v (log p_v - log q_v)
  reverse_kl,  ///< sum_v q_v (log q_v - log p_v)
  lk,  ///< -log sum_v min(p_v, q_v): minus the log of the acceptance rate of speculative decoding
};

/// A divergence between q = softmax(logits) and the constant p = softmax(teacher) per row (SPEC 9):
///
///   loss_sum += sum_t mask_t D(p_t, q_t),    dlogits = grad_scale / divisor * mask_t dD/dlogits
///
///   logits, teacher  [rows, vocabulary]  one type
///   mask             [rows] acc_t        optional (1)
///   divisor, dlogits, loss_sum           as in CrossEntropy
///
/// lk: where p_v = q_v exactly the gradient takes half of q_v's part (the mean of both sides).
struct VocabDivergence {
  static constexpr const char* kName = "vocab_divergence";
  TensorView loss_sum{};
  TensorView dlogits{};
  ConstTensorView logits{};
  ConstTensorView teacher{};
  ConstTensorView mask{};
  ConstTensorView divisor{};
  DivergenceKind kind = DivergenceKind::forward_kl;
  double grad_scale = 1.0;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const CrossEntropy& op);
void launch(CpuContext& context, const VocabDivergence& op);
void launch(CudaContext& context, const CrossEntropy& op);
void launch(CudaContext& context, const VocabDivergence& op);

}  // namespace moesaic
