#include "kernels/ops/vocab_loss.h"

#include "kernels/checks.h"

namespace moesaic {
namespace {

void check_gradient(const ConstTensorView& dlogits,
                    const ConstTensorView& logits,
                    const ConstTensorView& divisor) {
  if (dlogits.empty()) return;
  check_shape(dlogits, logits.shape(), "dlogits");
  MOESAIC_CHECK(dlogits.dtype() == logits.dtype() ||
                    (logits.dtype() == DType::f32 && dlogits.dtype() == DType::bf16),
                "dlogits must have the type of logits, or bf16 next to f32");
  check_scalar(divisor, logits.dtype(), "divisor");
}

}  // namespace

void CrossEntropy::check() const {
  MOESAIC_CHECK(logits.rank() == 2 && logits.dim(1) > 0, "logits must be [rows, vocabulary]");
  check_shape(targets, {logits.dim(0)}, "targets");
  check_dtype(targets, DType::i32, "targets");
  if (!weight.empty()) check_acc(weight, {logits.dim(0)}, logits.dtype(), "weight");
  if (!logp.empty()) check_acc(logp, {logits.dim(0)}, logits.dtype(), "logp");
  check_scalar(loss_sum, logits.dtype(), "loss_sum");
  if (!z_sum.empty()) check_scalar(z_sum, logits.dtype(), "z_sum");
  check_gradient(dlogits, logits, divisor);
}
OpCost CrossEntropy::cost() const {
  return {10.0 * static_cast<double>(logits.numel()), total_bytes({logits, dlogits})};
}

void VocabDivergence::check() const {
  MOESAIC_CHECK(logits.rank() == 2 && logits.dim(1) > 0, "logits must be [rows, vocabulary]");
  check_like(teacher, logits, "teacher");
  if (!mask.empty()) check_acc(mask, {logits.dim(0)}, logits.dtype(), "mask");
  check_scalar(loss_sum, logits.dtype(), "loss_sum");
  check_gradient(dlogits, logits, divisor);
}
OpCost VocabDivergence::cost() const {
  return {25.0 * static_cast<double>(logits.numel()), total_bytes({logits, teacher, dlogits})};
}

}  // namespace moesaic
