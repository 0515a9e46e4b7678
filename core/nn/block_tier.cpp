#include "core/nn/block_tier.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/random.h"

namespace moesaic {
namespace {

using tiers::DeviceCache;
using tiers::HomeTiers;

struct Transit {
  std::int64_t main = 0, beside = 0;
  std::int64_t all() const { return main + beside; }
};

// Slots that blocks pass through: half of them in use, half on their way. More make longer runs of members for the kernels,
// and leave fewer to keep blocks in: a quarter, or what a twentieth of all blocks would take, which few hits are lost by.
// Weights are used by updates beside the forward as well, a block at a time.
Transit transit_of(std::int64_t slots, std::int64_t blocks, bool is_weights) {
  constexpr std::int64_t kMost = 32;
  if (slots >= blocks) return {slots - blocks};
  const std::int64_t main =
      std::min(slots, std::clamp(std::max(slots / 4, blocks / 20), DeviceCache::kMinSlots, kMost));
  const std::int64_t beside = is_weights ? main / 4 : 0;
  return {std::min(main, slots - beside), beside};
}

std::unique_ptr<tiers::CachePolicy> first_policy(const BlockTier::Options& o,
                                                 const ExpertTierOptions& all) {
  switch (all.policy) {
    case TierPolicy::fixed:
      return tiers::make_static_policy(o.weights);
    case TierPolicy::random:
      return tiers::make_random_policy(all.seed ^ hash_name(o.group + " " + o.kind));
    case TierPolicy::sched:
    case TierPolicy::lru:
      break;
  }
  // An update goes through all states in the same order: what stays must not follow the uses.
  return o.kind == "states" && all.policy == TierPolicy::sched
             ? tiers::make_static_policy(o.weights)
             : tiers::make_lru_policy();
}

// Which of the blocks are `some` of those that are not `taken`, spread evenly.
std::vector<std::uint8_t> spread(std::int64_t some, const std::vector<std::uint8_t>& taken) {
  const std::int64_t free = std::count(taken.begin(), taken.end(), std::uint8_t{0});
  std::vector<std::uint8_t> chosen(taken.size(), 0);
  std::int64_t seen = 0;
  for (std::size_t b = 0; b < taken.size(); ++b) {
    if (taken[b] != 0) continue;
    chosen[b] = (seen + 1) * some / free > seen * some / free ? 1 : 0;
    ++seen;
  }
  return chosen;
}

std::string file_name(const BlockTier::Options& o, const ExpertTierOptions& all) {
  std::string name = all.file_prefix + o.group + "-" + o.kind;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '/' || c == ' '; }, '_');
  return name;
}

}  // namespace

BlockTier::BlockTier(Options options, const ExpertTierOptions& all, Device device, bool pretend)
    : options_(std::move(options)), layout_(options_.sections), device_(device) {
  Options& o = options_;
  MOESAIC_CHECK(o.in_file >= 0 && o.on_device >= 0 && o.in_file + o.on_device <= o.blocks,
                fmt::format("{} of {} {} in the file and {} on the device",
                            o.in_file,
                            o.blocks,
                            name(),
                            o.on_device));
  if (pretend) return;
  if (passing_slots() < (passing_blocks() > 0 ? DeviceCache::kMinSlots : 0)) {
    throw ResourceError(
        fmt::format("{} slots of {} bytes on the device for the experts' {}; at least {} are "
                    "needed: raise memory.device_budget or experts.device_cache",
                    passing_slots(),
                    layout_.bytes(layout_.all()),
                    name(),
                    DeviceCache::kMinSlots));
  }
  HomeTiers::Options homes{
      .staging_slots = o.staging_slots, .device = device, .poison = all.poison};
  const std::vector<std::uint8_t> none(static_cast<std::size_t>(o.blocks), 0);
  homes.on_device = spread(o.on_device, none);
  // Between those in host memory, so that the disk is at work during all of a pass and not in a burst at its end.
  homes.in_file = spread(o.in_file, homes.on_device);
  homes.file.file = {.folder = all.folder, .rank = all.rank, .name = file_name(o, all)};
  homes.file.verify_reads = all.verify_reads;
  homes.file.name = o.name_of_block;
  homes.io = all.io;
  homes_ = std::make_unique<HomeTiers>(layout_, std::move(homes));
  const Transit transit = transit_of(passing_slots(), passing_blocks(), is_weights());
  cache_ = std::make_unique<DeviceCache>(*homes_,
                                         DeviceCache::Options{.name = "experts' " + name(),
                                                              .range = layout_.all(),
                                                              .slots = o.slots,
                                                              .transit = transit.all(),
                                                              .transit_beside = transit.beside,
                                                              .device = device,
                                                              .mode = all.stream_mode,
                                                              .poison = all.poison},
                                         first_policy(o, all));
  if (o.on_device == 0) return;
  std::uint64_t most = 0;
  for (const tiers::Section& section : layout_.sections())
    most = std::max(most, section.bytes);
  staging_ = make_host_buffer(most, device, "experts' staging, host");
}

