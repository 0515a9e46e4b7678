#pragma once
// How the tiers of offloaded experts are filled: slots on the device, and what lives in host memory or in the file.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/nn/expert_tiers.h"

namespace moesaic {

/// What one rank may take for its experts, in bytes, and where a limit comes from, for messages.
struct TierLimits {
  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};
  std::uint64_t device = kNoLimit;  ///< for all caches together
  std::uint64_t host = kNoLimit;    ///< for homes and staging
  std::uint64_t file = 0;           ///< 0: there is no file tier
  /// The key that limits the device; empty: the device itself.
  std::string device_key = "experts.device_cache";
  /// Where the limit of the caches is what something leaves: all of that, and what the rest of the run takes of it.
  std::optional<std::uint64_t> device_budget;
  std::uint64_t device_rest = 0;
  bool host_is_budget = true;   ///< memory.host_budget; else what the machine has
  std::uint64_t host_rest = 0;  ///< what other things take of `host`
  /// All micro-batches of a layer follow each other, so that a cache of its gradients spares them all ways but one.
  bool is_vertical = false;
  bool least_slots = false;        ///< no cache gets more slots than it must have
  bool keeps_any_weights = false;  ///< which weights stay on the device is not for a policy to say
  bool is_forward_only = false;    ///< no training, for messages
};

/// Of a kind of tensors of a group: how many there are, where they live, and what that takes.
struct TierPart {
  enum class Kind : std::uint8_t { weights, gradients, states };
  std::string group;  ///< "gate_up"
  Kind kind = Kind::weights;
  std::int64_t blocks = 0;   ///< members of all layers
  std::int64_t members = 0;  ///< of a layer
  bool is_ring =
      false;  ///< gradients that live for a layer or two: blocks are the slots that they go round in
  std::uint64_t block_bytes = 0;  ///< of one of them, without padding
  std::int64_t slots = 0;         ///< on the device
  std::int64_t on_device =
      0;                     ///< blocks that have one of the slots for good, and live nowhere else
  std::int64_t in_file = 0;  ///< blocks that live in the file; the others live in host memory
  std::int64_t staging_slots = 0;  ///< of host memory, for those on the way to the file
  std::uint64_t device = 0, host = 0, file = 0;  ///< bytes, as they are allocated
  std::uint64_t bytes() const { return static_cast<std::uint64_t>(blocks) * block_bytes; }
  /// Of the blocks that find room in the cache, at most 1.
  double share() const;
};
const char* name(TierPart::Kind kind) noexcept;

/// What a way to fill the tiers takes, kind by kind: those of a group together, groups in order. The very numbers that
/// ExpertTiers allocates.
std::vector<TierPart> tier_parts(std::span<const TierGroup> groups,
                                 const ExpertTierOptions& options);
std::uint64_t device_bytes(std::span<const TierPart> parts);
std::uint64_t host_bytes(std::span<const TierPart> parts);
std::uint64_t file_bytes(std::span<const TierPart> parts);

/// Fills `options.groups` for the groups of a store; of the other options it reads `weights` and `gradients_in_ring`.
///
/// Device: every cache has DeviceCache::kMinSlots slots, a ring of gradients those of a layer and some. As far as the limit allows, the same share in every group: states get
/// kStateSlots, weights and gradients kRunSlots, for runs of some members; in vertical order gradients and weights those of a
/// layer, a ring those of two, unless host memory then does not hold the rest; then weights all, gradients all, states all. Gradients and states beyond the slots that the others pass through live
/// on the device alone; weights too when all have a slot, when the policy is static, or when host memory does not hold the
/// rest. Host: all other homes; where they do not fit, states go to the file first, then weights, no more of them than have to.
///
/// Throws MemoryShortage (what is needed at least, what is there, the keys) when a limit is too low.
void fill_tiers(std::span<const TierGroup> groups,
                const TierLimits& limits,
                ExpertTierOptions& options);
constexpr std::int64_t kStateSlots = 6, kRunSlots = 8;

/// The limits that the keys set, without memory.device_budget: how much it leaves for the caches has to be measured
/// (plan_memory()).
TierLimits tier_limits(const config::Config& config);

/// What the keys say of the tiers of a run whose experts.offload is not `none`, without `groups`. `rank`: of all ranks, in
/// the name of the file.
ExpertTierOptions expert_tier_options(const config::Config& config, int rank);
/// The same with `groups` by fill_tiers(), which throws MemoryShortage.
ExpertTierOptions plan_expert_tiers(const config::Config& config,
                                    std::span<const TierGroup> groups,
                                    const TierLimits& limits,
                                    int rank);

/// What a step moves between host memory and the device when all experts are used in every micro-batch, and a cache hits as
/// often as its share of the blocks: weights up for forward, backward and update, and down once; gradients down after
/// each micro-batch and up for the next, the norm and the update; states up and down once. `micro_batches`: or pieces of them,
/// that each layer passes; `rounds`: how often all layers are passed in a step, in each of which a cache that holds a whole
/// layer loads it once. With gradients in a ring none of them moves, and updates find the weights where a cache holds those of a layer.
struct TierLinkBytes {
  double up = 0, down = 0;
};
TierLinkBytes link_bytes(std::span<const TierPart> parts,
                         std::int64_t micro_batches,
                         std::int64_t rounds);

}  // namespace moesaic
