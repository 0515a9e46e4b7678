#include "core/train/tier_plan.h"

#include <algorithm>
#include <functional>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/base/memory_shortage.h"
#include "core/model/pipeline_plan.h"
#include "core/train/optimizer_config.h"
#include "memory/tiers/device_cache.h"
#include "memory/tiers/scratch_file.h"

namespace moesaic {
namespace {

using Kind = TierPart::Kind;
using tiers::DeviceCache;
using tiers::HomeTiers;
using tiers::RecordLayout;

constexpr std::int64_t kStagingSlots = 8;

RecordLayout layout_of(const TierGroup& group, Kind kind) {
  if (kind == Kind::weights) return RecordLayout({{"weight", group.weight_bytes}});
  if (kind == Kind::gradients) return RecordLayout({{"gradient", group.gradient_bytes}});
  std::vector<RecordLayout::Part> sections;
  for (const auto& [name, bytes] : group.state_sections)
    sections.push_back({name, bytes});
  return RecordLayout(sections);
}

/// A kind of a group while slots and places are chosen.
struct Chosen {
  const TierGroup* group;
  Kind kind;
  RecordLayout layout;
  std::int64_t blocks = 0, slots = 0, on_device = 0, in_file = 0, staging = 0;
  bool is_ring = false;  ///< blocks are the slots that all pass through, each good for some

  bool may_live_in_file() const { return kind != Kind::gradients; }
  std::int64_t passing() const { return is_ring ? 0 : blocks - on_device; }
  std::int64_t least_slots() const;
  std::uint64_t device() const { return DeviceCache::bytes_for(layout, layout.all(), slots); }
  std::uint64_t host() const {
    return HomeTiers::host_bytes_for(layout, passing(), in_file, staging);
  }
  std::uint64_t file() const {
    return in_file > 0 ? tiers::ScratchFile::bytes_for(layout, in_file) : 0;
  }
};

// For the members of a layer to stay, beside those slots that blocks only pass through (a quarter, and at most 32).
std::int64_t layer_slots(const TierGroup& group) {
  const std::int64_t members = group.members;
  return std::min(
      group.blocks(),
      members + std::clamp<std::int64_t>((members + 2) / 3, DeviceCache::kMinSlots, 32));
}

std::int64_t Chosen::least_slots() const {
  return is_ring ? std::min(layer_slots(*group), 2 * group->members) : DeviceCache::kMinSlots;
}

// What there is of the groups, kind by kind.
std::vector<Chosen> kinds_of(std::span<const TierGroup> groups, const ExpertTierOptions& options) {
  const bool weights = options.weights;
  std::vector<Chosen> all;
  for (const TierGroup& g : groups) {
    if (weights) all.push_back({&g, Kind::weights, layout_of(g, Kind::weights), g.blocks()});
    if (weights && g.trained) {
      all.push_back({&g, Kind::gradients, layout_of(g, Kind::gradients), g.blocks()});
      all.back().is_ring = options.gradients_in_ring;
      if (options.gradients_in_ring) all.back().blocks = std::min(g.blocks(), 2 * g.members);
    }
    if (!g.state_sections.empty() && g.owned > 0)
      all.push_back({&g, Kind::states, layout_of(g, Kind::states), g.owned});
  }
  return all;
}

std::uint64_t sum(const std::vector<Chosen>& all, std::uint64_t (Chosen::*bytes)() const) {
  std::uint64_t total = 0;
  for (const Chosen& c : all)
    total += (c.*bytes)();
  return total;
}

// The sizes of a message, in one unit, so that they compare: that of the largest that is needed.
class Sizes {
 public:
  explicit Sizes(std::uint64_t needed)
      : unit_(needed < std::uint64_t{100} << 10    ? Unit{1, "B"}
              : needed < std::uint64_t{100} << 20  ? Unit{std::uint64_t{1} << 10, "KiB"}
              : needed < std::uint64_t{1000} << 30 ? Unit{std::uint64_t{1} << 20, "MiB"}
                                                   : Unit{std::uint64_t{1} << 30, "GiB"}) {}
  // What must be given: rounded up, in a form that a key takes.
  std::string needed(std::uint64_t bytes) const {
    return fmt::format(
        "{}{}", bytes / unit_.bytes + (bytes % unit_.bytes != 0 ? 1 : 0), unit_.name);
  }
  // What is there: to two places, rounded down.
  std::string there(std::uint64_t bytes) const {
    if (bytes % unit_.bytes == 0) return needed(bytes);
    const std::uint64_t hundredths =
        bytes / unit_.bytes * 100 + bytes % unit_.bytes * 100 / unit_.bytes;
    return fmt::format("{}.{:02}{}", hundredths / 100, hundredths % 100, unit_.name);
  }
  // A part of what is needed, however small.
  std::string part(std::uint64_t bytes) const {
    const double amount = static_cast<double>(bytes) / static_cast<double>(unit_.bytes);
    return amount < 1000 ? fmt::format("{:.3g}{}", amount, unit_.name) : needed(bytes);
  }