std::int64_t BlockTier::at_once(Lane lane) const {
  if (options_.most_at_once > 0) return options_.most_at_once;
  if (fits()) return options_.blocks;
  const Transit transit = transit_of(passing_slots(), passing_blocks(), is_weights());
  const bool is_beside = lane == Lane::beside && transit.beside > 0;
  return std::max<std::int64_t>(1, (is_beside ? transit.beside : transit.main) / 2);
}

TensorView BlockTier::slot(std::int64_t slot, int section, DType dtype, Shape shape) const {
  return {cache_->data(slot, section), dtype, shape, device_};
}

TensorView BlockTier::slots(int section, DType dtype, Shape of_slot) const {
  return {cache_->data(0, section), dtype, {options_.slots, of_slot[0], of_slot[1]}, device_};
}

std::size_t BlockTier::device_bytes() const {
  return DeviceCache::bytes_for(layout_, layout_.all(), options_.slots);
}

std::size_t BlockTier::host_bytes() const {
  return tiers::HomeTiers::host_bytes_for(
      layout_, passing_blocks(), options_.in_file, options_.staging_slots);
}

std::size_t BlockTier::file_bytes() const {
  return options_.in_file > 0 ? tiers::ScratchFile::bytes_for(layout_, options_.in_file) : 0;
}

void BlockTier::with_host(tiers::Block block,
                          int section,
                          DType dtype,
                          Shape shape,
                          MemberAccess access,
                          const std::function<void(TensorView)>& work) const {
  if (homes_->lives_on_device(block)) return with_slot(block, section, dtype, shape, access, work);
  with_home(block, section, dtype, shape, access, work);
}

void BlockTier::with_home(tiers::Block block,
                          int section,
                          DType dtype,
                          Shape shape,
                          MemberAccess access,
                          const std::function<void(TensorView)>& work) const {
  const tiers::SectionRange range{section, 1};
  cache_->write_back(block);
  using Contents = HomeTiers::Contents;
  // A section without values is filled part by part.
  const bool is_new = access == MemberAccess::replace ||
                      (access == MemberAccess::change && !homes_->has_values(block, range));
  const HomeTiers::Lease lease =
      homes_->lease(block, range, is_new ? Contents::replaced : Contents::needed);
  const bool changes = access != MemberAccess::read;
  try {
    for (const Event& e : lease.pending)
      if (!e.reached()) e.wait_on_host();
    work(TensorView(lease.image + layout_.section(section).offset, dtype, shape, kCpu));
  } catch (...) {
    homes_->release(block, range, std::nullopt);
    throw;
  }
  homes_->release(block, range, changes ? std::optional(range) : std::nullopt);
  if (changes) cache_->discard(block);
}

