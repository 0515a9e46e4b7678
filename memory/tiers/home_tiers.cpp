#include "memory/tiers/home_tiers.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::tiers {
namespace {

bool all_reached(const std::vector<Event>& events) {
  return std::all_of(events.begin(), events.end(), [](const Event& e) { return e.reached(); });
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// How many leases whose work is under way poll() looks at. Work of two streams ends in nearly the order in which it was
// enqueued; a host that is far ahead has thousands of leases, and the question costs a microsecond.
constexpr std::size_t kPolled = 4;

SectionRange joined(SectionRange a, SectionRange b) {
  const int first = std::min(a.first, b.first);
  return {first, std::max(a.end(), b.end()) - first};
}

}  // namespace

std::uint64_t HomeTiers::host_bytes_for(const RecordLayout& layout,
                                        std::int64_t blocks,
                                        std::int64_t in_file,
                                        std::int64_t staging_slots) {
  const auto bytes = [&](std::int64_t slots) {
    return HostPool::bytes_for({.slot_bytes = layout.stride(), .slots = slots});
  };
  return bytes(blocks - in_file) + bytes(in_file > 0 ? staging_slots : 0);
}

HomeTiers::HomeTiers(const RecordLayout& layout, Options options, OpenedQueue queue)
    : layout_(layout), options_(std::move(options)) {
  const std::int64_t in_file = std::count_if(
      options_.in_file.begin(), options_.in_file.end(), [](auto f) { return f != 0; });
  MOESAIC_CHECK(options_.on_device.empty() || options_.on_device.size() == options_.in_file.size(),
                "a place for every block");
  std::int64_t on_device = 0;
  for (Block b = 0; b < blocks(); ++b) {
    MOESAIC_CHECK(!lives_in_file(b) || !lives_on_device(b), "a block has one home");
    on_device += lives_on_device(b) ? 1 : 0;
  }
  const HostPool::Options homes{.slot_bytes = layout_.stride(),
                                .slots = blocks() - in_file - on_device,
                                .device = options_.device,
                                .tag = "host tier"};
  const HostPool::Options staging{.slot_bytes = layout_.stride(),
                                  .slots = in_file > 0 ? options_.staging_slots : 0,
                                  .device = options_.device,
                                  .tag = "file tier staging",
                                  .poison = options_.poison};
  MOESAIC_CHECK(in_file == 0 || options_.staging_slots >= kMinStaging,
                fmt::format("{} staging slots; at least {}", options_.staging_slots, kMinStaging));
  host_bytes_ = host_bytes_for(layout_, blocks(), in_file, options_.staging_slots);
  if (host_bytes_ > options_.host_budget) {
    throw ResourceError(fmt::format(
        "{} experts in host memory and {} slots on the way to the file, of {} bytes each, need {} "
        "bytes; memory.host_budget is {}. Raise it, or let more live in the file tier",
        homes.slots,
        staging.slots,
        layout_.stride(),
        host_bytes_,
        options_.host_budget));
  }
  homes_ = std::make_unique<HostPool>(homes);
  if (in_file > 0) {
    staging_ = std::make_unique<HostPool>(staging);
    options_.file.file.records = in_file;
    if (!queue.queue) queue = open_io_queue(options_.io, options_.io_depth, staging_->regions());
    const auto names = std::make_shared<std::vector<Block>>();
    if (!options_.file.name) {
      options_.file.name = [names](std::int64_t r) {
        return fmt::format("block {}", names->at(static_cast<std::size_t>(r)));
      };
    } else {
      // Callers name blocks, the file has records.
      options_.file.name = [names, given = options_.file.name](std::int64_t r) {
        return given(names->at(static_cast<std::size_t>(r)));
      };
    }
    for (Block b = 0; b < blocks(); ++b)
      if (lives_in_file(b)) names->push_back(b);
    file_ = std::make_unique<FileTier>(layout_, options_.file, std::move(queue));
  }
  at_home_.resize(static_cast<std::size_t>(homes.slots));
  std::int64_t records = 0, homed = 0;
  for (Block b = 0; b < blocks(); ++b) {
    if (lives_on_device(b)) {
      place_.push_back(-1);
      continue;
    }
    place_.push_back(lives_in_file(b) ? records++ : homed++);
    if (!lives_in_file(b)) set_up(b, *find(b), homes_->take());
  }
}

HomeTiers::~HomeTiers() {
  file_.reset();  // waits for transfers in the memory of the pools
}

void HomeTiers::check(Block block, SectionRange range) const {
  MOESAIC_CHECK(block >= 0 && block < blocks(), fmt::format("block {} of {}", block, blocks()));
  MOESAIC_CHECK(!lives_on_device(block), fmt::format("block {} lives on the device alone", block));
  layout_.check(range);
}

void HomeTiers::set_up(Block block, Entry& e, std::byte* image) {
  e.image = image;
  e.last_lease = ++leases_;
  for (int s = 0; s < layout_.count(); ++s)
    e.sections.emplace_back(block, 1, kCpu, s);
}

HomeTiers::Entry* HomeTiers::find(Block block) {
  if (!lives_in_file(block))
    return &at_home_[static_cast<std::size_t>(place_[static_cast<std::size_t>(block)])];
  const auto found = staged_.find(block);
  return found == staged_.end() ? nullptr : &found->second;
}

void HomeTiers::start(Block block, Entry& entry, SectionRange range, bool is_write) {
  const auto record = place_[static_cast<std::size_t>(block)];
  Transfer transfer =
      is_write ? file_->write(record, range, entry.image) : file_->read(record, range, entry.image);
  for (int s = range.first; s < range.end(); ++s)
    entry.section(s).apply({0, 1}, is_write ? CopyAction::begin_write : CopyAction::begin_load);
  entry.running.push_back({std::move(transfer), range, is_write});
}

// One transfer for each run of sections in that state that nobody holds.
void HomeTiers::start_where(
    Block block, Entry& entry, SectionRange range, CopyState state, bool is_write) {
  for (int s = range.first; s < range.end();) {
    int end = s;
    while (end < range.end() && entry.section(end).state(0) == state &&
           !entry.section(end).is_pinned())
      ++end;
    if (end > s) start(block, entry, {s, end - s}, is_write);
    s = std::max(end, s + 1);
  }
}

// Waits for a transfer and notes its end. Throws what it failed with.
void HomeTiers::finish(Entry& entry, std::size_t index) {
  const Running done = entry.running[index];
  const auto note = [&](CopyAction action) {
    entry.running.erase(entry.running.begin() + static_cast<std::ptrdiff_t>(index));
    for (int s = done.range.first; s < done.range.end(); ++s)
      entry.section(s).apply({0, 1}, action);
  };
  const auto start = std::chrono::steady_clock::now();
  const bool waits = !done.transfer.is_done();
  try {
    done.transfer.wait();
  } catch (...) {
    note(done.is_write ? CopyAction::fail_write : CopyAction::fail_load);
    throw;
  }
  if (waits) {
    ++file_waits_;
    file_wait_seconds_ += seconds_since(start);
  }
  note(done.is_write ? CopyAction::finish_write : CopyAction::finish_load);
}

// Waits until no section of the range is on its way to or from the file.
void HomeTiers::settle(Entry& entry, SectionRange range) {
  for (std::size_t i = entry.running.size(); i-- > 0;)
    if (entry.running[i].range.overlaps(range)) finish(entry, i);
}

// A lease is over, its work included.
void HomeTiers::end(Block block, Entry& entry, std::size_t index) {
  const Held held = entry.held[index];
  entry.held.erase(entry.held.begin() + static_cast<std::ptrdiff_t>(index));
  for (int s = held.range.first; s < held.range.end(); ++s) {
    const bool changed = held.changed && s >= held.changed->first && s < held.changed->end();
    if (changed) entry.section(s).apply({0, 1}, CopyAction::change);
    entry.section(s).unpin(Access::write);
  }
  if (lives_in_file(block)) start_where(block, entry, held.range, CopyState::dirty, true);
}

// Waits for the work of released leases that overlap a range, and ends them.
void HomeTiers::end_overlapping(Block block, Entry& entry, SectionRange range) {
  for (std::size_t i = entry.held.size(); i-- > 0;) {
    if (entry.held[i].is_open || !entry.held[i].range.overlaps(range)) continue;
    if (!all_reached(entry.held[i].after)) {
      ++lease_waits_;
      const auto start = std::chrono::steady_clock::now();
      for (const Event& e : entry.held[i].after)
        e.wait_on_host();
      lease_wait_seconds_ += seconds_since(start);
    }
    end(block, entry, i);
  }
}

void HomeTiers::poll() {
  std::vector<Block> waiting;
  while (!deferred_.empty() && waiting.size() < kPolled) {
    const Block block = deferred_.front();
    deferred_.pop_front();
    Entry* const found = find(block);
    if (found == nullptr) continue;
    Entry& e = *found;
    bool waits = false;
    for (std::size_t i = e.held.size(); i-- > 0;) {
      if (e.held[i].is_open) continue;
      if (all_reached(e.held[i].after)) {
        end(block, e, i);
      } else {
        waits = true;
      }
    }
    if (waits) waiting.push_back(block);
  }
  deferred_.insert(deferred_.begin(), waiting.begin(), waiting.end());
  for (auto& [block, e] : staged_)
    for (std::size_t i = e.running.size(); i-- > 0;)
      if (e.running[i].transfer.is_done()) finish(e, i);
}

bool HomeTiers::end_oldest() {
  while (!deferred_.empty()) {
    const Block block = deferred_.front();
    deferred_.pop_front();
    Entry* const e = find(block);
    if (e == nullptr) continue;
    const std::size_t before = e->held.size();
    end_overlapping(block, *e, layout_.all());
    if (e->held.size() < before) return true;
  }
  return false;
}

// Frees a staging slot. False when all are leased (or, unless it may wait, busy).
bool HomeTiers::make_room(bool may_wait) {
  const auto oldest = [&](auto&& wanted) {
    auto best = staged_.end();
    for (auto it = staged_.begin(); it != staged_.end(); ++it) {
      if (!it->second.held.empty() || !wanted(it->second)) continue;
      if (best == staged_.end() || it->second.last_lease < best->second.last_lease) best = it;
    }
    return best;
  };
  poll();
  for (;;) {
    const auto is_idle = [](const Entry& e) {
      return e.running.empty() && std::all_of(e.sections.begin(),
                                              e.sections.end(),
                                              [](const BlockCopy& c) { return c.may_go(); });
    };
    auto out = oldest([&](const Entry& e) { return !e.is_expected && is_idle(e); });
    const auto busy = oldest([](const Entry& e) { return !e.is_expected; });
    if (may_wait && out == staged_.end() && busy == staged_.end()) {
      if (end_oldest()) continue;
      out = oldest(is_idle);
    }
    if (out != staged_.end()) {
      staging_->give_back(out->second.image);
      staged_.erase(out);
      return true;
    }
    if (!may_wait) return false;
    if (busy == staged_.end()) {
      const auto reading = oldest([](const Entry&) { return true; });
      if (reading == staged_.end()) return false;
      settle(reading->second, layout_.all());
      continue;
    }
    settle(busy->second, layout_.all());
    // What an earlier write could not store.
    start_where(busy->first, busy->second, layout_.all(), CopyState::dirty, true);
    settle(busy->second, layout_.all());
  }
}

HomeTiers::Entry* HomeTiers::stage(Block block, bool may_wait) {
  if (Entry* e = find(block); e != nullptr) return e;
  std::byte* image = staging_->take();
  if (image == nullptr) {
    if (!make_room(may_wait)) return nullptr;
    image = staging_->take();
  }
  Entry& e = staged_[block];
  set_up(block, e, image);
  return &e;
}

bool HomeTiers::has_values(Block block, SectionRange range) {
  check(block, range);
  Entry* const e = find(block);
  const auto is_written = [&](int s) {
    if (e != nullptr && e->section(s).state(0) != CopyState::absent) return true;
    return lives_in_file(block) &&
           file_->is_written(place_[static_cast<std::size_t>(block)], {s, 1});
  };
  for (int s = range.first; s < range.end(); ++s)
    if (!is_written(s)) return false;
  return true;
}

HomeTiers::Lease HomeTiers::lease(Block block, SectionRange range, Contents contents) {
  check(block, range);
  const bool in_file = lives_in_file(block);
  Entry* e = stage(block, true);
  MOESAIC_CHECK(e != nullptr, "all staging slots are leased, and none of the leases was released");
  e->last_lease = ++leases_;
  e->is_expected = false;
  for (Held& h : e->held) {
    if (h.is_open || !(h.range == range)) continue;
    h.is_open = true;
    return {e->image, h.after};
  }
  end_overlapping(block, *e, range);
  settle(*e, range);
  if (contents == Contents::needed && in_file) {
    start_where(block, *e, range, CopyState::absent, false);
    settle(*e, range);
  }
  for (int s = range.first; s < range.end(); ++s)
    MOESAIC_CHECK(!e->section(s).is_pinned() && (contents == Contents::replaced ||
                                                 e->section(s).state(0) != CopyState::absent),
                  fmt::format("section {} of block {} is {}",
                              layout_.section(s).name,
                              block,
                              e->section(s).is_pinned() ? "leased" : "without values"));
  for (int s = range.first; s < range.end(); ++s) {
    if (e->section(s).state(0) == CopyState::absent) e->section(s).apply({0, 1}, CopyAction::make);
    e->section(s).pin(Access::write);
  }
  e->held.push_back({.range = range});
  return {e->image, {}};
}

void HomeTiers::release(Block block,
                        SectionRange range,
                        std::optional<SectionRange> changed,
                        const std::optional<Event>& after) {
  check(block, range);
  Entry* const e = find(block);
  MOESAIC_CHECK(e != nullptr, fmt::format("block {} is not leased", block));
  auto& held = e->held;
  const auto lease = std::find_if(
      held.begin(), held.end(), [&](const Held& h) { return h.is_open && h.range == range; });
  MOESAIC_CHECK(lease != held.end(), fmt::format("block {} is not leased so", block));
  if (changed) {
    MOESAIC_CHECK(changed->first >= range.first && changed->end() <= range.end(),
                  "what changed lies in the lease");
    lease->changed = lease->changed ? joined(*lease->changed, *changed) : *changed;
  }
  std::erase_if(lease->after, [](const Event& event) { return event.reached(); });
  if (after) lease->after.push_back(*after);
  lease->is_open = false;
  if (all_reached(lease->after)) {
    end(block, *e, static_cast<std::size_t>(lease - held.begin()));
  } else {
    deferred_.push_back(block);
  }
}

bool HomeTiers::prefetch(Block block, SectionRange range) {
  check(block, range);
  if (!lives_in_file(block)) return true;
  Entry* e = stage(block, false);
  if (e == nullptr) return false;
  e->is_expected = true;
  start_where(block, *e, range, CopyState::absent, false);
  return true;
}

void HomeTiers::forget_prefetched() {
  for (auto& [block, e] : staged_)
    e.is_expected = false;
}

bool HomeTiers::is_ready(Block block, SectionRange range) {
  check(block, range);
  Entry* const found = find(block);
  if (found == nullptr) return false;
  Entry& e = *found;
  for (std::size_t i = e.running.size(); i-- > 0;)
    if (e.running[i].transfer.is_done()) finish(e, i);
  for (const Held& h : e.held)
    if (h.range.overlaps(range) && !(h.range == range) && !all_reached(h.after)) return false;
  for (int s = range.first; s < range.end(); ++s) {
    const CopyState state = e.section(s).state(0);
    if (state != CopyState::clean && state != CopyState::dirty) return false;
  }
  return true;
}

void HomeTiers::flush() {
  while (end_oldest()) {
  }
  for (const Entry& e : at_home_)
    MOESAIC_CHECK(e.held.empty(), "a block is leased");
  for (auto& [block, e] : staged_) {
    MOESAIC_CHECK(e.held.empty(), fmt::format("block {} is leased", block));
    settle(e, layout_.all());
    start_where(block, e, layout_.all(), CopyState::dirty, true);
  }
  for (auto& [block, e] : staged_)
    settle(e, layout_.all());
}

}  // namespace moesaic::tiers
