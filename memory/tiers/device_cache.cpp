#include "memory/tiers/device_cache.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::tiers {

namespace {

// Where the slots of a section begin in the memory of a cache, and where the section behind the last one would.
std::uint64_t section_begin(const RecordLayout& layout,
                            SectionRange range,
                            std::int64_t slots,
                            int section) {
  std::uint64_t at = 0;
  for (int s = range.first; s < section; ++s)
    at += (static_cast<std::uint64_t>(slots) * layout.section(s).bytes + 255) / 256 * 256;
  return at;
}

// Whoever used the copy waited for it to be ready.
std::vector<Event> uses_of(const BlockCopy& copy) {
  return copy.uses().empty() ? std::vector<Event>{copy.ready} : copy.uses();
}

}  // namespace

std::uint64_t DeviceCache::bytes_for(const RecordLayout& layout,
                                     SectionRange range,
                                     std::int64_t slots) {
  return section_begin(layout, range, slots, range.end());
}

DeviceCache::DeviceCache(HomeTiers& homes,
                         const Options& options,
                         std::unique_ptr<CachePolicy> policy)
    : homes_(homes),
      options_(options),
      policy_(std::move(policy)),
      memory_(
          bytes_for(homes.layout(), options.range, options.slots), options.device, options.name) {
  for (Block b = 0; b < homes.blocks(); ++b)
    if (homes.lives_on_device(b))
      slot_for_good_.emplace(b, FreeSlot{static_cast<std::int64_t>(slot_for_good_.size()), {}});
  const auto here = static_cast<std::int64_t>(slot_for_good_.size());
  const std::int64_t passing = options_.slots - here;
  const bool all_stay = passing >= homes.blocks() - here;
  MOESAIC_CHECK((here == homes.blocks() && passing >= 0) ||
                    (passing >= kMinSlots && options_.transit <= passing &&
                     options_.transit >= (all_stay ? 0 : 1)),
                fmt::format("{} slots, {} for blocks that live there, {} for transit",
                            options_.slots,
                            here,
                            options_.transit));
  MOESAIC_CHECK(options_.transit_beside >= 0 &&
                    (!has_two_lanes() || options_.transit_beside < options_.transit),
                "transit slots for both lanes");
  most_kept_ = passing - options_.transit;
  for (std::int64_t s = options_.slots; s-- > here;)
    free_.push_back({s, {}});
  const auto add_lane = [&](const std::string& suffix, std::int64_t slots) {
    lanes_.push_back(
        {.in = Stream(options_.device, options_.name + suffix + " loads", options_.mode),
         .out = Stream(options_.device, options_.name + suffix + " write-backs", options_.mode),
         .slots = slots});
  };
  add_lane("", options_.transit - options_.transit_beside);
  if (has_two_lanes()) add_lane(" beside", options_.transit_beside);
}

DeviceCache::~DeviceCache() {
  // Work on the streams points into this memory and that of the homes.
  try {
    for (LaneState& lane : lanes_) {
      lane.in.synchronize();
      lane.out.synchronize();
    }
    Stream& last = lanes_[0].out;
    for (const auto& [block, e] : entries_)
      e.copy.wait_for_uses(last);
    for (const FreeSlot& free : free_)
      for (const Event& e : free.uses)
        last.wait(e);
    last.synchronize();
    homes_.poll();
  } catch (
      const std::exception&) {  // was thrown to the user before, or is lost with what it was about
  }
}

std::byte* DeviceCache::data(std::int64_t slot, int section) const {
  const SectionRange r = options_.range;
  MOESAIC_CHECK(section >= r.first && section < r.end() && slot >= 0 && slot < options_.slots,
                "a section and a slot of the cache");
  return memory_.data() + section_begin(homes_.layout(), r, options_.slots, section) +
         static_cast<std::uint64_t>(slot) * homes_.layout().section(section).bytes;
}

