#pragma once
// What the check() of every loss over the vocabulary asks for.
#include "kernels/checks.h"

namespace moesaic {

/// `dlogits` may be empty; `divisor` is needed only with it.
inline void check_logit_gradient(const ConstTensorView& dlogits,
                                 const ConstTensorView& logits,
                                 const ConstTensorView& divisor) {
  if (dlogits.empty()) return;
  check_shape(dlogits, logits.shape(), "dlogits");
  MOESAIC_CHECK(dlogits.dtype() == logits.dtype() ||
                    (logits.dtype() == DType::f32 && dlogits.dtype() == DType::bf16),
                "dlogits must have the type of logits, or bf16 next to f32");
  check_scalar(divisor, logits.dtype(), "divisor");
}

/// The operands that cross-entropies share.
template <class Op>
void check_cross_entropy(const Op& op) {
  MOESAIC_CHECK(op.logits.rank() == 2 && op.logits.dim(1) > 0, "logits must be [rows, words]");
  const Shape rows{op.logits.dim(0)};
  const DType compute = op.logits.dtype();
  check_shape(op.targets, rows, "targets");
  check_dtype(op.targets, DType::i32, "targets");
  if (!op.weight.empty()) check_acc(op.weight, rows, compute, "weight");
  if (!op.logp.empty()) check_acc(op.logp, rows, compute, "logp");
  check_scalar(op.loss_sum, compute, "loss_sum");
  if (!op.z_sum.empty()) check_scalar(op.z_sum, compute, "z_sum");
  check_logit_gradient(op.dlogits, op.logits, op.divisor);
}

}  // namespace moesaic