 private:
  struct Unit {
    std::uint64_t bytes;
    const char* name;
  } unit_;
};

using Value = std::int64_t Chosen::*;
using Goal = std::function<std::int64_t(const Chosen&)>;

// Moves a value of all towards its goal, by the largest equal share of the way with which `fits`, and then one by one.
void approach(std::vector<Chosen>& all,
              Value value,
              const Goal& goal,
              const std::function<bool()>& fits) {
  std::vector<std::int64_t> from, way;
  std::int64_t longest = 0;
  for (const Chosen& c : all) {
    from.push_back(c.*value);
    way.push_back(std::max<std::int64_t>(0, goal(c) - c.*value));
    longest = std::max(longest, way.back());
  }
  const auto go = [&](std::int64_t part) {
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i].*value = from[i] + way[i] * part / longest;
  };
  if (longest == 0) return;
  std::int64_t good = 0, bad = longest + 1;
  while (bad - good > 1) {
    const std::int64_t middle = good + (bad - good) / 2;
    go(middle);
    (fits() ? good : bad) = middle;
  }
  go(good);
  for (std::size_t i = 0; i < all.size(); ++i) {
    while (all[i].*value < from[i] + way[i]) {
      ++(all[i].*value);
      if (fits()) continue;
      --(all[i].*value);
      break;
    }
  }
}

// "3 slots of 12MiB for weights of gate_up".
std::string floor_text(const Chosen& c, const Sizes& sizes) {
  return fmt::format("{} slots of {} for {} of {}",
                     c.least_slots(),
                     sizes.part(c.layout.bytes(c.layout.all())),
                     name(c.kind),
                     c.group->name);
}

std::string joined(const std::vector<std::string>& texts) {
  std::string all;
  for (const std::string& text : texts)
    all += (all.empty() ? "" : ", ") + text;
  return all;
}

[[noreturn]] void refuse_device(const std::vector<Chosen>& all, const TierLimits& limits) {
  const std::uint64_t least = sum(all, &Chosen::device), needed = least + limits.device_rest;
  const Sizes sizes(needed);
  std::vector<std::string> floors;
  for (const Chosen& c : all)
    floors.push_back(floor_text(c, sizes));
  const std::string key =
      limits.device_key.empty() ? "the free memory of the device" : limits.device_key;
  std::string text = fmt::format(
      "experts.offload: the caches of experts need at least {} of device memory ({}); {} is {}",
      sizes.needed(least),
      joined(floors),
      key,
      sizes.there(limits.device_budget.value_or(limits.device)));
  if (limits.device_budget)
    text += fmt::format(", and the rest of the run needs {}", sizes.needed(limits.device_rest));
  const std::string less =
      fmt::format(" lower what the rest needs: {}, train.micro_batch_size",
                  limits.is_forward_only ? "data.sequence_length" : "activations.recompute");
  const bool is_free_memory = limits.device_key.empty();
  if (!is_free_memory)
    text += fmt::format(". Raise {} to at least {}", key, sizes.needed(needed));
  else
    text += limits.is_forward_only ? ". Free memory there" : ". Use more GPUs (parallel.ep)";
  if (limits.device_budget || is_free_memory) text += ", or" + less;
  throw MemoryShortage(MemoryShortage::Where::device, needed, text);
}

// Blocks get slots for good, and no home elsewhere, as far as enough slots are left for the others to pass through.
void settle(Chosen& c, bool is_vertical) {
  if (c.is_ring) {
    c.on_device = c.slots;
    return;
  }
  if (c.slots >= c.blocks) {
    c.slots = c.on_device = c.blocks;
    return;
  }
  const std::int64_t passing =
      c.kind == Kind::states ? kStateSlots
      : is_vertical          ? layer_slots(*c.group)
                             : std::clamp<std::int64_t>(c.slots / 4, kRunSlots, 4 * kRunSlots);
  c.on_device = std::max<std::int64_t>(c.on_device, c.slots - passing);
}

// `least_rings`: rings of gradients are as short as they may be.
void place_on_device(std::vector<Chosen>& all, const TierLimits& limits, bool least_rings) {
  for (Chosen& c : all) {
    c.slots = c.least_slots();
    if (c.is_ring && (least_rings || limits.least_slots)) c.blocks = c.slots;
    if (c.is_ring) c.on_device = c.slots;
  }
  const auto fits = [&] { return sum(all, &Chosen::device) <= limits.device; };
  if (!fits()) refuse_device(all, limits);
  if (limits.least_slots) return;
  const auto towards = [&](Kind kind, const std::function<std::int64_t(const Chosen&)>& slots) {
    approach(
        all,
        &Chosen::slots,
        [&](const Chosen& c) { return c.kind == kind ? slots(c) : c.slots; },
        fits);
  };
  towards(Kind::states, [](const Chosen& c) { return std::min(kStateSlots, c.blocks); });
  for (const Kind kind : {Kind::weights, Kind::gradients})
    towards(kind, [](const Chosen& c) { return std::min(kRunSlots, c.group->members); });
  if (limits.is_vertical) {
    for (const Kind kind : {Kind::gradients, Kind::weights})
      towards(kind, [](const Chosen& c) { return std::min(layer_slots(*c.group), c.blocks); });
  }
  towards(Kind::gradients, [](const Chosen& c) { return c.is_ring ? c.blocks : c.slots; });
  for (const Kind kind : {Kind::weights, Kind::gradients, Kind::states})
    towards(kind, [](const Chosen& c) { return c.blocks; });
  // Gradients and states are used once by every update, so that it does not matter which of them stay; weights are left to the
  // policy unless all of them have a slot.
  for (Chosen& c : all) {
    if (c.kind != Kind::weights || limits.keeps_any_weights || c.slots >= c.blocks)
      settle(c, limits.is_vertical);
  }
}

// All that may live in the file does, with the least staging.
std::vector<Chosen> with_all_in_file(std::vector<Chosen> all) {
  for (Chosen& c : all) {
    if (!c.may_live_in_file()) continue;
    c.in_file = c.passing();
    c.staging = HomeTiers::kMinStaging;
  }
  return all;
}

// "48MiB gradients of gate_up, 0.5MiB staging for states of gate_up, 1MiB tables of slots".
std::string host_parts(const std::vector<Chosen>& all,
                       const TierLimits& limits,
                       std::uint64_t tables,
                       const Sizes& sizes) {
  std::vector<std::string> parts;
  for (const Chosen& c : all) {
    if (c.host() == 0) continue;
    parts.push_back(fmt::format("{} {}{} of {}",
                                sizes.part(c.host()),
                                c.in_file > 0 ? "staging for " : "",
                                name(c.kind),
                                c.group->name));
  }
  if (tables > 0) parts.push_back(sizes.part(tables) + " tables of slots");
  if (limits.host_rest > 0)
    parts.push_back(sizes.part(limits.host_rest) + " offloaded activations");
  return joined(parts);
}

[[noreturn]] void refuse_host(const std::vector<Chosen>& all,
                              const TierLimits& limits,
                              std::uint64_t tables) {
  const std::uint64_t rest = tables + limits.host_rest, needed = sum(all, &Chosen::host) + rest;
  const std::vector<Chosen> in_file = with_all_in_file(all);
  const std::uint64_t least = sum(in_file, &Chosen::host) + rest;
  const Sizes sizes(needed);
  std::string text = fmt::format("experts.offload: this rank needs {} of host memory ({}); ",
                                 sizes.needed(needed),
                                 host_parts(all, limits, tables, sizes));
  text += limits.host_is_budget ? fmt::format("memory.host_budget is {}", sizes.there(limits.host))
                                : fmt::format("{} are available to this rank, as the system counts",
                                              sizes.there(limits.host));
  if (limits.host < least) {  // no file is of any help
    text += fmt::format(
        ". However large a file is, at least {} must be in host memory ({}). {} memory.host_budget "
        "to at least {}, or give the caches more device memory, in which more of it can stay",
        sizes.needed(least),
        host_parts(in_file, limits, tables, sizes),
        limits.host_is_budget ? "Raise" : "If more can be had, set",
        sizes.needed(least));
  } else if (limits.file == 0) {
    text += limits.host_is_budget
                ? ". Raise it, or let what does not fit live in a file: memory.file_path and "
                  "memory.file_budget"
                : ". Set memory.host_budget, to what can be had if that is more, and let the "
                  "rest live in a file (memory.file_path and memory.file_budget)";
  } else {
    text += fmt::format(
        ", and memory.file_budget ({}) does not hold the rest. Raise memory.host_budget or "
        "memory.file_budget",
        sizes.there(limits.file));
  }
  throw MemoryShortage(MemoryShortage::Where::host, needed, text);
}

TierPolicy policy_of(config::ExpertPolicy policy) {
  switch (policy) {
    case config::ExpertPolicy::sched:
      return TierPolicy::sched;
    case config::ExpertPolicy::lru:
      return TierPolicy::lru;
    case config::ExpertPolicy::fixed:
      return TierPolicy::fixed;
    case config::ExpertPolicy::random:
      return TierPolicy::random;
  }
  throw InternalError("a cache policy without a name");
}

// With so many staging slots for what lives in the file; false when it does not fit.
bool place_at_home(std::vector<Chosen>& all,
                   const TierLimits& limits,
                   std::uint64_t tables,
                   std::int64_t staging) {
  for (Chosen& c : all) {
    c.in_file = 0;
    c.staging = 0;
  }
  const auto fits_host = [&] {
    return sum(all, &Chosen::host) + tables + limits.host_rest <= limits.host;
  };
  if (fits_host()) return true;
  // What has a slot for good needs no home.
  for (Chosen& c : all)
    settle(c, limits.is_vertical);
  if (fits_host()) return true;
  if (limits.file == 0) return false;
  for (const Kind kind : {Kind::states, Kind::weights}) {
    std::int64_t longest = 0;
    for (const Chosen& c : all)
      longest = std::max(longest, c.kind == kind ? c.passing() : 0);
    if (longest == 0) continue;
    const auto go = [&](std::int64_t part) {
      for (Chosen& c : all) {
        if (c.kind != kind) continue;
        c.in_file = (c.passing() * part + longest - 1) / longest;
        c.staging = c.in_file > 0 ? staging : 0;
      }
    };
    std::int64_t bad = 0, good = longest;
    go(good);
    if (!fits_host()) continue;  // all of this kind, and some of the next
    while (good - bad > 1) {
      const std::int64_t middle = bad + (good - bad) / 2;
      go(middle);
      (fits_host() ? good : bad) = middle;
    }
    go(good);
    return sum(all, &Chosen::file) <= limits.file;
  }
  return false;
}

}  // namespace