SectionRange DeviceCache::in_entry(SectionRange r) const {
  MOESAIC_CHECK(r.first >= options_.range.first && r.end() <= options_.range.end(),
                "sections of the cache");
  return {r.first - options_.range.first, r.count};
}

void DeviceCache::set_policy(std::unique_ptr<CachePolicy> policy) {
  policy_ = std::move(policy);
  for (const auto& [block, e] : entries_)
    if (e.kept) policy_->admitted(block);
}

void DeviceCache::begin_visit(const Visit& visit, std::span<const Block> blocks) {
  policy_->begin_visit(visit, blocks);
}

void DeviceCache::copy(
    std::byte* to, const std::byte* from, std::uint64_t bytes, bool up, Lane lane) {
  const Shape shape{static_cast<std::int64_t>(bytes)};
  copy_tensor(TensorView(to, DType::u8, shape, up ? options_.device : kCpu),
              ConstTensorView(from, DType::u8, shape, up ? kCpu : options_.device),
              up ? at(lane).in : at(lane).out);
  (up ? counters_.bytes_up : counters_.bytes_down) += bytes;
}

// The states follow the order in which the host enqueues: whoever uses the copy waits for `ready`, so it counts as loaded.
void DeviceCache::load(Block block, Entry& entry, Lane lane) {
  const SectionRange all{0, options_.range.count};
  Stream& in = at(lane).in;
  const HomeTiers::Lease lease = homes_.lease(block, options_.range, HomeTiers::Contents::needed);
  for (const Event& e : lease.pending)  // perhaps a write-back of this very block
    in.wait(e);
  entry.copy.apply(all, CopyAction::begin_load);
  for (int s = options_.range.first; s < options_.range.end(); ++s) {
    const Section& section = homes_.layout().section(s);
    copy(data(entry.slot, s), lease.image + section.offset, section.bytes, true, lane);
  }
  entry.copy.apply(all, CopyAction::finish_load);
  Event loaded(options_.device);
  in.record(loaded);
  homes_.release(block, options_.range, std::nullopt, loaded);
}

void DeviceCache::write_back(Block block, Lane lane) {
  const auto found = entries_.find(block);
  if (found == entries_.end() || found->second.lives_here) return;
  BlockCopy& c = found->second.copy;
  const SectionRange all{0, options_.range.count};
  if (!c.any(all, CopyState::dirty)) return;
  Stream& out = at(lane).out;
  // The lease is of all sections: those that are not written must be there.
  const HomeTiers::Lease lease = homes_.lease(
      block,
      options_.range,
      c.all(all, CopyState::dirty) ? HomeTiers::Contents::replaced : HomeTiers::Contents::needed);
  for (const Event& e : lease.pending)
    out.wait(e);
  out.wait(c.ready);
  c.wait_for_uses(out);
  int first = options_.range.count, last = -1;
  for (int s = 0; s < options_.range.count; ++s) {
    if (c.state(s) != CopyState::dirty) continue;
    first = std::min(first, s);
    last = s;
    const int section = options_.range.first + s;
    c.apply({s, 1}, CopyAction::begin_write);
    copy(lease.image + homes_.layout().section(section).offset,
         data(found->second.slot, section),
         homes_.layout().section(section).bytes,
         false,
         lane);
    // In the order of the streams it is written: the copy is a use of the slot, and whoever changes the slot waits for uses.
    c.apply({s, 1}, CopyAction::finish_write);
  }
  c.pin(Access::read);
  c.unpin(Access::read, out);
  Event written(options_.device);
  out.record(written);
  homes_.release(
      block, options_.range, SectionRange{options_.range.first + first, last - first + 1}, written);
  ++counters_.write_backs;
}

void DeviceCache::evict(Block block, Lane lane) {
  write_back(block, lane);
  const auto found = entries_.find(block);
  Entry& e = found->second;
  MOESAIC_CHECK(e.copy.may_go(), "what goes is written back and not in use");
  e.copy.apply({0, options_.range.count}, CopyAction::drop);
  forget(found, poisoned(e, lane));
}

