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

inline TensorView loss_slot(const TensorView& losses, Loss which) {
  const int i = static_cast<int>(which);
  return losses.empty() ? TensorView() : losses.rows(i, i + 1);
}

}  // namespace moesaic
