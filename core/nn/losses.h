#pragma once
#include "core/base/tensor.h"

namespace moesaic {

/// Slots of the losses tensor [kNumLosses] of statistics type: sums over the micro-batches of a step. The model's
/// objective and its parts are accumulators, not return values, so that they need no order between stages.
enum class Loss : int {
  cross_entropy,  ///< sum of weighted negative log-likelihoods; divide by StepScalar::loss_divisor
  mtp,         ///< the same for the prediction one token further; divide by StepScalar::mtp_divisor
  indexer_kl,  ///< sum over tokens and layers; divide by StepScalar::tokens
  balance,     ///< auxiliary balancing losses, already weighted and divided
  router_z,    ///< already weighted and divided
  count_
};
constexpr int kNumLosses = static_cast<int>(Loss::count_);

/// The accumulators of one layer, or of what follows the layers: row `row` of [rows, kNumLosses], so that each sum is formed
/// in the order of the micro-batches whatever the order of the layers. Without rows, one for all.
inline TensorView loss_row(const TensorView& losses, std::int64_t row) {
  return losses.rank() < 2 ? losses : losses.rows(row, row + 1).reshaped({kNumLosses});
}

inline TensorView loss_slot(const TensorView& losses, Loss which) {
  const int i = static_cast<int>(which);
  return losses.empty() ? TensorView() : losses.rows(i, i + 1);
}

}  // namespace moesaic