// What has to be over before the slot of a copy that goes is used again.
std::vector<Event> DeviceCache::poisoned(const Entry& e, Lane lane) {
  std::vector<Event> uses = uses_of(e.copy);
  if (!options_.poison) return uses;
  Stream& in = at(lane).in;
  for (const Event& use : uses)  // or a load by the other lane that nobody has used
    in.wait(use);
  for (int s = options_.range.first; s < options_.range.end(); ++s) {
    const Shape shape{static_cast<std::int64_t>(homes_.layout().section(s).bytes)};
    fill_bytes(TensorView(data(e.slot, s), DType::u8, shape, options_.device), 0xff, in);
  }
  uses.assign(1, Event(options_.device));
  in.record(uses.front());
  return uses;
}

// Its slot is free, once `uses` are over.
void DeviceCache::forget(std::map<Block, Entry>::iterator entry, std::vector<Event> uses) {
  const Entry& e = entry->second;
  if (e.kept) {
    policy_->removed(entry->first);
    --kept_;
  } else {
    at(e.lane).passing.erase(e.number);
  }
  if (e.lives_here) {
    slot_for_good_.at(entry->first).uses = std::move(uses);
  } else {
    free_.push_back({e.slot, std::move(uses)});
  }
  entries_.erase(entry);
  ++counters_.drops;
}

std::optional<Block> DeviceCache::oldest_passing(const LaneState& lane) const {
  for (const auto& [number, block] : lane.passing)
    if (may_go(block)) return block;
  return std::nullopt;
}

// Frees a slot for `block` where none is. Returns whether the block will be kept.
bool DeviceCache::make_slot(Block block, Lane lane) {
  LaneState& own = at(lane);
  bool keep = false;
  if (lane == Lane::main || !has_two_lanes()) {
    keep = kept_ < most_kept_;
    if (!keep && kept_ > 0) {
      const Block out = policy_->victim(block, [this](Block b) { return may_go(b); });
      keep = out != block;
      if (keep) evict(out, lane);
    }
  } else if (static_cast<std::int64_t>(own.passing.size()) >= own.slots) {
    // A free slot is perhaps one that the other lane is about to need.
    if (const auto oldest = oldest_passing(own)) evict(*oldest, lane);
  }
  if (!free_.empty()) return keep;
  // Those that only pass, the oldest first, of whoever has more than its slots; then whatever the policy would give up.
  std::optional<Block> oldest;
  for (LaneState& other : lanes_) {
    if (&other != &own && static_cast<std::int64_t>(other.passing.size()) > other.slots)
      oldest = oldest_passing(other);
  }
  if (!oldest) oldest = oldest_passing(own);
  for (LaneState& other : lanes_)
    if (!oldest) oldest = oldest_passing(other);
  if (!oldest) {
    const auto any = std::find_if(entries_.begin(), entries_.end(), [&](const auto& e) {
      return !e.second.lives_here && may_go(e.first);
    });
    if (any != entries_.end()) oldest = any->first;
  }
  if (!oldest) {
    throw ResourceError(
        fmt::format("all {} slots of '{}' ({} bytes each) are in use at once; raise "
                    "memory.device_budget",
                    options_.slots,
                    options_.name,
                    homes_.layout().bytes(options_.range)));
  }
  evict(*oldest, lane);
  return keep;
}

void DeviceCache::settle_for_good(Block block, Lane lane) {
  const FreeSlot& place = slot_for_good_.at(block);
  Stream& in = at(lane).in;
  for (const Event& use : place.uses)
    in.wait(use);
  Entry e{.copy = BlockCopy(block, options_.range.count, options_.device, options_.range.first),
          .slot = place.slot,
          .lives_here = true,
          .number = ++numbers_,
          .lane = lane};
  e.copy.apply({0, options_.range.count}, CopyAction::make);
  in.record(e.copy.ready);
  entries_.emplace(block, std::move(e));
  ++counters_.loads;
}

