#include "core/nn/expert_tiers.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/nn/expert_tiers_impl.h"
#include "memory/tiers/scratch_file.h"

namespace moesaic {
namespace {

// Equally many members of every storage, the first ones.
std::vector<double> even_weights(const TierGroup& group, bool of_states) {
  std::vector<double> weights;
  for (const RowRange& own : group.own) {
    const std::int64_t n = of_states ? own.end - own.begin : group.members;
    for (std::int64_t m = 0; m < n; ++m)
      weights.push_back(-static_cast<double>(m));
  }
  return weights;
}

// Length of the slot tables, and how many: as many as several passes over all members need, so that the host can be far
// ahead.
std::pair<std::int64_t, std::int64_t> sizes_of_tables(std::span<const TierGroup> groups) {
  if (groups.empty()) return {0, 0};
  std::int64_t length = 0, blocks = 0;
  for (const TierGroup& g : groups) {
    length = std::max(length, g.members);
    blocks += g.blocks();
  }
  return {length, std::clamp<std::int64_t>(4 * blocks / length, 64, 1024)};
}

}  // namespace

std::size_t slot_table_bytes(std::span<const TierGroup> groups) {
  const auto [length, tables] = sizes_of_tables(groups);
  return SlotTables::bytes_for(length, tables);
}

std::size_t TierGroup::state_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [section, n] : state_sections)
    bytes += n;
  return bytes;
}

bool ExpertTiers::Impl::Place::owns(std::int64_t member) const {
  const RowRange& own = about->own[static_cast<std::size_t>(storage)];
  return own.begin <= member && member < own.end;
}

tiers::Block ExpertTiers::Impl::Place::state_block(std::int64_t member) const {
  return group->first_state[static_cast<std::size_t>(storage)] + member -
         about->own[static_cast<std::size_t>(storage)].begin;
}

// Neighbours have different slots, so that the members of a layer do.
tiers::Block ExpertTiers::Impl::Place::gradient_block(std::int64_t member) const {
  return group->ring > 0 ? block(member) % group->ring : block(member);
}

ExpertTiers::Impl::Impl(std::vector<TierGroup> all,
                        ExpertTierOptions tier_options,
                        const Precision& types,
                        Device where,
                        bool is_pretend)
    : groups(std::move(all)),
      options(std::move(tier_options)),
      precision(types),
      device(where),
      pretend(is_pretend),
      own(groups.size()) {
  MOESAIC_CHECK(options.groups.size() == groups.size() || (pretend && options.groups.empty()),
                fmt::format("options of {} groups for {}", options.groups.size(), groups.size()));
  options.groups.resize(groups.size());
  if (!pretend && !options.folder.empty())
    tiers::ScratchFile::remove_leftovers(options.folder, options.rank);
  std::size_t zero_bytes = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    MOESAIC_CHECK(groups[g].own.size() == groups[g].storages.size(), "own members of each storage");
    for (std::size_t s = 0; s < groups[g].storages.size(); ++s)
      places[groups[g].storages[s].index] = {g, static_cast<std::int64_t>(s)};
    add_tiers(g);
    if (own[g].gradients != nullptr) zero_bytes = std::max(zero_bytes, groups[g].gradient_bytes);
  }
  if (options.weights) make_tables();
  if (zero_bytes == 0) return;
  zeros = pretend ? Buffer::pretend(zero_bytes, device)
                  : Buffer(zero_bytes, device, "experts' zero gradient");
  if (pretend) return;
  Stream stream(device, "zero gradient", Stream::Mode::immediate);
  zero_tensor(zeros.view({static_cast<std::int64_t>(zero_bytes)}, DType::u8), stream);
  stream.synchronize();
}

