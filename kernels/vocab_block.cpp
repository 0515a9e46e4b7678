#include "kernels/ops/vocab_block.h"

#include "kernels/vocab_checks.h"

namespace moesaic {

void VocabBlockSums::check() const {
  MOESAIC_CHECK(logits.rank() == 2 && logits.dim(1) > 0, "logits must be [rows, words]");
  check_acc(sums, {logits.dim(0), 2}, logits.dtype(), "sums");
}
OpCost VocabBlockSums::cost() const {
  return {5.0 * static_cast<double>(logits.numel()), total_bytes({logits, sums})};
}

void VocabBlockCrossEntropy::check() const {
  check_cross_entropy(*this);
  MOESAIC_CHECK(sums.rank() == 3, "sums must be [blocks, rows, 2]");
  check_acc(sums, {sums.dim(0), logits.dim(0), 2}, logits.dtype(), "sums");
  MOESAIC_CHECK(0 <= block && block < blocks(), "no such block of the vocabulary");
}
OpCost VocabBlockCrossEntropy::cost() const {
  return {5.0 * static_cast<double>(logits.numel()),
          total_bytes({dlogits.empty() ? ConstTensorView() : logits, dlogits, sums})};
}

}  // namespace moesaic
