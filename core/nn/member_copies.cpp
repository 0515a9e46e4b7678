// Copies of members on other ranks than their own: memory for their weights and gradients, and the table of turns that kernels
// read.
#include <algorithm>

#include "core/nn/parameter_store.h"

namespace moesaic {
namespace {

constexpr std::size_t kAlign = 64;
std::size_t bytes_of(std::int64_t elements, DType dtype) {
  return (byte_size(dtype) * static_cast<std::size_t>(elements) + kAlign - 1) / kAlign * kAlign;
}

}  // namespace

std::int64_t ParameterStore::copy_slots(const Storage& storage) const {
  if (storage.params.empty()) return 0;
  const PlacesId by = spec(storage.params.front()).places;
  return by.valid() ? at(by).copies.slots : 0;
}

std::int64_t ParameterStore::places_here(StorageId id) const {
  return at(id).members + copy_slots(at(id));
}

// All gradients first, so that they are one span.
void ParameterStore::allocate_copies() {
  std::size_t grads = 0, others = 0;
  for (const Storage& s : storages_) {
    const std::int64_t slots = copy_slots(s), elements = slots * s.rows * s.cols;
    if (slots == 0) continue;
    if (!s.grad.empty()) grads += bytes_of(elements, precision_.grad);
    others += bytes_of(elements, s.dtype) + bytes_of(slots, DType::i32);
  }
  if (others == 0) return;
  copies_memory_ = allocate(grads + others, "expert replicas");
  copied_grads_ = copies_memory_.view(
      {static_cast<std::int64_t>(grads / byte_size(precision_.grad))}, precision_.grad);
  std::size_t grad_at = 0, at_byte = grads;
  for (Storage& s : storages_) {
    const std::int64_t slots = copy_slots(s);
    if (slots == 0) continue;
    const Shape shape{slots, s.rows, s.cols};
    if (!s.grad.empty()) {
      s.copies.grad = copies_memory_.view(shape, precision_.grad, grad_at);
      grad_at += bytes_of(shape.numel(), precision_.grad);
    }
    s.copies.weight = copies_memory_.view(shape, s.dtype, at_byte);
    at_byte += bytes_of(shape.numel(), s.dtype);
    s.copies.slots = copies_memory_.view({slots}, DType::i32, at_byte);
    at_byte += bytes_of(slots, DType::i32);
  }

  std::size_t bytes = 0;
  const auto table_bytes = [](const Places& p) {
    return bytes_of(static_cast<std::int64_t>(p.copies.place_of_turn.size()), DType::i32);
  };
  for (const Places& p : places_)
    bytes += table_bytes(p);
  turns_memory_ = allocate(bytes, "expert replicas");
  turns_host_ = pretend_ ? Buffer::pretend(bytes, kCpu)
                         : make_host_buffer(bytes, device_, "turns of replicas, host");
  std::size_t begin = 0;
  for (Places& p : places_) {
    if (p.copies.slots == 0) continue;
    const Shape shape{static_cast<std::int64_t>(p.of_member.size()), kReplicaTurns};
    p.turns = turns_memory_.view(shape, DType::i32, begin);
    p.turns_host = turns_host_.view(shape, DType::i32, begin);
    p.on_device = p.turns;
    begin += table_bytes(p);
  }
}

// Empty slots are read by nobody, but must not hold what a product of no rows could trip over.
void ParameterStore::initialize_copies(Stream& stream) {
  if (turns_memory_.bytes() == 0) return;
  for (Storage& s : storages_) {
    if (s.copies.slots.empty()) continue;
    zero_tensor(s.copies.weight, stream);
    const Buffer staging(s.copies.slots.bytes(), kCpu, "initial values");
    const TensorView host = staging.view(s.copies.slots.shape(), DType::i32);
    for (std::int64_t c = 0; c < host.numel(); ++c)
      host.as<std::int32_t>()[c] = static_cast<std::int32_t>(c);
    copy_tensor(s.copies.slots, host, stream);
    stream.synchronize();
  }
  for (std::size_t i = 0; i < places_.size(); ++i)
    set_copies({static_cast<std::int32_t>(i)}, places_[i].copies, stream);
  stream.synchronize();
}

void ParameterStore::set_copies(PlacesId id, ExpertCopies copies, Stream& stream) {
  Places& p = at(id);
  MOESAIC_CHECK(copies.slots == p.copies.slots && copies.ranks == p.copies.ranks &&
                    copies.place_of_turn.size() == p.copies.place_of_turn.size(),
                "copies for the slots that there are");
  if (copies.slots == 0) return;
  p.copies = std::move(copies);
  std::copy(p.copies.place_of_turn.begin(),
            p.copies.place_of_turn.end(),
            p.turns_host.as<std::int32_t>());
  copy_tensor(p.turns, p.turns_host, stream);
}

}  // namespace moesaic