void ExpertTiers::Impl::add_tiers(std::size_t index) {
  const TierGroup& about = groups[index];
  Group& group = own[index];
  group.options = options.groups[index];
  const TierGroupOptions& o = group.options;
  const auto named = [&about](std::int64_t storage, std::int64_t member) {
    return fmt::format(
        "{} of expert {} here in layer {} with experts", about.name, member, storage);
  };
  const auto name_of_block = [named, members = about.members](tiers::Block b) {
    return named(b / members, b % members);
  };
  if (options.weights) {
    group.weights =
        std::make_unique<BlockTier>(BlockTier::Options{.group = about.name,
                                                       .kind = "weights",
                                                       .sections = {{"weight", about.weight_bytes}},
                                                       .blocks = about.blocks(),
                                                       .in_file = o.weights_in_file,
                                                       .on_device = o.weights_on_device,
                                                       .staging_slots = o.staging_slots,
                                                       .slots = o.weight_slots,
                                                       .weights = even_weights(about, false),
                                                       .name_of_block = name_of_block},
                                    options,
                                    device,
                                    pretend);
  }
  if (options.weights && about.trained) {
    group.gradient.assign(static_cast<std::size_t>(about.blocks()), Gradient::none);
    if (options.gradients_in_ring) {
      group.ring = o.gradient_slots;
      MOESAIC_CHECK(
          pretend || group.ring >= about.members,
          fmt::format("{} slots for the gradients of a layer of {}", group.ring, about.name));
    }
    const bool goes_round = group.ring > 0 && group.ring < about.blocks();
    group.gradients = std::make_unique<BlockTier>(
        BlockTier::Options{
            .group = about.name,
            .kind = "gradients",
            .sections = {{"gradient", about.gradient_bytes}},
            .blocks = group.ring > 0 ? group.ring : about.blocks(),
            .on_device = group.ring > 0 ? group.ring : o.gradients_on_device,
            .slots = o.gradient_slots,
            // What is beyond a layer's need not wait for updates of the layer behind.
            .most_at_once =
                goes_round ? std::clamp<std::int64_t>(group.ring - about.members, 1, about.members)
                           : 0,
            .weights = even_weights(about, false),
            .name_of_block = name_of_block},
        options,
        device,
        pretend);
  }
  std::int64_t first = 0;
  for (const RowRange& own_members : about.own) {
    group.first_state.push_back(first);
    first += own_members.end - own_members.begin;
  }
  if (first == 0 || about.state_sections.empty()) return;
  BlockTier::Options states{.group = about.name,
                            .kind = "states",
                            .blocks = first,
                            .in_file = o.states_in_file,
                            .on_device = o.states_on_device,
                            .staging_slots = o.staging_slots,
                            .slots = o.state_slots,
                            .weights = even_weights(about, true)};
  for (const auto& [section, bytes] : about.state_sections)
    states.sections.push_back({section, bytes});
  states.name_of_block = [named, firsts = group.first_state, runs = about.own](tiers::Block b) {
    const auto after = std::upper_bound(firsts.begin(), firsts.end(), b);
    const auto storage = static_cast<std::size_t>(after - firsts.begin()) - 1;
    return named(static_cast<std::int64_t>(storage), b - firsts[storage] + runs[storage].begin);
  };
  group.states = std::make_unique<BlockTier>(std::move(states), options, device, pretend);
}

void ExpertTiers::Impl::make_tables() {
  std::tie(table_length, table_count) = sizes_of_tables(groups);
  if (!pretend) tables.emplace(table_length, table_count, device);
}

ExpertTiers::Impl::Place ExpertTiers::Impl::place(StorageId id) {
  const auto found = places.find(id.index);
  MOESAIC_CHECK(found != places.end(), fmt::format("storage {} is not offloaded", id.index));
  const auto [group, storage] = found->second;
  return {&groups[group], &own[group], storage};
}

TensorView ExpertTiers::Impl::pretended(Shape shape, DType dtype) const {
  return Buffer::pretend(byte_size(dtype) * static_cast<std::size_t>(shape.numel()), device)
      .view(shape, dtype);
}

ExpertTiers::ExpertTiers(std::vector<TierGroup> groups,
                         ExpertTierOptions options,
                         const Precision& precision,
                         Device device,
                         bool pretend)
    : impl_(std::make_unique<Impl>(
          std::move(groups), std::move(options), precision, device, pretend)) {}
ExpertTiers::~ExpertTiers() = default;

bool ExpertTiers::holds_weights() const {
  return impl_->options.weights;
}
bool ExpertTiers::gradients_in_ring() const {
  return impl_->options.weights && impl_->options.gradients_in_ring;
}
bool ExpertTiers::covers(StorageId id) const {
  return impl_->places.count(id.index) > 0;
}
std::span<const TierGroup> ExpertTiers::groups() const {
  return impl_->groups;
}

void ExpertTiers::Impl::set_schedule_of(BlockTier& tier,
                                        const TierGroup& about,
                                        tiers::ScheduleForecast::Options forecast) const {
  if (forecast.step.empty()) return;
  forecast.layers = static_cast<std::int32_t>(about.storages.size());
  forecast.experts = static_cast<std::int32_t>(about.members);
  tier.cache().set_policy(
      tiers::make_sched_policy(std::make_unique<tiers::ScheduleForecast>(std::move(forecast))));
}

