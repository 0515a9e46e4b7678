// Where the members of families are: the table on the host, and what kernels read of it.
#include <numeric>

#include "core/nn/parameter_store.h"

namespace moesaic {
namespace {

bool is_in_order(std::span<const std::int32_t> places) {
  for (std::size_t m = 0; m < places.size(); ++m)
    if (places[m] != static_cast<std::int32_t>(m)) return false;
  return true;
}

}  // namespace

PlacesId ParameterStore::declare_places(std::int64_t members, std::int64_t copy_slots) {
  MOESAIC_CHECK(!sealed_, "declarations come before seal()");
  const std::int64_t ranks = position_.extent(Axis::ep), here = members / ranks;
  Places p;
  p.of_member.resize(static_cast<std::size_t>(members));
  p.members_here.resize(static_cast<std::size_t>(here));
  std::iota(p.of_member.begin(), p.of_member.end(), 0);
  std::iota(p.members_here.begin(),
            p.members_here.end(),
            static_cast<std::int32_t>(here * position_.coordinate(Axis::ep)));
  if (copy_slots > 0 && ranks > 1)
    p.copies =
        no_copies(p.of_member, static_cast<int>(ranks), static_cast<std::int32_t>(copy_slots));
  places_.push_back(std::move(p));
  return {static_cast<std::int32_t>(places_.size() - 1)};
}

std::vector<StorageId> ParameterStore::storages_by(PlacesId id) const {
  std::vector<StorageId> list;
  for (std::size_t s = 0; s < storages_.size(); ++s) {
    const auto& ids = storages_[s].params;
    if (!ids.empty() && spec(ids.front()).places.index == id.index)
      list.push_back({static_cast<std::int32_t>(s)});
  }
  return list;
}

// The table, the numbers here, and those of the tensors of every storage.
std::int64_t ParameterStore::table_elements(PlacesId id) const {
  const auto here = static_cast<std::int64_t>(at(id).members_here.size());
  std::int64_t n = static_cast<std::int64_t>(at(id).of_member.size()) + here;
  for (const StorageId s : storages_by(id))
    n += here * static_cast<std::int64_t>(params_of(s).size());
  return n;
}

// On one rank nothing ever moves.
void ParameterStore::allocate_places() {
  if (position_.extent(Axis::ep) == 1 || places_.empty()) return;
  std::int64_t elements = 0;
  const auto id_of = [](std::size_t i) { return PlacesId{static_cast<std::int32_t>(i)}; };
  for (std::size_t i = 0; i < places_.size(); ++i)
    elements += table_elements(id_of(i));
  const std::size_t bytes = 4 * static_cast<std::size_t>(elements);
  places_memory_ = allocate(bytes, "expert places");
  places_host_ = pretend_ ? Buffer::pretend(bytes, kCpu)
                          : make_host_buffer(bytes, device_, "expert places, host");
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < places_.size(); ++i) {
    const std::int64_t n = table_elements(id_of(i));
    const std::size_t at_byte = 4 * static_cast<std::size_t>(begin);
    places_[i].table = places_memory_.view({n}, DType::i32, at_byte);
    places_[i].host = places_host_.view({n}, DType::i32, at_byte);
    begin += n;
  }
}

std::int64_t ParameterStore::number_of(ParamId id, std::int64_t member) const {
  const PlacesId by = spec(id).places;
  if (!by.valid()) return place(id).first_member + member;
  return at(by).members_here[static_cast<std::size_t>(member)];
}

ConstTensorView ParameterStore::numbers_here(ParamId id) const {
  const PlacesId by = spec(id).places;
  return by.valid() ? at(by).numbers : TensorView();
}

void ParameterStore::set_places(PlacesId id, std::span<const std::int32_t> places, Stream& stream) {
  Places& p = at(id);
  MOESAIC_CHECK(places.size() == p.of_member.size() && !p.table.empty(),
                "a table for the members of several ranks");
  const auto here = static_cast<std::int64_t>(p.members_here.size()),
             all = static_cast<std::int64_t>(places.size()),
             first = here * position_.coordinate(Axis::ep);
  std::vector<char> taken(places.size(), 0);
  for (std::size_t m = 0; m < places.size(); ++m) {
    MOESAIC_CHECK(
        places[m] >= 0 && places[m] < all && taken[static_cast<std::size_t>(places[m])]++ == 0,
        "every member has a place of its own");
    const std::int64_t number = places[m] - first;
    if (number >= 0 && number < here)
      p.members_here[static_cast<std::size_t>(number)] = static_cast<std::int32_t>(m);
  }
  p.of_member.assign(places.begin(), places.end());

  const bool in_order = is_in_order(places);
  auto* host = p.host.as<std::int32_t>();
  std::copy(places.begin(), places.end(), host);
  std::copy(p.members_here.begin(), p.members_here.end(), host + all);
  if (p.copies.slots > 0) {
    p.copies = no_copies(p.of_member, p.copies.ranks, p.copies.slots);
  } else {
    p.on_device = in_order ? TensorView() : p.table.rows(0, all);
  }
  p.numbers = in_order ? TensorView() : p.table.rows(all, all + here);
  std::int64_t begin = all + here;
  for (const StorageId s : storages_by(id)) {
    const auto each = static_cast<std::int64_t>(params_of(s).size());
    for (std::int64_t t = 0; t < here * each; ++t)
      host[begin + t] = static_cast<std::int32_t>(
          p.members_here[static_cast<std::size_t>(t / each)] * each + t % each);
    at(s).tensor_numbers = in_order ? TensorView() : p.table.rows(begin, begin + here * each);
    begin += here * each;
  }
  copy_tensor(p.table, p.host, stream);
}

}  // namespace moesaic