const char* name(TierPart::Kind kind) noexcept {
  switch (kind) {
    case Kind::weights:
      return "weights";
    case Kind::gradients:
      return "gradients";
    case Kind::states:
      return "states";
  }
  return "";
}

double TierPart::share() const {
  return blocks == 0 ? 1 : std::min(1.0, static_cast<double>(slots) / static_cast<double>(blocks));
}

std::vector<TierPart> tier_parts(std::span<const TierGroup> groups,
                                 const ExpertTierOptions& options) {
  MOESAIC_CHECK(options.groups.size() == groups.size(), "options for every group");
  std::vector<TierPart> parts;
  for (Chosen& c : kinds_of(groups, options)) {
    const TierGroupOptions& o = options.groups[static_cast<std::size_t>(c.group - groups.data())];
    c.slots = c.kind == Kind::weights     ? o.weight_slots
              : c.kind == Kind::gradients ? o.gradient_slots
                                          : o.state_slots;
    c.in_file = c.kind == Kind::weights  ? o.weights_in_file
                : c.kind == Kind::states ? o.states_in_file
                                         : 0;
    c.on_device = c.kind == Kind::weights     ? o.weights_on_device
                  : c.kind == Kind::gradients ? o.gradients_on_device
                                              : o.states_on_device;
    c.staging = c.in_file > 0 ? o.staging_slots : 0;
    if (c.is_ring) c.blocks = c.on_device = c.slots;
    parts.push_back({.group = c.group->name,
                     .kind = c.kind,
                     .blocks = c.blocks,
                     .members = c.group->members,
                     .is_ring = c.is_ring,
                     .block_bytes = c.layout.bytes(c.layout.all()),
                     .slots = c.slots,
                     .on_device = c.on_device,
                     .in_file = c.in_file,
                     .staging_slots = c.staging,
                     .device = c.device(),
                     .host = c.host(),
                     .file = c.file()});
  }
  return parts;
}

