#include "kernels/ops/vocab_loss.h"

#include "kernels/vocab_checks.h"

namespace moesaic {

void CrossEntropy::check() const {
  check_cross_entropy(*this);
}
OpCost CrossEntropy::cost() const {
  return {10.0 * static_cast<double>(logits.numel()), total_bytes({logits, dlogits})};
}

void VocabDivergence::check() const {
  MOESAIC_CHECK(logits.rank() == 2 && logits.dim(1) > 0, "logits must be [rows, vocabulary]");
  check_like(teacher, logits, "teacher");
  if (!mask.empty()) check_acc(mask, {logits.dim(0)}, logits.dtype(), "mask");
  check_scalar(loss_sum, logits.dtype(), "loss_sum");
  check_logit_gradient(dlogits, logits, divisor);
}
OpCost VocabDivergence::cost() const {
  return {25.0 * static_cast<double>(logits.numel()), total_bytes({logits, teacher, dlogits})};
}

}  // namespace moesaic
