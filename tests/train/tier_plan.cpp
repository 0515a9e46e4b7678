// Slots and places of offloaded experts, from sizes and limits.
#include "core/train/tier_plan.h"

#include <algorithm>
#include <random>
#include <string>

#include "core/base/error.h"
#include "memory/tiers/device_cache.h"
#include "tests/support/catch.h"

using namespace moesaic;
using Kind = TierPart::Kind;

namespace {

constexpr std::int64_t kLeast = tiers::DeviceCache::kMinSlots;

TierGroup group(const std::string& name, int layers, std::int64_t members, std::size_t elements) {
  TierGroup g;
  g.name = name;
  g.storages.resize(static_cast<std::size_t>(layers));
  g.members = members;
  g.rows = 1;
  g.cols = static_cast<std::int64_t>(elements);
  g.owned = g.blocks();
  g.weight_bytes = 2 * elements;
  g.gradient_bytes = 4 * elements;
  g.state_sections = {{"remainder", 2 * elements}, {"m", 4 * elements}, {"v", 4 * elements}};
  return g;
}

// Of one layer 16 members, 6 layers; pages of 4096 bytes.
std::vector<TierGroup> two_groups() {
  return {group("gate_up", 6, 16, 8192), group("down", 6, 16, 4096)};
}

std::vector<TierPart> fill(const std::vector<TierGroup>& groups,
                           const TierLimits& limits,
                           bool weights = true,
                           bool in_ring = false) {
  ExpertTierOptions options;
  options.weights = weights;
  options.gradients_in_ring = in_ring;
  fill_tiers(groups, limits, options);
  return tier_parts(groups, options);
}

std::int64_t slots(const std::vector<TierPart>& parts, Kind kind, const std::string& of) {
  for (const TierPart& p : parts)
    if (p.kind == kind && p.group == of) return p.slots;
  return -1;
}

std::int64_t in_file(const std::vector<TierPart>& parts, Kind kind) {
  std::int64_t blocks = 0;
  for (const TierPart& p : parts)
    blocks += p.kind == kind ? p.in_file : 0;
  return blocks;
}

std::string refusal(const std::vector<TierGroup>& groups,
                    const TierLimits& limits,
                    bool in_ring = false) {
  try {
    fill(groups, limits, true, in_ring);
  } catch (const ResourceError& e) {
    return e.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  INFO(text);
  return text.find(part) != std::string::npos;
}

std::uint64_t floor_bytes(const std::vector<TierGroup>& groups) {
  std::uint64_t bytes = 0;
  for (const TierGroup& g : groups) {
    std::uint64_t of_block = g.weight_bytes + g.gradient_bytes;
    for (const auto& section : g.state_sections)
      of_block += section.second;
    bytes += static_cast<std::uint64_t>(kLeast) * of_block;
  }
  return bytes;
}

}  // namespace

TEST_CASE("tier plan: without limits everything lives on the device, and nowhere else") {
  const auto parts = fill(two_groups(), {});
  REQUIRE(parts.size() == 6);
  for (const TierPart& p : parts) {
    CAPTURE(p.group, name(p.kind));
    CHECK(p.blocks == 96);
    CHECK(p.slots == 96);
    CHECK(p.on_device == 96);
    CHECK(p.share() == 1.0);
    CHECK(p.in_file == 0);
    CHECK(p.host == 0);
    CHECK(p.file == 0);
  }
  CHECK(device_bytes(parts) > 96 * (8192 + 4096) * 6);
}

TEST_CASE("tier plan: the floor fits exactly, a byte less is refused with all numbers") {
  const auto groups = two_groups();
  TierLimits limits{.device = floor_bytes(groups)};
  for (const TierPart& p : fill(groups, limits))
    CHECK(p.slots == kLeast);
  --limits.device;
  std::string text = refusal(groups, limits);
  // 3 x (16 + 32 + 80 + 8 + 16 + 40) KiB.
  CHECK(contains(text, "the caches of experts need at least 576KiB of device memory"));
  CHECK(contains(text, "3 slots of 16KiB for weights of gate_up"));
  CHECK(contains(
      text, "experts.device_cache is 575.99KiB. Raise experts.device_cache to at least 576KiB"));
  limits.device_key = "memory.device_budget";
  limits.device_budget = (std::uint64_t{10} << 20) + limits.device;
  limits.device_rest = std::uint64_t{10} << 20;
  text = refusal(groups, limits);
  CHECK(contains(text,
                 "memory.device_budget is 10815.99KiB, and the rest of the run needs 10240KiB"));
  CHECK(contains(text, "Raise memory.device_budget to at least 10816KiB, or lower"));
  // All numbers in the unit of what is needed, whatever their size.
  limits.device_budget = std::uint64_t{200} << 20;
  limits.device_rest = std::uint64_t{200} << 20;
  text = refusal(groups, limits);
  CHECK(contains(text, "need at least 1MiB of device memory"));
  CHECK(contains(text, "3 slots of 0.0156MiB for weights of gate_up"));
  CHECK(contains(text, "memory.device_budget is 200MiB, and the rest of the run needs 200MiB"));
  CHECK(contains(text, "Raise memory.device_budget to at least 201MiB"));
  CHECK(!contains(text, "KiB"));
  limits.device_key = "";
  CHECK(contains(refusal(groups, limits), "the free memory of the device is"));
  CHECK(contains(refusal(groups, limits), "Use more GPUs"));
}

TEST_CASE("tier plan: what comes first, and the same share in every group") {
  const auto groups = two_groups();
  TierLimits limits{.device = 0};
  // All kinds at the floor, states at their few slots, eight slots for runs.
  limits.device = floor_bytes(groups) + (kStateSlots - kLeast) * 12288 * 10;
  auto parts = fill(groups, limits);
  CHECK(slots(parts, Kind::states, "gate_up") == kStateSlots);
  CHECK(slots(parts, Kind::weights, "gate_up") == kLeast);
  limits.device += 5 * 12288 * 6;
  parts = fill(groups, limits);
  for (const Kind kind : {Kind::weights, Kind::gradients})
    for (const char* of : {"gate_up", "down"})
      CHECK(slots(parts, kind, of) == kRunSlots);
  // Weights before gradients; in vertical order those of a layer first.
  limits.device += 40 * 12288 * 2;
  parts = fill(groups, limits);
  CHECK(slots(parts, Kind::weights, "gate_up") == kRunSlots + 40);
  CHECK(slots(parts, Kind::weights, "down") == kRunSlots + 40);
  CHECK(slots(parts, Kind::gradients, "down") == kRunSlots);
  limits.is_vertical = true;
  parts = fill(groups, limits);
  CHECK(slots(parts, Kind::gradients, "gate_up") == 16 + 6);
  CHECK(slots(parts, Kind::weights, "gate_up") == kRunSlots + 40 - 2 * 14);
}

TEST_CASE("tier plan: which blocks get a slot for good, and no home") {
  const auto groups = two_groups();
  const auto part = [](const std::vector<TierPart>& parts, Kind kind) {
    return *std::find_if(
        parts.begin(), parts.end(), [&](const TierPart& p) { return p.kind == kind; });
  };
  // All weights and half of the gradients.
  TierLimits limits{.device = 12288 * (96 * 2 + 48 * 4 + kStateSlots * 10)};
  auto parts = fill(groups, limits);
  CHECK(part(parts, Kind::weights).on_device == 96);
  CHECK(part(parts, Kind::gradients).slots == 48);
  CHECK(part(parts, Kind::gradients).on_device == 48 - 12);
  CHECK(part(parts, Kind::states).on_device == 0);
  // In vertical order the gradients of a layer pass; states come last.
  limits.is_vertical = true;
  CHECK(part(fill(groups, limits), Kind::gradients).on_device == 48 - 22);
  limits.device = 12288 * 96 * 6 + 12288 * 48 * 10;
  parts = fill(groups, limits);
  CHECK(part(parts, Kind::gradients).on_device == 96);
  CHECK(part(parts, Kind::states).slots == 48);
  CHECK(part(parts, Kind::states).on_device == 48 - kStateSlots);
  // Some of the weights are for the policy to choose, unless it is static or host memory does not hold them all.
  limits = {.device = 12288 * (kRunSlots * 4 + 48 * 2 + kStateSlots * 10)};
  CHECK(part(fill(groups, limits), Kind::weights).on_device == 0);
  limits.keeps_any_weights = true;
  CHECK(part(fill(groups, limits), Kind::weights).on_device == 48 - 12);
  limits.keeps_any_weights = false;
  limits.host = host_bytes(fill(groups, limits)) + slot_table_bytes(groups);
  CHECK(part(fill(groups, limits), Kind::weights).on_device == 0);
  --limits.host;
  CHECK(part(fill(groups, limits), Kind::weights).on_device == 48 - 12);
}

TEST_CASE("tier plan: limits are kept, and used") {
  std::mt19937_64 random(7);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  int refused = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<TierGroup> groups;
    for (std::int64_t i = draw(1, 3); i > 0; --i) {
      groups.push_back(group("g" + std::to_string(i),
                             static_cast<int>(draw(1, 9)),
                             draw(1, 40),
                             static_cast<std::size_t>(draw(1, 20000))));
      TierGroup& g = groups.back();
      g.owned = draw(0, g.blocks());
      g.trained = draw(0, 5) > 0;
      if (!g.trained) g.state_sections.clear();
    }
    const bool in_ring = draw(0, 2) == 0;
    const auto whole = fill(groups, {}, true, in_ring),
               bare = fill(groups, {.least_slots = true}, true, in_ring);
    TierLimits limits{
        .device =
            static_cast<std::uint64_t>(draw(0, static_cast<std::int64_t>(device_bytes(whole)))),
        .host = static_cast<std::uint64_t>(draw(0, static_cast<std::int64_t>(host_bytes(bare)))),
        .file =
            static_cast<std::uint64_t>(draw(0, 2 * static_cast<std::int64_t>(host_bytes(bare)))),
        .is_vertical = draw(0, 1) == 1};
    CAPTURE(round, limits.device, limits.host, limits.file);
    std::vector<TierPart> parts;
    try {
      parts = fill(groups, limits, true, in_ring);
    } catch (const ResourceError&) {
      ++refused;
      continue;
    }
    CHECK(device_bytes(parts) <= limits.device);
    CHECK(host_bytes(parts) + slot_table_bytes(groups) <= limits.host);
    CHECK(file_bytes(parts) <= limits.file);
    std::uint64_t one_more = ~std::uint64_t{0};
    bool has_few = false;  // blocks, that need less than the least slots
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const TierPart& p = parts[i];
      CHECK(p.slots - p.on_device >= (p.on_device < p.blocks ? kLeast : 0));
      CHECK(p.on_device + p.in_file <= p.blocks);
      has_few = has_few || p.blocks < kLeast;
      CHECK((p.in_file == 0) == (p.staging_slots == 0));
      if (p.is_ring) {
        CHECK(p.slots >= p.members);
        CHECK(p.slots <= 2 * p.members);
        CHECK(p.host == 0);
        continue;
      }
      if (p.slots < whole[i].slots) one_more = std::min(one_more, p.block_bytes);
    }
    // What is left does not hold another block that is wanted (but for the rounding of a section's place).
    if (one_more != ~std::uint64_t{0} && !has_few)
      CHECK(limits.device - device_bytes(parts) < one_more + 3 * 256);
    // No weight goes to the file before all states have gone, and none that need not.
    if (in_file(parts, Kind::weights) > 0) {
      for (const TierPart& p : parts)
        if (p.kind == Kind::states) CHECK(p.in_file + p.on_device == p.blocks);
    }
    if (host_bytes(bare) + slot_table_bytes(groups) <= limits.host) CHECK(file_bytes(parts) == 0);
  }
  CHECK(refused > 20);
  CHECK(refused < 280);
}

