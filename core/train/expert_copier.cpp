#include "core/train/expert_copier.h"

#include <algorithm>

#include "kernels/ops/elementwise.h"

namespace moesaic {
namespace {

PlacesId places_of(const ParameterStore& params, StorageId id) {
  const auto ids = params.params_of(id);
  return ids.empty() ? PlacesId{} : params.spec(ids.front()).places;
}

StorageId storage(std::size_t i) {
  return {static_cast<std::int32_t>(i)};
}

// A slot's elements [begin, end) of a tensor with slots.
TensorView part(const TensorView& slots, std::int64_t slot, std::int64_t begin, std::int64_t end) {
  const std::int64_t each = slots.numel() / slots.dim(0);
  return slots.reshaped({slots.numel()}).rows(slot * each + begin, slot * each + end);
}

PlacesOfExperts homes_of(const ParameterStore& params, PlacesId id) {
  const auto places = params.places(id);
  return {places.begin(), places.end()};
}

}  // namespace

std::size_t ExpertCopier::memory_bytes(const ParameterStore& params, std::size_t most_bytes) {
  std::size_t largest = 0;
  for (std::size_t i = 0; i < params.num_storages(); ++i) {
    const TensorView grad = params.copied_gradient(storage(i));
    if (!grad.empty())
      largest = std::max(largest, grad.bytes() / static_cast<std::size_t>(grad.dim(0)));
  }
  return std::min(largest, most_bytes);
}

ExpertCopier::ExpertCopier(const ParameterStore& params,
                           Communicator& group,
                           std::size_t most_bytes)
    : params_(params),
      group_(group),
      arriving_(params.allocate(memory_bytes(params, most_bytes), "gradients of expert replicas")) {
}

void ExpertCopier::send_weights(Stream& stream) {
  for (std::size_t i = 0; i < params_.num_storages(); ++i) {
    if (!params_.copied_weight(storage(i)).empty())
      send_weights(storage(i), places_of(params_, storage(i)), stream);
  }
}

void ExpertCopier::send_weights(StorageId id, PlacesId places, Stream& stream) {
  const TensorView weight = params_.storage_weight(id), copies = params_.copied_weight(id);
  const std::int64_t all = copies.numel() / copies.dim(0);
  for (const auto& round : rounds_of_copies(params_.copies(places), homes_of(params_, places))) {
    std::vector<OutgoingMessage> sends;
    std::vector<IncomingMessage> receives;
    for (const CopyOfExpert& copy : round) {
      if (copy.home == group_.rank())
        sends.push_back({part(weight, copy.number, 0, all), copy.rank});
      if (copy.rank == group_.rank())
        receives.push_back({part(copies, copy.slot, 0, all), copy.home});
    }
    group_.exchange(sends, receives, stream);
  }
}

void ExpertCopier::begin_step() {
  returned_from_ = static_cast<std::int32_t>(params_.num_storages());
}

void ExpertCopier::gradients_final_from(StorageId first, Backend& backend) {
  while (returned_from_ > first.index) {
    const StorageId id{--returned_from_};
    if (params_.copied_gradient(id).empty() || params_.grad(id).empty()) continue;
    return_gradients(id, places_of(params_, id), backend);
  }
}

// A home gets one of its copies' gradients a round.
void ExpertCopier::return_gradients(StorageId id, PlacesId places, Backend& backend) {
  const TensorView grad = params_.grad(id), copies = params_.copied_gradient(id);
  const std::int64_t all = copies.numel() / copies.dim(0),
                     most = static_cast<std::int64_t>(arriving_.bytes() / byte_size(grad.dtype()));
  for (const auto& round : rounds_of_copies(params_.copies(places), homes_of(params_, places))) {
    for (std::int64_t begin = 0; begin < all; begin += most) {
      const std::int64_t end = std::min(begin + most, all);
      const TensorView arriving = arriving_.view({end - begin}, grad.dtype());
      std::vector<OutgoingMessage> sends;
      std::vector<IncomingMessage> receives;
      TensorView sum;
      for (const CopyOfExpert& copy : round) {
        if (copy.rank == group_.rank())
          sends.push_back({part(copies, copy.slot, begin, end), copy.home});
        if (copy.home != group_.rank()) continue;
        receives.push_back({arriving, copy.rank});
        sum = part(grad, copy.number, begin, end);
      }
      group_.exchange(sends, receives, stream_of(backend));
      if (!sum.empty()) run(backend, Accumulate{.y = sum, .x = arriving});
    }
  }
}

}  // namespace moesaic
