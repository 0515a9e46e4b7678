#pragma once
// One kind of data of the experts of a group: where it lives, and the cache that it comes through.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/nn/expert_tiers.h"
#include "memory/tiers/device_cache.h"
#include "memory/tiers/home_tiers.h"

namespace moesaic {

class BlockTier {
 public:
  struct Options {
    std::string group, kind;  ///< TierGroup::name; "weights", "gradients", "states"
    std::vector<tiers::RecordLayout::Part> sections;
    std::int64_t blocks = 0, in_file = 0, on_device = 0, staging_slots = 0, slots = 0;
    std::int64_t most_at_once = 0;  ///< fewer than there are slots for, or 0
    std::vector<double> weights;    ///< of blocks, for TierPolicy::fixed
    std::function<std::string(tiers::Block)> name_of_block;
  };
  /// Allocates unless `pretend`.
  BlockTier(Options options, const ExpertTierOptions& all, Device device, bool pretend);

  tiers::HomeTiers& homes() const { return *homes_; }
  tiers::DeviceCache& cache() const { return *cache_; }
  tiers::SectionRange all() const { return layout_.all(); }
  std::string name() const { return options_.group + " " + options_.kind; }
  using Lane = tiers::DeviceCache::Lane;
  /// How many blocks can be in use at once while as many others are loaded.
  std::int64_t at_once(Lane lane = Lane::main) const;
  bool is_weights() const { return options_.kind == "weights"; }
  bool fits() const { return options_.slots >= options_.blocks; }
  /// Calls `work` with a section of a block in host memory, wherever the block lives, and waits for all that concerns it. What
  /// is changed or replaced becomes the value everywhere.
  void with_host(tiers::Block block,
                 int section,
                 DType dtype,
                 Shape shape,
                 MemberAccess access,
                 const std::function<void(TensorView)>& work) const;
  /// Section of a slot; section of all slots.
  TensorView slot(std::int64_t slot, int section, DType dtype, Shape shape) const;
  TensorView slots(int section, DType dtype, Shape of_slot) const;
  /// What will be used next, in order. Of these some are read from the file ahead, as they are taken (BlockPins).
  void expect(std::vector<tiers::Block> blocks);
  void note_use(tiers::Block block);
  /// The next visit is likely to use these, in this order: the first of them are loaded, as many as may be in use at once.
  void load_ahead(const std::vector<tiers::Foreseen>& blocks);

  std::size_t device_bytes() const;
  std::size_t host_bytes() const;
  std::size_t file_bytes() const;
  TierCounters counters() const;

 private:
  /// The slots that blocks do not have for good.
  std::int64_t passing_slots() const { return options_.slots - options_.on_device; }
  std::int64_t passing_blocks() const { return options_.blocks - options_.on_device; }
  void with_home(tiers::Block block,
                 int section,
                 DType dtype,
                 Shape shape,
                 MemberAccess access,
                 const std::function<void(TensorView)>& work) const;
  void with_slot(tiers::Block block,
                 int section,
                 DType dtype,
                 Shape shape,
                 MemberAccess access,
                 const std::function<void(TensorView)>& work) const;

  Options options_;
  tiers::RecordLayout layout_;
  Device device_;
  std::vector<tiers::Block> expected_;
  std::size_t used_ = 0, read_ = 0;  // of those
  std::unique_ptr<tiers::HomeTiers> homes_;
  std::unique_ptr<tiers::DeviceCache> cache_;
  Buffer staging_;  ///< on the host, of one section of a block that lives on the device
};

/// Blocks in use for work on a stream. What is still in use at the end of the scope counts as not changed (the work was not
/// enqueued).
class BlockPins {
 public:
  explicit BlockPins(Stream& user, BlockTier::Lane lane = BlockTier::Lane::main)
      : user_(user), lane_(lane) {}
  ~BlockPins();
  BlockPins(const BlockPins&) = delete;
  BlockPins& operator=(const BlockPins&) = delete;

  /// The block's slot.
  std::int64_t take(BlockTier& tier, tiers::Block block, MemberAccess access);
  /// The work is enqueued. What changed is on its way home afterwards, unless it stays on the device (weights: in any case).
  void done();

 private:
  struct Pin {
    BlockTier* tier;
    tiers::Block block;
    tiers::Access access;
  };
  Stream& user_;
  BlockTier::Lane lane_;
  std::vector<Pin> pins_;
};

}  // namespace moesaic