TEST_CASE("tier plan: what the host does not hold goes to the file, states first") {
  const auto groups = two_groups();
  const std::uint64_t least = floor_bytes(groups);  // of the device
  const std::uint64_t all = host_bytes(fill(groups, {.device = least})) + slot_table_bytes(groups);
  TierLimits limits{.device = least, .host = all, .file = std::uint64_t{1} << 30};
  CHECK(file_bytes(fill(groups, limits)) == 0);
  limits.host -= std::uint64_t{1} << 20;
  auto parts = fill(groups, limits);
  CHECK(in_file(parts, Kind::states) > 0);
  CHECK(in_file(parts, Kind::states) < 100);
  CHECK(in_file(parts, Kind::weights) == 0);
  // The same share of both groups.
  std::int64_t fewest = 96, most = 0;
  for (const TierPart& p : parts) {
    if (p.kind != Kind::states) continue;
    fewest = std::min(fewest, p.in_file);
    most = std::max(most, p.in_file);
  }
  CHECK(most - fewest <= 1);
  // Gradients and staging stay.
  limits.host = 96 * 12288 * 4 + (std::uint64_t{1} << 20);
  parts = fill(groups, limits);
  CHECK(in_file(parts, Kind::states) == 192);
  CHECK(in_file(parts, Kind::weights) > 0);
  limits = {.device = least, .host = all - 1};
  std::string text = refusal(groups, limits);
  CHECK(contains(text, "Raise it, or let what does not fit live in a file: memory.file_path"));
  limits.host_is_budget = false;
  CHECK(contains(refusal(groups, limits), "Set memory.host_budget"));
  limits = {.device = least, .host = all - (std::uint64_t{4} << 20), .file = 4096};
  CHECK(contains(refusal(groups, limits),
                 "memory.file_budget (4KiB) does not hold the rest. Raise memory.host_budget or "
                 "memory.file_budget"));
}

