#include "core/nn/token_slices.h"

#include <vector>

#include <fmt/format.h>

namespace moesaic {

TokenSlices::TokenSlices(int rank, int size, Communicator* group)
    : rank_(rank), size_(size), group_(group) {
  MOESAIC_CHECK(group == nullptr || (group->rank() == rank && group->size() == size),
                "another group");
}

std::int64_t TokenSlices::own(std::int64_t tokens) const {
  MOESAIC_CHECK(tokens % size_ == 0,
                fmt::format("{} tokens do not divide among {} ranks", tokens, size_));
  return tokens / size_;
}

ConstTensorView TokenSlices::own_rows(ConstTensorView whole) const {
  const std::int64_t n = own(whole.dim(0));
  return whole.rows(rank_ * n, (rank_ + 1) * n);
}

void TokenSlices::gather(TensorView whole, ConstTensorView own, Stream& stream) const {
  if (group_ != nullptr) group_->all_gather(whole, own, stream);
}

void TokenSlices::sum_to_own(TensorView own, ConstTensorView whole, Stream& stream) const {
  if (group_ != nullptr) group_->reduce_scatter(own, whole, ReduceOp::sum, stream);
}

void TokenSlices::pass_on(TensorView from_previous, ConstTensorView to_next, Stream& stream) const {
  shift(from_previous, to_next, 1, stream);
}

void TokenSlices::pass_back(TensorView from_next,
                            ConstTensorView to_previous,
                            Stream& stream) const {
  shift(from_next, to_previous, -1, stream);
}

void TokenSlices::exchange(std::span<const ConstTensorView> to_peer,
                           std::span<const TensorView> from_peer,
                           int peer,
                           Stream& stream) const {
  if (group_ == nullptr) return;
  std::vector<OutgoingMessage> sends;
  std::vector<IncomingMessage> receives;
  for (const ConstTensorView& out : to_peer)
    sends.push_back({out, peer});
  for (const TensorView& in : from_peer)
    receives.push_back({in, peer});
  group_->exchange(sends, receives, stream);
}

void TokenSlices::shift(TensorView in, ConstTensorView out, int step, Stream& stream) const {
  if (group_ == nullptr) return;
  std::vector<OutgoingMessage> sends;
  std::vector<IncomingMessage> receives;
  if (const int to = rank_ + step; to >= 0 && to < size_) sends.push_back({out, to});
  if (const int from = rank_ - step; from >= 0 && from < size_) receives.push_back({in, from});
  group_->exchange(sends, receives, stream);
}

}  // namespace moesaic