void DeviceCache::bring(Block block, bool needs_load, Lane lane) {
  if (slot_for_good_.count(block) > 0) {
    MOESAIC_CHECK(!needs_load,
                  fmt::format("block {} lives on the device and has no values yet", block));
    return settle_for_good(block, lane);
  }
  const bool keep = make_slot(block, lane);
  Stream& in = at(lane).in;
  for (const Event& use : free_.back().uses)
    in.wait(use);
  Entry e{.copy = BlockCopy(block, options_.range.count, options_.device, options_.range.first),
          .slot = free_.back().slot,
          .kept = keep,
          .number = ++numbers_,
          .lane = lane};
  if (needs_load) {
    load(block, e, lane);  // what throws here leaves the slot free
  } else {
    e.copy.apply({0, options_.range.count}, CopyAction::make);
  }
  in.record(e.copy.ready);
  free_.pop_back();
  entries_.emplace(block, std::move(e));
  if (keep) {
    policy_->admitted(block);
    ++kept_;
  } else {
    at(lane).passing.emplace(numbers_, block);
    ++counters_.passed;
  }
  ++counters_.loads;
}

std::int64_t DeviceCache::acquire(
    Block block, Access access, Stream& user, Contents contents, Lane lane) {
  MOESAIC_CHECK(contents == Contents::loaded || access == Access::write,
                "who replaces what is there writes");
  homes_.poll();
  // A call that failed and is tried again is one use.
  if (failed_use_ != block) policy_->use(block);
  failed_use_ = block;
  const bool hit = holds(block);
  if (!hit) bring(block, contents == Contents::loaded, lane);
  failed_use_.reset();
  Entry& e = entries_.at(block);
  e.copy.pin(access);
  ++counters_.uses;
  counters_.hits += hit ? 1 : 0;
  user.wait(e.copy.ready);
  e.copy.wait_for_uses(user);
  return e.slot;
}

void DeviceCache::release(Block block,
                          Access access,
                          Stream& user,
                          std::optional<SectionRange> changed) {
  const auto found = entries_.find(block);
  MOESAIC_CHECK(found != entries_.end(), fmt::format("block {} is not in use", block));
  BlockCopy& c = found->second.copy;
  if (changed) c.apply(in_entry(*changed), CopyAction::change);
  c.unpin(access, user);
}

bool DeviceCache::prefetch(Block block, bool may_pass) {
  if (holds(block) || slot_for_good_.count(block) > 0) return true;
  homes_.poll();
  if (!homes_.is_ready(block, options_.range)) {
    homes_.prefetch(block, options_.range);
    return false;
  }
  if (kept_ >= most_kept_ && free_.empty()) {
    const bool has_room = may_pass && oldest_passing(at(Lane::main)).has_value();
    const CachePolicy::MayGo goes = [this](Block b) { return may_go(b); };
    if (!has_room && (kept_ == 0 || policy_->victim(block, goes) == block)) return false;
  }
  bring(block, true, Lane::main);
  ++counters_.prefetches;
  return true;
}

void DeviceCache::flush() {
  for (auto& [block, e] : entries_)
    write_back(block);
  homes_.flush();
}

void DeviceCache::discard(Block block) {
  const auto found = entries_.find(block);
  if (found == entries_.end()) return;
  BlockCopy& copy = found->second.copy;
  for (int s = 0; s < options_.range.count; ++s)
    if (copy.state(s) != CopyState::absent) copy.apply({s, 1}, CopyAction::discard);
  forget(found, poisoned(found->second, Lane::main));
}

void DeviceCache::discard() {
  while (!entries_.empty())
    discard(entries_.begin()->first);
}

}  // namespace moesaic::tiers