void ExpertTiers::set_schedule(std::vector<tiers::Visit> step, tiers::Updates updates) {
  using tiers::VisitKind;
  impl_->catch_up();
  const auto is_update = [](const tiers::Visit& v) { return v.kind == VisitKind::update; };
  impl_->schedule_has_updates = std::any_of(step.begin(), step.end(), is_update);
  impl_->updates_all = updates == tiers::Updates::dense;
  impl_->last_micro_batch = 0;
  for (const tiers::Visit& v : step)
    impl_->last_micro_batch = std::max(impl_->last_micro_batch, v.micro_batch);
  if (impl_->pretend || impl_->options.policy != TierPolicy::sched) return;
  // A gradient is used by the backwards of its step and by the update of what has one.
  std::vector<tiers::Visit> gradients;
  std::copy_if(step.begin(), step.end(), std::back_inserter(gradients), [](const auto& v) {
    return v.kind != VisitKind::forward;
  });
  // Its step begins with a backward, wherever the updates are.
  std::rotate(gradients.begin(),
              std::find_if_not(gradients.begin(), gradients.end(), is_update),
              gradients.end());
  for (std::size_t g = 0; g < impl_->groups.size(); ++g) {
    Impl::Group& group = impl_->own[g];
    if (group.weights != nullptr)
      impl_->set_schedule_of(*group.weights, impl_->groups[g], {.step = step, .updates = updates});
    if (group.gradients != nullptr && group.ring == 0) {
      impl_->set_schedule_of(
          *group.gradients,
          impl_->groups[g],
          {.step = gradients,
           .updates = updates == tiers::Updates::none ? updates : tiers::Updates::touched,
           .draws = VisitKind::backward,
           .may_skip = true});
    }
  }
}

std::vector<MemoryUse> ExpertTiers::device_use() const {
  std::vector<MemoryUse> use;
  for (const Impl::Group& g : impl_->own) {
    for (const BlockTier* tier : {g.weights.get(), g.gradients.get(), g.states.get()})
      if (tier != nullptr) use.push_back({"experts' " + tier->name(), tier->device_bytes()});
  }
  if (impl_->options.weights)
    use.push_back(
        {"expert slot tables", SlotTables::bytes_for(impl_->table_length, impl_->table_count)});
  if (impl_->zeros.bytes() > 0) use.push_back({"experts' zero gradient", impl_->zeros.bytes()});
  return use;
}

std::vector<MemoryUse> ExpertTiers::host_use() const {
  std::vector<MemoryUse> use;
  for (const Impl::Group& g : impl_->own) {
    for (const BlockTier* tier : {g.weights.get(), g.gradients.get(), g.states.get()})
      if (tier != nullptr) use.push_back({"experts' " + tier->name(), tier->host_bytes()});
  }
  if (impl_->options.weights)
    use.push_back(
        {"expert slot tables", SlotTables::bytes_for(impl_->table_length, impl_->table_count)});
  return use;
}

std::vector<MemoryUse> ExpertTiers::file_use() const {
  std::vector<MemoryUse> use;
  for (const Impl::Group& g : impl_->own) {
    for (const BlockTier* tier : {g.weights.get(), g.gradients.get(), g.states.get()})
      if (tier != nullptr && tier->file_bytes() > 0)
        use.push_back({"experts' " + tier->name(), tier->file_bytes()});
  }
  return use;
}

namespace {

// Adds sign x the figures.
void add(TierCounters& to, const TierCounters& more, std::int64_t sign) {
  const auto n = static_cast<std::uint64_t>(sign);  // wraps as it should
  tiers::DeviceCache::Counters& c = to.cache;
  const tiers::DeviceCache::Counters& m = more.cache;
  c.uses += n * m.uses;
  c.hits += n * m.hits;
  c.loads += n * m.loads;
  c.drops += n * m.drops;
  c.prefetches += n * m.prefetches;
  c.passed += n * m.passed;
  c.write_backs += n * m.write_backs;
  c.bytes_up += n * m.bytes_up;
  c.bytes_down += n * m.bytes_down;
  to.file_bytes_read += n * more.file_bytes_read;
  to.file_bytes_written += n * more.file_bytes_written;
  to.host_waits += n * more.host_waits;
  to.host_wait_seconds += static_cast<double>(sign) * more.host_wait_seconds;
}

}  // namespace

TierCounters& TierCounters::operator+=(const TierCounters& more) {
  add(*this, more, 1);
  return *this;
}

TierCounters ExpertTiers::Impl::sum_of(const Group& group) const {
  TierCounters sum;
  for (const BlockTier* tier : {group.weights.get(), group.gradients.get(), group.states.get()})
    if (tier != nullptr && !pretend) sum += tier->counters();
  return sum;
}

ExpertTiers::Impl::Call::~Call() {
  TierCounters now = impl_.sum_of(group_);
  add(now, before_, -1);
  impl_.of_storage[id_.index] += now;
}

TierCounters ExpertTiers::counters_of(StorageId id) const {
  const auto found = impl_->of_storage.find(id.index);
  return found != impl_->of_storage.end() ? found->second : TierCounters();
}

void ExpertTiers::set_put_off(PutOff* work) {
  impl_->put_off = work;
}

void ExpertTiers::observe(Observer observer) {
  impl_->observer = std::move(observer);
}

std::vector<TierCounters> ExpertTiers::counters() const {
  std::vector<TierCounters> all;
  if (impl_->pretend) return all;
  for (const Impl::Group& g : impl_->own) {
    for (const BlockTier* tier : {g.weights.get(), g.gradients.get(), g.states.get()})
      if (tier != nullptr) all.push_back(tier->counters());
  }
  return all;
}

}  // namespace moesaic
