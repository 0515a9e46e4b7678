#include "memory/offload/offloader.h"

#include <utility>

#include "core/base/error.h"

namespace moesaic::offload {
namespace {
constexpr std::uint8_t kNotANumber = 0xff;

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}
}  // namespace

Offloader::Offloader(Plan plan, const Memory& memory, Stream::Mode mode, Disturbance disturbance)
    : plan_(std::move(plan)),
      disturbance_(std::move(disturbance)),
      memory_(memory),
      in_(memory.device.device(), "activations back", mode),
      out_(memory.device.device(), "activations out", mode),
      visited_(memory.device.device()),
      round_(memory.device.device()) {
  MOESAIC_CHECK(
      memory.device.bytes() >= plan_.device_bytes && memory.host.bytes() >= plan_.host_bytes,
      "too little memory for what is offloaded");
  const Device device = memory.device.device();
  std::size_t offset = 0;
  for (const std::size_t bytes : plan_.places) {
    offsets_.push_back(offset);
    offset += bytes;
    places_.push_back({Event(device), Event(device)});
  }
  for (std::size_t t = 0; t < plan_.tensors.size(); ++t)
    loaded_.emplace_back(device);
}

Offloader::~Offloader() {
  try {
    synchronize();
  } catch (...) {  // whoever cares has seen it already
  }
}

void Offloader::synchronize() {
  in_.synchronize();
  out_.synchronize();
}

TensorView Offloader::place_of(int t) const {
  const auto begin = static_cast<std::int64_t>(offsets_[at(tensor(t).place)]);
  return memory_.device.rows(begin, begin + static_cast<std::int64_t>(tensor(t).bytes));
}

TensorView Offloader::home_of(int t) const {
  const std::int64_t begin = tensor(t).home;
  return memory_.host.rows(begin, begin + static_cast<std::int64_t>(tensor(t).bytes));
}

void Offloader::begin_visit(Stream& user) {
  MOESAIC_CHECK(!is_inside_, "a visit begins inside another");
  is_inside_ = true;
  const Plan::Step& step = plan_.visits[next_];
  for (const int t : step.loads)
    load(t);
  for (const int t : step.awaits)
    user.wait(loaded_[at(t)]);
  for (const int t : step.writes)
    user.wait(places_[at(tensor(t).place)].copied_out);
}

void Offloader::end_visit(Stream& user) {
  MOESAIC_CHECK(is_inside_, "a visit ends that has not begun");
  is_inside_ = false;
  const Plan::Step& step = plan_.visits[next_];
  if (!step.stores.empty()) user.record(visited_);
  for (const int t : step.stores)
    store(t, visited_);
  for (const int t : step.leaves)
    give_back(t, user);
  if (++next_ < plan_.visits.size()) return;
  // Who comes without visits, as evaluation does, finds the places at rest.
  next_ = 0;
  out_.record(round_);
  user.wait(round_);
}

// What was there before has been used, and its copy out has been made; so has this tensor's own, which was begun there before.
void Offloader::load(int t) {
  const PlaceState& place = places_[at(tensor(t).place)];
  in_.wait(place.used);
  in_.wait(place.copied_out);
  if (disturbance_.before) disturbance_.before(in_);
  copy_tensor(place_of(t), home_of(t), in_);
  in_.record(loaded_[at(t)]);
}

// The home was read by a load of the life before, if at all, which `written` comes after.
void Offloader::store(int t, const Event& written) {
  out_.wait(written);
  if (disturbance_.before) disturbance_.before(out_);
  copy_tensor(home_of(t), place_of(t), out_);
  out_.record(places_[at(tensor(t).place)].copied_out);
}

void Offloader::give_back(int t, Stream& user) {
  PlaceState& place = places_[at(tensor(t).place)];
  user.record(place.used);
  if (!disturbance_.poison) return;
  out_.wait(place.used);
  fill_bytes(place_of(t), kNotANumber, out_);
  out_.record(place.copied_out);
}

}  // namespace moesaic::offload
