#pragma once
#include <span>

#include "core/base/tensor.h"
#include "memory/stream.h"
#include "parallel/mesh.h"

namespace moesaic {

/// Tokens of a micro-batch, cut into equal runs over the ranks of a group: rank r holds run r of all of them. What is
/// the same for every token (norms, residual sums, routing) is computed on a rank's own run. Around a part whose weights
/// are split over the group (attention by heads, inner widths of an MLP) all ranks gather the whole, form their share of
/// the output for every token, and each receives the sum of the shares for its own run. Backward of the one is the other.
/// All ranks of the group call the same in the same order.
class TokenSlices {
 public:
  /// `group`: the ranks, in the order of their runs; null to measure memory, where nothing is ever sent.
  TokenSlices(int rank, int size, Communicator* group);
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Tokens of a run.
  std::int64_t own(std::int64_t tokens) const;
  /// This rank's run of a tensor of all tokens, [tokens, …].
  ConstTensorView own_rows(ConstTensorView whole) const;

  /// whole [tokens, …] = the runs of all ranks; `own` [tokens / size, …], which may be own_rows(whole). Any dtype.
  void gather(TensorView whole, ConstTensorView own, Stream& stream) const;
  /// own = this rank's run of the sum over ranks of `whole`, in rank order. f64, f32, bf16 (summed in f32, rounded once).
  void sum_to_own(TensorView own, ConstTensorView whole, Stream& stream) const;
  /// Whoever has a next rank sends it `to_next`; whoever has a previous one receives its into `from_previous`, else that
  /// stays as it is. Of one shape, any dtype.
  void pass_on(TensorView from_previous, ConstTensorView to_next, Stream& stream) const;
  /// The other way.
  void pass_back(TensorView from_next, ConstTensorView to_previous, Stream& stream) const;
  /// Messages to and from one other rank, of equal shapes on both; all ranks call it, those without a part in it with none.
  void exchange(std::span<const ConstTensorView> to_peer,
                std::span<const TensorView> from_peer,
                int peer,
                Stream& stream) const;

 private:
  void shift(TensorView in, ConstTensorView out, int step, Stream& stream) const;

  int rank_, size_;
  Communicator* group_;
};

}  // namespace moesaic