std::uint64_t device_bytes(std::span<const TierPart> parts) {
  std::uint64_t sum = 0;
  for (const TierPart& p : parts)
    sum += p.device;
  return sum;
}
std::uint64_t host_bytes(std::span<const TierPart> parts) {
  std::uint64_t sum = 0;
  for (const TierPart& p : parts)
    sum += p.host;
  return sum;
}
std::uint64_t file_bytes(std::span<const TierPart> parts) {
  std::uint64_t sum = 0;
  for (const TierPart& p : parts)
    sum += p.file;
  return sum;
}

void fill_tiers(std::span<const TierGroup> groups,
                const TierLimits& limits,
                ExpertTierOptions& options) {
  std::vector<Chosen> all;
  const std::uint64_t tables = options.weights ? slot_table_bytes(groups) : 0;
  bool has_room = false;
  for (const bool least_rings : {false, true}) {
    if (has_room || (least_rings && !options.gradients_in_ring)) break;
    all = kinds_of(groups, options);
    place_on_device(all, limits, least_rings);
    for (std::int64_t staging = kStagingSlots; !has_room && staging >= HomeTiers::kMinStaging;
         staging /= 2)
      has_room = place_at_home(all, limits, tables, staging);
  }
  if (!has_room) {
    for (Chosen& c : all)
      c.in_file = c.staging = 0;
    refuse_host(all, limits, tables);
  }
  options.groups.assign(groups.size(), {});
  for (const Chosen& c : all) {
    TierGroupOptions& o = options.groups[static_cast<std::size_t>(c.group - groups.data())];
    (c.kind == Kind::weights     ? o.weight_slots
     : c.kind == Kind::gradients ? o.gradient_slots
                                 : o.state_slots) = c.slots;
    (c.kind == Kind::weights     ? o.weights_on_device
     : c.kind == Kind::gradients ? o.gradients_on_device
                                 : o.states_on_device) = c.on_device;
    if (c.kind == Kind::weights) o.weights_in_file = c.in_file;
    if (c.kind == Kind::states) o.states_in_file = c.in_file;
    o.staging_slots = std::max(o.staging_slots, c.staging);
  }
}