TEST_CASE("tier plan: below what is always in host memory no file is offered") {
  const auto groups = two_groups();
  TierLimits limits{.device = floor_bytes(groups), .host = 96 * 12288 * 4, .host_rest = 3 << 20};
  const std::string at_least = "at least ", file = "memory.file";
  std::string text;
  for (const std::uint64_t file_budget : {std::uint64_t{0}, std::uint64_t{1} << 30}) {
    limits.file = file_budget;
    limits.host_is_budget = true;
    text = refusal(groups, limits);
    CHECK(contains(text, "memory.host_budget is 4608KiB. However large a file is"));
    CHECK(contains(text, "KiB gradients of gate_up"));
    CHECK(contains(text, "staging for weights of down"));
    CHECK(contains(text, "tables of slots, 3072KiB offloaded activations). Raise"));
    CHECK(!contains(text, file));
    limits.host_is_budget = false;
    CHECK(contains(refusal(groups, limits), "If more can be had, set memory.host_budget to at"));
  }
  // What is asked for is enough, with a file; and a little less is not.
  limits.host = std::stoull(text.substr(text.find(at_least) + at_least.size())) << 10;
  CHECK(refusal(groups, limits).empty());
  limits.file = 0;
  CHECK(contains(refusal(groups, limits), file));
  limits.host -= 2 << 10;
  CHECK(!contains(refusal(groups, limits), file));
}

