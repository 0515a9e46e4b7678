#pragma once
#include <cstdint>
#include <functional>

#include "comm/communicator.h"
#include "core/data/dataset.h"
#include "core/train/run_sink.h"

namespace moesaic {

struct EvalStats {
  double loss = 0;  ///< nats per predicted token
  std::int64_t predicted_tokens = 0;
};

/// Cross-entropy over all windows of a set, `micro` of them to a batch. `loss_of`: the sum over a batch's labels, nats.
/// Batches are dealt to the ranks in turn, their sums gathered, and added in f64 in the order of the batches, so that every
/// number of ranks gets the same bits. `world` null: one rank. `in_step`: all ranks call `loss_of` equally often, those that
/// have run out of batches once more, for nothing. `progress`, if any, counts the batches of this rank. The
/// result is the same on all ranks.
EvalStats evaluate_windows(const data::ValidationSet& windows,
                           std::int64_t micro,
                           Communicator* world,
                           bool in_step,
                           const std::function<double(const data::Batch&)>& loss_of,
                           Progress* progress = nullptr);

}  // namespace moesaic