TierLimits tier_limits(const config::Config& config) {
  const auto limit = [](const std::optional<std::int64_t>& bytes, std::uint64_t otherwise) {
    return bytes ? static_cast<std::uint64_t>(*bytes) : otherwise;
  };
  return {.device = limit(config.experts.device_cache, TierLimits::kNoLimit),
          .host = limit(config.memory.host_budget, TierLimits::kNoLimit),
          .file = limit(config.memory.file_budget, 0),
          .is_vertical = goes_by_layers(config),
          .keeps_any_weights = config.experts.policy == config::ExpertPolicy::fixed};
}

ExpertTierOptions expert_tier_options(const config::Config& config, int rank) {
  MOESAIC_CHECK(config.experts.offload != config::ExpertOffload::none, "experts are offloaded");
  ExpertTierOptions options;
  options.weights = config.experts.offload == config::ExpertOffload::full;
  options.gradients_in_ring =
      options.weights && config.experts.update == config::ExpertUpdateTime::in_backward;
  options.policy = policy_of(config.experts.policy);
  options.seed = static_cast<std::uint64_t>(config.run.seed);
  options.state_kinds = expert_state_kinds(optimizer_options(config.optimizer));
  options.folder = config.memory.file_path.value_or("");
  options.rank = rank;
  options.verify_reads = config.memory.verify_reads;
  options.stream_mode =
      config.debug.immediate_streams ? Stream::Mode::immediate : Stream::Mode::worker;
  return options;
}

ExpertTierOptions plan_expert_tiers(const config::Config& config,
                                    std::span<const TierGroup> groups,
                                    const TierLimits& limits,
                                    int rank) {
  ExpertTierOptions options = expert_tier_options(config, rank);
  fill_tiers(groups, limits, options);
  return options;
}

TierLinkBytes link_bytes(std::span<const TierPart> parts,
                         std::int64_t micro_batches,
                         std::int64_t rounds) {
  TierLinkBytes sum;
  const bool is_early = std::any_of(parts.begin(), parts.end(), [](const TierPart& p) {
    return p.kind == Kind::gradients && p.is_ring;
  });
  for (const TierPart& p : parts) {
    const auto all = static_cast<double>(p.bytes());
    const double missed = all * (1 - p.share());
    const double homeless =
        p.blocks == 0 ? 0 : static_cast<double>(p.on_device) / static_cast<double>(p.blocks);
    // A cache that holds a layer meets it once for all micro-batches that follow each other.
    const bool holds_layer = p.slots >= p.members;
    const auto visits = static_cast<double>(holds_layer ? rounds : micro_batches);
    // An update right behind its backward finds what that used.
    const double updates = is_early && holds_layer ? 0 : 1;
    switch (p.kind) {
      case Kind::weights:
        sum.up += (2 * visits + updates) * missed;
        sum.down += all * (1 - homeless);
        break;
      case Kind::gradients:
        sum.up += (visits + 1) * missed;
        sum.down += visits * missed;
        break;
      case Kind::states:
        sum.up += missed;
        sum.down += missed;
        break;
    }
  }
  return sum;
}

}  // namespace moesaic