TEST_CASE("tier plan: bytes over the link") {
  const std::vector<TierGroup> groups{group("down", 6, 16, 4096)};
  TierLimits limits{.device = floor_bytes(groups)};
  constexpr double kElements = 96 * 4096;
  const double missed = 1 - 3.0 / 96;
  // Two micro-batches: weights for forward and backward of both and the update.
  TierLinkBytes bytes = link_bytes(fill(groups, limits), 2, 2);
  CHECK(bytes.up == Approx(kElements * missed * (5 * 2 + 3 * 4 + 10)));
  CHECK(bytes.down == Approx(kElements * (2 + missed * (2 * 4 + 10))));
  // All of it on the device.
  bytes = link_bytes(fill(groups, {}), 2, 2);
  CHECK(bytes.up == 0);
  CHECK(bytes.down == 0);
  // A layer at a time, whatever the number of micro-batches.
  limits.device += 22 * 4096 * 6 + kStateSlots * 4096 * 10;
  limits.is_vertical = true;
  const auto parts = fill(groups, limits);
  REQUIRE(slots(parts, Kind::weights, "down") >= 22);
  CHECK(link_bytes(parts, 1, 1).up == link_bytes(parts, 8, 1).up);
  CHECK(link_bytes(parts, 8, 1).up < link_bytes(parts, 8, 8).up / 2);
}

