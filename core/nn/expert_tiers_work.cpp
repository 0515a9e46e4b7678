// Experts in use: passes over the members of a storage, members for the optimizer, parts of them on the host.
#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/nn/expert_tiers_impl.h"

namespace moesaic {

std::vector<std::int64_t> ExpertTiers::Impl::members_of(const MemberVisit& visit,
                                                        std::int64_t members) {
  MOESAIC_CHECK(visit.rows.empty() || static_cast<std::int64_t>(visit.rows.size()) == members,
                "rows of each member");
  std::vector<std::int64_t> list;
  for (std::int64_t m = 0; m < members; ++m)
    if (visit.rows.empty() || visit.rows[static_cast<std::size_t>(m)] > 0) list.push_back(m);
  if (visit.kind == tiers::VisitKind::backward) std::reverse(list.begin(), list.end());
  return list;
}

// A run ends where the members that only pass through the cache would take more than their share of slots. Members without
// rows inside it get any slot in the table: kernels do not come to it.
void ExpertTiers::Impl::in_runs(BlockTier& tier,
                                const TensorView& slots,
                                const std::function<tiers::Block(std::int64_t member)>& block_of,
                                const std::vector<std::int64_t>& members,
                                Stream& stream,
                                const Bring& bring,
                                const MemberWork& work) {
  const std::int64_t most = tier.at_once();
  std::vector<std::pair<std::int64_t, std::int32_t>> run;  // members and their slots
  std::vector<std::int32_t> table;
  for (std::size_t i = 0; i < members.size();) {
    BlockPins pins(stream);
    run.clear();
    std::int64_t passing = 0;
    for (; i < members.size(); ++i) {
      const std::int64_t m = members[i];
      const bool passes = !tier.cache().keeps(block_of(m));
      if (passes && passing == most) break;
      passing += passes ? 1 : 0;
      run.emplace_back(m, static_cast<std::int32_t>(bring(pins, m)));
    }
    const auto [low, high] = std::minmax(run.front().first, run.back().first);
    table.assign(static_cast<std::size_t>(high + 1 - low), run.front().second);
    for (const auto& [member, slot] : run)
      table[static_cast<std::size_t>(member - low)] = slot;
    const ConstTensorView slot_of_member = tables->put(table, stream);
    work({low, high + 1, slots, slot_of_member});
    tables->used(slot_of_member, stream);
    pins.done();
  }
}

MemberRun ExpertTiers::Impl::pretended_run(const TierGroup& about, DType dtype) const {
  return {0,
          about.members,
          pretended({about.members, about.rows, about.cols}, dtype),
          pretended({about.members}, DType::i32)};
}

// Tells the cache what is used now, unless the schedule does not know of it. Returns the blocks.
std::vector<tiers::Block> ExpertTiers::Impl::begin_visit(BlockTier& tier,
                                                         const Place& place,
                                                         const MemberVisit& visit,
                                                         const std::vector<std::int64_t>& members) {
  std::vector<tiers::Block> blocks;
  for (const std::int64_t m : members)
    blocks.push_back(place.block(m));
  if (!visit.outside)
    tier.cache().begin_visit(
        {static_cast<std::int32_t>(place.storage), visit.kind, visit.micro_batch}, blocks);
  return blocks;
}

void ExpertTiers::weights(StorageId id,
                          const MemberVisit& visit,
                          Stream& stream,
                          const MemberWork& work) {
  const Impl::Place place = impl_->place(id);
  const TierGroup& about = *place.about;
  MOESAIC_CHECK(place.group->weights != nullptr, "weights of '" + about.name + "' are resident");
  const DType dtype = about.weight_dtype;
  if (impl_->is_dry(stream)) return work(impl_->pretended_run(about, dtype));
  if (impl_->put_off != nullptr) impl_->put_off->before(id, visit);
  if (impl_->observer) impl_->observer(id, visit);
  std::optional<Impl::Call> call(std::in_place, *impl_, id, *place.group);
  BlockTier& tier = *place.group->weights;
  const std::vector<std::int64_t> members = Impl::members_of(visit, about.members);
  std::vector<tiers::Block> blocks = Impl::begin_visit(tier, place, visit, members);
  tier.expect(std::move(blocks));
  impl_->in_runs(
      tier,
      tier.slots(0, dtype, {about.rows, about.cols}),
      [&](std::int64_t m) { return place.block(m); },
      members,
      stream,
      [&](BlockPins& pins, std::int64_t m) {
        return pins.take(tier, place.block(m), MemberAccess::read);
      },
      work);
  if (visit.outside) return;
  if (impl_->put_off != nullptr) {
    call.reset();
    impl_->put_off->after(id, visit);
    call.emplace(*impl_, id, *place.group);
  }
  // Before the next forward the host waits for its counts, and loads nothing meanwhile.
  const std::vector<tiers::Foreseen> next = impl_->next_loads(tier, place, visit);
  tier.load_ahead(next);
  blocks.clear();
  for (const tiers::Foreseen& f : next)
    blocks.push_back(f.block);
  tier.expect(std::move(blocks));
}

// Of the next visit, or of the one behind the update of this very storage, which uses what is here.
std::vector<tiers::Foreseen> ExpertTiers::Impl::next_loads(const BlockTier& tier,
                                                           const Place& place,
                                                           const MemberVisit& visit) const {
  const bool is_update_next = place.group->ring > 0 && visit.kind == tiers::VisitKind::backward &&
                              visit.micro_batch == last_micro_batch;
  if (!is_update_next) return tier.cache().foresee(1, 0.5);
  std::vector<tiers::Foreseen> next = tier.cache().foresee(2, 0.5);
  const tiers::Block begin = place.block(0), end = place.block(place.about->members);
  std::erase_if(next, [&](const tiers::Foreseen& f) { return begin <= f.block && f.block < end; });
  return next;
}

void ExpertTiers::gradients(StorageId id,
                            const MemberVisit& visit,
                            Stream& stream,
                            const MemberWork& work) {
  const Impl::Place place = impl_->place(id);
  const TierGroup& about = *place.about;
  MOESAIC_CHECK(place.group->gradients != nullptr,
                "gradients of '" + about.name + "' are resident, or none");
  const DType dtype = impl_->precision.grad;
  if (impl_->is_dry(stream)) return work(impl_->pretended_run(about, dtype));
  if (impl_->put_off != nullptr) impl_->put_off->before_gradients();
  const Impl::Call call(*impl_, id, *place.group);
  BlockTier& tier = *place.group->gradients;
  const std::vector<std::int64_t> members = Impl::members_of(visit, about.members);
  if (place.group->ring == 0) Impl::begin_visit(tier, place, visit, members);
  impl_->in_runs(
      tier,
      tier.slots(0, dtype, {about.rows, about.cols}),
      [&](std::int64_t m) { return place.gradient_block(m); },
      members,
      stream,
      [&](BlockPins& pins, std::int64_t m) {
        return impl_->bring_gradient(place, m, MemberAccess::change, stream, pins);
      },
      work);
}

// Not to read what is not there.
std::int64_t ExpertTiers::Impl::bring_gradient(
    const Place& place, std::int64_t member, MemberAccess access, Stream& stream, BlockPins& pins) {
  BlockTier& tier = *place.group->gradients;
  const tiers::Block block = place.gradient_block(member);
  Gradient& gradient = place.group->gradient[static_cast<std::size_t>(place.block(member))];
  MOESAIC_CHECK(gradient != Gradient::spent,
                fmt::format("the gradient of member {} of '{}' was given up in this step",
                            member,
                            place.about->name));
  if (gradient == Gradient::there) return pins.take(tier, block, access);
  MOESAIC_CHECK(place.group->ring == 0 || !tier.cache().holds(block),
                fmt::format("the slot of member {} of '{}' still has another layer's gradient",
                            member,
                            place.about->name));
  const std::int64_t slot = pins.take(tier, block, MemberAccess::replace);
  gradient = Gradient::there;
  if (access != MemberAccess::replace)
    zero_tensor(tier.slot(slot, 0, precision.grad, {place.about->rows, place.about->cols}), stream);
  return slot;
}

void ExpertTiers::begin_step() {
  for (const TierGroup& group : impl_->groups) {
    for (const StorageId id : group.storages)
      if (impl_->put_off == nullptr || !impl_->put_off->awaits(id)) end_update(id);
  }
}

void ExpertTiers::end_update(StorageId id) {
  const Impl::Place place = impl_->place(id);
  Impl::Group& group = *place.group;
  if (group.gradients == nullptr || impl_->pretend) return;
  for (std::int64_t m = 0; m < place.about->members; ++m)
    impl_->drop_gradient(place, m, Impl::Gradient::none);
}

// A slot of a ring may hold another layer's.
void ExpertTiers::Impl::drop_gradient(const Place& place, std::int64_t member, Gradient now) const {
  Gradient& gradient = place.group->gradient[static_cast<std::size_t>(place.block(member))];
  if (gradient == Gradient::there)
    place.group->gradients->cache().discard(place.gradient_block(member));
  gradient = now;
}

bool ExpertTiers::has_gradient(StorageId id, std::int64_t member) const {
  const Impl::Place place = impl_->place(id);
  return place.group->gradients != nullptr &&
         place.group->gradient.at(static_cast<std::size_t>(place.block(member))) ==
             Impl::Gradient::there;
}

TensorView ExpertTiers::zero_gradient(StorageId id) const {
  const TierGroup& about = *impl_->place(id).about;
  return impl_->zero_gradient(about);
}

void ExpertTiers::begin_update(StorageId id, std::span<const std::int64_t> members, bool outside) {
  const Impl::Place place = impl_->place(id);
  if (impl_->pretend) return;
  impl_->catch_up();
  const tiers::Visit visit{static_cast<std::int32_t>(place.storage), tiers::VisitKind::update, 0};
  std::vector<tiers::Block> all, with_gradient, states;
  for (const std::int64_t m : members) {
    all.push_back(place.block(m));
    if (has_gradient(id, m)) with_gradient.push_back(place.block(m));
    if (place.owns(m)) states.push_back(place.state_block(m));
  }
  const Impl::Group& group = *place.group;
  const bool is_foretold = impl_->schedule_has_updates && !outside;
  if (is_foretold && group.gradients != nullptr && group.ring == 0)
    group.gradients->cache().begin_visit(visit, with_gradient);
  if (group.weights != nullptr) {
    if (is_foretold) group.weights->cache().begin_visit(visit, all);
    if (is_foretold && group.ring > 0) {  // then comes the backward of the layer before
      for (const tiers::Foreseen& f : group.weights->cache().foresee(1, 0.5))
        all.push_back(f.block);
    }
    group.weights->expect(std::move(all));
  }
  if (group.states == nullptr) return;
  // Then come those of a neighbour, before it or, beside a forward, after it: the one that still has gradients. In a backward
  // the one before has none yet.
  const auto storages = static_cast<std::int64_t>(place.about->storages.size());
  for (const std::int64_t storage : {place.storage - 1, place.storage + 1}) {
    if (storage < 0 || storage >= storages) continue;
    Impl::Place next = place;
    next.storage = storage;
    const StorageId next_id = place.about->storages[static_cast<std::size_t>(storage)];
    const bool comes_next = group.gradients == nullptr || (group.ring > 0 && impl_->updates_all);
    const bool updates_all = comes_next && storage < place.storage;
    for (std::int64_t m = 0; m < place.about->members; ++m)
      if (next.owns(m) && (updates_all || has_gradient(next_id, m)))
        states.push_back(next.state_block(m));
  }
  group.states->expect(std::move(states));
}

void ExpertTiers::Impl::name_states(
    const Place& place,
    MemberTensors& tensors,
    const std::function<TensorView(int section, DType dtype)>& view) const {
  tensors.state.resize(options.state_kinds.size());
  const auto& sections = place.about->state_sections;
  for (std::size_t s = 0; s < sections.size(); ++s) {
    const std::string& name = sections[s].first;
    const auto kind = std::find(options.state_kinds.begin(), options.state_kinds.end(), name);
    TensorView& tensor =
        kind != options.state_kinds.end()
            ? tensors.state[static_cast<std::size_t>(kind - options.state_kinds.begin())]
        : name == "remainder" ? tensors.remainder
                              : tensors.master;
    tensor = view(static_cast<int>(s), state_dtype(name));
  }
}

MemberTensors ExpertTiers::Impl::pretended_member(const Place& place, const Access& access) const {
  const Shape shape{place.about->rows, place.about->cols};
  MemberTensors t;
  t.state.resize(options.state_kinds.size());
  if (access.weight != MemberAccess::none && place.group->weights != nullptr)
    t.weight = pretended(shape, place.about->weight_dtype);
  if (access.gradient != MemberAccess::none && place.group->gradients != nullptr)
    t.gradient = pretended(shape, precision.grad);
  if (access.state != MemberAccess::none)
    name_states(place, t, [&](int, DType dtype) { return pretended(shape, dtype); });
  return t;
}

MemberTensors ExpertTiers::Impl::bring_member(const Place& place,
                                              std::int64_t member,
                                              const Access& access,
                                              Stream& stream,
                                              BlockPins& pins) {
  const Shape shape{place.about->rows, place.about->cols};
  const Group& g = *place.group;
  MemberTensors t;
  t.state.resize(options.state_kinds.size());
  if (access.weight != MemberAccess::none && g.weights != nullptr) {
    const std::int64_t slot = pins.take(*g.weights, place.block(member), access.weight);
    t.weight = g.weights->slot(slot, 0, place.about->weight_dtype, shape);
  }
  if (access.gradient != MemberAccess::none && g.gradients != nullptr) {
    const Gradient now = g.gradient[static_cast<std::size_t>(place.block(member))];
    if (access.gradient == MemberAccess::read && now == Gradient::none) {
      t.gradient = zero_gradient(*place.about);
    } else {
      const std::int64_t slot = bring_gradient(place, member, access.gradient, stream, pins);
      t.gradient = g.gradients->slot(slot, 0, precision.grad, shape);
    }
  }
  if (access.state != MemberAccess::none && g.states != nullptr) {
    MOESAIC_CHECK(place.owns(member),
                  "the state of a member of '" + place.about->name + "' that another rank keeps");
    const std::int64_t slot = pins.take(*g.states, place.state_block(member), access.state);
    name_states(place, t, [&](int section, DType dtype) {
      return g.states->slot(slot, section, dtype, shape);
    });
  }
  return t;
}

std::int64_t ExpertTiers::members_at_once(StorageId id, const Access& access) const {
  const Impl::Place place = impl_->place(id);
  std::int64_t most = place.about->members;
  const auto limit = [&](MemberAccess part, const std::unique_ptr<BlockTier>& tier) {
    if (part != MemberAccess::none && tier != nullptr) most = std::min(most, tier->at_once());
  };
  limit(access.weight, place.group->weights);
  limit(access.gradient, place.group->gradients);
  limit(access.state, place.group->states);
  return std::max<std::int64_t>(1, most);
}

void ExpertTiers::with_members(StorageId id,
                               std::span<const std::int64_t> members,
                               const Access& access,
                               Stream& stream,
                               const std::function<void(std::span<const MemberTensors>)>& work) {
  const Impl::Place place = impl_->place(id);
  std::vector<MemberTensors> tensors;
  if (impl_->is_dry(stream)) {
    tensors.assign(members.size(), impl_->pretended_member(place, access));
    return work(tensors);
  }
  impl_->catch_up_for(access);
  const Impl::Call call(*impl_, id, *place.group);
  BlockPins pins(stream, access.beside ? BlockTier::Lane::beside : BlockTier::Lane::main);
  for (const std::int64_t m : members) {
    MOESAIC_CHECK(m >= 0 && m < place.about->members,
                  fmt::format("member {} of {}", m, place.about->members));
    tensors.push_back(impl_->bring_member(place, m, access, stream, pins));
  }
  work(tensors);
  pins.done();
  if (!access.last_use_of_gradient || place.group->gradients == nullptr) return;
  for (const std::int64_t m : members)
    impl_->drop_gradient(place, m, Impl::Gradient::spent);
}

void ExpertTiers::with_host(StorageId id,
                            std::int64_t member,
                            MemberPart part,
                            MemberAccess access,
                            const std::function<void(TensorView)>& work) {
  const Impl::Place place = impl_->place(id);
  const TierGroup& about = *place.about;
  MOESAIC_CHECK(!impl_->pretend, "values of tiers that are a pretence");
  impl_->catch_up();
  MOESAIC_CHECK(member >= 0 && member < about.members,
                fmt::format("member {} of {}", member, about.members));
  const bool is_weight = part.kind == MemberPart::Kind::weight;
  const std::string section =
      is_weight                               ? "weight"
      : part.kind == MemberPart::Kind::master ? "master"
      : part.kind == MemberPart::Kind::remainder
          ? "remainder"
          : impl_->options.state_kinds.at(static_cast<std::size_t>(part.state));
  const BlockTier* tier = is_weight ? place.group->weights.get() : place.group->states.get();
  MOESAIC_CHECK(tier != nullptr && (is_weight || place.owns(member)),
                "no " + section + " of a member of '" + about.name + "' is offloaded here");
  const tiers::Block block = is_weight ? place.block(member) : place.state_block(member);
  const auto& sections = tier->homes().layout().sections();
  const auto found = std::find_if(
      sections.begin(), sections.end(), [&](const auto& s) { return s.name == section; });
  MOESAIC_CHECK(found != sections.end(), "'" + about.name + "' keeps no " + section);
  const auto number = static_cast<int>(found - sections.begin());
  const DType dtype = is_weight ? about.weight_dtype : impl_->state_dtype(section);

  tier->with_host(block, number, dtype, {about.rows, about.cols}, access, work);
}

void ExpertTiers::flush() {
  if (impl_->pretend) return;
  impl_->catch_up();
  for (const Impl::Group& g : impl_->own) {
    for (const BlockTier* tier : {g.weights.get(), g.states.get()})
      if (tier != nullptr) tier->cache().flush();
  }
}

}  // namespace moesaic