// Through a copy: the slot is the only place.
void BlockTier::with_slot(tiers::Block block,
                          int section,
                          DType dtype,
                          Shape shape,
                          MemberAccess access,
                          const std::function<void(TensorView)>& work) const {
  Stream& stream = cache_->write_stream();
  const auto how = access == MemberAccess::read ? tiers::Access::read : tiers::Access::write;
  const std::int64_t number = cache_->acquire(
      block,
      how,
      stream,
      cache_->holds(block) ? DeviceCache::Contents::loaded : DeviceCache::Contents::replaced);
  const TensorView there = slot(number, section, dtype, shape), here = staging_.view(shape, dtype);
  try {
    if (access != MemberAccess::replace) copy_tensor(here, there, stream);
    stream.synchronize();
    work(here);
    if (how == tiers::Access::write) copy_tensor(there, here, stream);
  } catch (...) {
    cache_->release(block, how, stream);
    throw;
  }
  cache_->release(
      block,
      how,
      stream,
      how == tiers::Access::write ? std::optional(tiers::SectionRange{section, 1}) : std::nullopt);
  stream.synchronize();
}

TierCounters BlockTier::counters() const {
  TierCounters c{.group = options_.group, .kind = options_.kind, .cache = cache_->counters()};
  if (homes_->file() != nullptr) {
    const tiers::FileTier::Counters file = homes_->file()->counters();
    c.file_bytes_read = file.bytes_read;
    c.file_bytes_written = file.bytes_written;
  }
  c.host_waits = homes_->lease_waits() + homes_->file_waits();
  c.host_wait_seconds = homes_->lease_wait_seconds() + homes_->file_wait_seconds();
  return c;
}

void BlockTier::expect(std::vector<tiers::Block> blocks) {
  if (options_.in_file == 0) return;
  homes_->forget_prefetched();
  expected_ = std::move(blocks);
  used_ = read_ = 0;
  note_use(-1);
}

// Keeps as many blocks on their way from the file as there are staging slots beside that of a block in use.
void BlockTier::note_use(tiers::Block block) {
  if (options_.in_file == 0) return;
  const auto next = expected_.begin() + static_cast<std::ptrdiff_t>(used_);
  const auto found = std::find(next, expected_.end(), block);
  if (found != expected_.end()) used_ = static_cast<std::size_t>(found - expected_.begin()) + 1;
  read_ = std::max(read_, used_);
  std::int64_t ahead = 0;
  for (std::size_t i = used_; i < expected_.size() && ahead < options_.staging_slots - 1; ++i) {
    const tiers::Block b = expected_[i];
    if (!homes_->lives_in_file(b) || cache_->holds(b)) continue;
    ++ahead;
    if (i < read_) continue;
    if (!homes_->prefetch(b, all())) return;
    read_ = i + 1;
  }
}

// What lives in the file is left out: when it arrives is a matter of time, and what a cache holds must not be.
void BlockTier::load_ahead(const std::vector<tiers::Foreseen>& blocks) {
  std::int64_t left = at_once();
  for (const tiers::Foreseen& f : blocks) {
    if (left-- == 0) return;
    if (!homes_->lives_in_file(f.block)) cache_->prefetch(f.block, true);
  }
}

std::int64_t BlockPins::take(BlockTier& tier, tiers::Block block, MemberAccess access) {
  const auto how = access == MemberAccess::read ? tiers::Access::read : tiers::Access::write;
  const std::int64_t slot =
      tier.cache().acquire(block,
                           how,
                           user_,
                           access == MemberAccess::replace ? DeviceCache::Contents::replaced
                                                           : DeviceCache::Contents::loaded,
                           lane_);
  pins_.push_back({&tier, block, how});
  tier.note_use(block);
  return slot;
}

void BlockPins::done() {
  const std::vector<Pin> pins = std::exchange(pins_, {});
  for (const Pin& p : pins)
    p.tier->cache().release(
        p.block,
        p.access,
        user_,
        p.access == tiers::Access::write ? std::optional(p.tier->all()) : std::nullopt);
  // Weights that stay go home as well: all that goes in forward and backward is then free to go.
  for (const Pin& p : pins) {
    if (p.access == tiers::Access::write &&
        (p.tier->is_weights() || !p.tier->cache().keeps(p.block)))
      p.tier->cache().write_back(p.block, lane_);
  }
}

BlockPins::~BlockPins() {
  for (const Pin& p : pins_) {
    try {
      p.tier->cache().release(p.block, p.access, user_);
    } catch (const std::exception&) {  // an error is on its way already
    }
  }
}

}  // namespace moesaic