TEST_CASE("tier plan: gradients that go round have slots of two layers, or of one and some") {
  const auto groups = two_groups();
  const auto part = [](const std::vector<TierPart>& parts, Kind kind) {
    return *std::find_if(
        parts.begin(), parts.end(), [&](const TierPart& p) { return p.kind == kind; });
  };
  auto parts = fill(groups, {}, true, true);
  CHECK(part(parts, Kind::gradients).is_ring);
  CHECK(part(parts, Kind::gradients).slots == 32);
  CHECK(part(parts, Kind::gradients).blocks == 32);
  CHECK(part(parts, Kind::gradients).host == 0);
  CHECK(part(parts, Kind::weights).slots == 96);
  // The floor: 3 x (16 + 80 + 8 + 40) KiB of weights and states, 16 + 6 gradients of 32 and 16 KiB.
  TierLimits limits{.device = (3 * 144 + 22 * 48) << 10};
  parts = fill(groups, limits, true, true);
  CHECK(part(parts, Kind::gradients).slots == 22);
  CHECK(part(parts, Kind::weights).slots == kLeast);
  --limits.device;
  const std::string text = refusal(groups, limits, true);
  CHECK(contains(text, "need at least 1488KiB of device memory"));
  CHECK(contains(text, "22 slots of 32KiB for gradients of gate_up"));
  // Two layers before weights and states get more than they must have.
  limits.device = (3 * 144 + 32 * 48) << 10;
  limits.device += (kRunSlots - kLeast) * 12288 * 2 + (kStateSlots - kLeast) * 12288 * 10;
  parts = fill(groups, limits, true, true);
  CHECK(part(parts, Kind::gradients).slots == 32);
  CHECK(part(parts, Kind::weights).slots == kRunSlots);
  CHECK(part(parts, Kind::states).slots == kStateSlots);
  // Where host memory does not hold the rest then, one layer and some must do; less is refused.
  limits.keeps_any_weights = true;
  limits.host = host_bytes(parts) + slot_table_bytes(groups) - 1;
  parts = fill(groups, limits, true, true);
  CHECK(part(parts, Kind::gradients).slots == 22);
  CHECK(host_bytes(parts) + slot_table_bytes(groups) <= limits.host);
  limits.host -= 20 * 48 << 10;
  CHECK(contains(refusal(groups, limits, true), "of host memory"));
  CHECK(!contains(refusal(groups, limits, true), "gradients"));
  // One layer alone needs no others' slots.
  CHECK(part(fill({group("down", 1, 16, 4096)}, {}, true, true), Kind::gradients).slots == 16);
}

TEST_CASE(
    "tier plan: gradients that go round spare the link, and updates find the layer's weights") {
  const std::vector<TierGroup> groups{group("down", 6, 16, 4096)};
  TierLimits limits{.device = (3 * 48 + 22 * 16) << 10, .is_vertical = true};
  constexpr double kElements = 96 * 4096;
  const double missed = 1 - 3.0 / 96;
  TierLinkBytes bytes = link_bytes(fill(groups, limits, true, true), 1, 1);
  CHECK(bytes.up == Approx(kElements * missed * (3 * 2 + 10)));
  CHECK(bytes.down == Approx(kElements * (2 + missed * 10)));
  // With the weights of a layer.
  limits.device += (10 * 16 + 19 * 8 + (kStateSlots - kLeast) * 40) << 10;
  const auto parts = fill(groups, limits, true, true);
  REQUIRE(slots(parts, Kind::weights, "down") == 22);
  REQUIRE(slots(parts, Kind::states, "down") == kStateSlots);
  bytes = link_bytes(parts, 4, 1);
  CHECK(bytes.up == Approx(kElements * ((1 - 22.0 / 96) * 2 * 2 + (1 - kStateSlots / 96.0) * 10)));
}

TEST_CASE("tier plan: states alone have no caches of weights and gradients") {
  const auto parts = fill(two_groups(), {}, false);
  REQUIRE(parts.size() == 2);
  CHECK(parts[0].kind == Kind::states);
  CHECK(parts[0].block_bytes == 8192 * 10);
}

TEST_CASE("tier plan: of the keys") {
  config::Config config;
  config.experts.offload = config::ExpertOffload::full;
  config.experts.policy = config::ExpertPolicy::fixed;
  config.experts.device_cache = 1 << 20;
  config.memory.file_path = "scratch";
  config.memory.verify_reads = false;
  config.run.seed = 5;
  config.optimizer.ema_decay = 0.9;
  const TierLimits limits = tier_limits(config);
  CHECK(limits.device == 1 << 20);
  CHECK(limits.host == TierLimits::kNoLimit);
  CHECK(limits.file == 0);
  ExpertTierOptions options = plan_expert_tiers(config, two_groups(), limits, 3);
  CHECK(options.weights);
  CHECK_FALSE(options.gradients_in_ring);
  CHECK(options.policy == TierPolicy::fixed);
  CHECK(options.seed == 5);
  CHECK(options.state_kinds == std::vector<std::string>{"m", "v", "average"});
  CHECK(options.folder == "scratch");
  CHECK(options.rank == 3);
  CHECK_FALSE(options.verify_reads);
  CHECK(options.groups.size() == 2);
  config.experts.update = config::ExpertUpdateTime::in_backward;
  CHECK(expert_tier_options(config, 0).gradients_in_ring);
  config.optimizer.name = config::OptimizerName::muon;
  config.optimizer.ema_decay.reset();
  CHECK(expert_tier_options(config, 0).state_kinds == std::vector<std::string>{"momentum"});
}
