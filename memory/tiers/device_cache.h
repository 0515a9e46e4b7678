#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/buffer.h"
#include "memory/stream.h"
#include "memory/tiers/home_tiers.h"
#include "memory/tiers/policy.h"

namespace moesaic::tiers {

/// Copies of some sections of blocks in slots of device memory, over their homes. A run has one for weights and one through
/// which optimizer states pass; caches over the same homes hold different sections.
///
/// The slots of a section lie one after the other without gaps: section s of slot i is element i of a tensor [slots, …], as
/// kernels that find an expert's weights by a table of slots read it.
///
/// Everything is enqueued: loads on a stream of their own, write-backs on another, and the user's stream waits for the
/// load. The host waits for reads of the file, and where more is under way than there is staging. Which blocks are kept
/// depends on the order of the calls alone. Used by one thread.
class DeviceCache {
 public:
  struct Options {
    std::string name = "expert cache";  ///< tag of its memory, and what messages call it
    SectionRange range;                 ///< what a slot holds
    /// All of them: one for each block that lives here alone (HomeTiers::lives_on_device()), which it keeps, and at least
    /// kMinSlots for the others if there are any.
    std::int64_t slots = 0;
    std::int64_t transit =
        3;  ///< of these, slots for blocks that the policy does not keep: at least 1, unless all blocks have a slot
    /// Of `transit`, those of Lane::beside; 0: both lanes share all of them. At least one is left to Lane::main.
    std::int64_t transit_beside = 0;
    Device device = kCpu;
    Stream::Mode mode = Stream::Mode::worker;  ///< of the two streams
    bool poison = false;                       ///< tests: a slot holds NaNs between two blocks
  };
  /// A block to load, one in use, one to write back.
  static constexpr std::int64_t kMinSlots = 3;

  /// Two users at a time, on streams of their own: each has slots to pass blocks through and streams for its copies, so that
  /// neither waits for what the other has enqueued unless it is about the same block. What the policy keeps is chosen for
  /// Lane::main; Lane::beside changes it where it is, and passes all other blocks through.
  enum class Lane : std::uint8_t { main, beside };

  struct Counters {
    std::uint64_t uses = 0, hits = 0;    ///< calls of acquire(), and those that found the block
    std::uint64_t loads = 0, drops = 0;  ///< copies that came (by load or anew) and went
    std::uint64_t prefetches = 0;        ///< of the loads, those by prefetch()
    std::uint64_t passed = 0;            ///< of the loads, those that the policy did not keep
    std::uint64_t write_backs = 0;
    std::uint64_t bytes_up = 0, bytes_down = 0;
  };

  DeviceCache(HomeTiers& homes, const Options& options, std::unique_ptr<CachePolicy> policy);
  ~DeviceCache();  ///< waits for its streams; what was not flushed is lost
  DeviceCache(const DeviceCache&) = delete;
  DeviceCache& operator=(const DeviceCache&) = delete;

  /// Device memory of so many slots.
  static std::uint64_t bytes_for(const RecordLayout& layout,
                                 SectionRange range,
                                 std::int64_t slots);

  /// Another policy from now on; it learns what is kept.
  void set_policy(std::unique_ptr<CachePolicy> policy);
  /// Tells the policy what the next uses are.
  void begin_visit(const Visit& visit, std::span<const Block> blocks);

  enum class Contents : std::uint8_t {
    loaded,    ///< brought here where they are not
    replaced,  ///< the user writes all sections first: nothing is loaded
  };
  /// A block that lives here gets its first values by Contents::replaced.
  /// Returns the slot that holds the block's sections for work that is enqueued on `user` until release(). Throws ResourceError when all slots are in use, and what HomeTiers::lease() throws; then
  /// nothing has changed, and the call may be tried again.
  std::int64_t acquire(Block block,
                       Access access,
                       Stream& user,
                       Contents contents = Contents::loaded,
                       Lane lane = Lane::main);
  /// Ends a use whose work has been enqueued on `user`. `changed`: sections of the record that it writes (Access::write).
  void release(Block block,
               Access access,
               Stream& user,
               std::optional<SectionRange> changed = std::nullopt);
  /// Section of the record in a slot; in slot 0 the begin of all slots of the section, aligned to 256 bytes.
  std::byte* data(std::int64_t slot, int section) const;

  /// Loads a block ahead; false when it is not here yet: the policy would not keep it and no slot is free (`may_pass`: or
  /// could be, by giving up a block that only passes), or it is still on its way from the file (call again). Waits for
  /// nothing but what the homes need to take a changed block that goes.
  bool prefetch(Block block, bool may_pass = false);
  /// What the policy says of the next `visits` visits.
  std::vector<Foreseen> foresee(std::int64_t visits, double probability) const {
    return policy_->prefetch(visits, probability);
  }
  /// Starts writing changed sections back to their homes, so that the slot can go without delay.
  void write_back(Block block, Lane lane = Lane::main);
  /// Writes everything back and waits until the homes have it (and the file, by HomeTiers::flush()).
  void flush();
  /// Gives up all copies, or that of a block, whatever they hold: the homes got other values, or nobody needs these any more.
  /// A block that lives here has no values then.
  void discard();
  void discard(Block block);

  bool holds(Block block) const { return entries_.count(block) > 0; }
  /// Whether it is held and stays, because the policy keeps it or it lives here; other copies only pass.
  bool keeps(Block block) const {
    const auto found = entries_.find(block);
    return found != entries_.end() && (found->second.kept || found->second.lives_here);
  }
  std::int64_t resident() const noexcept { return static_cast<std::int64_t>(entries_.size()); }
  const Counters& counters() const noexcept { return counters_; }
  const Options& options() const noexcept { return options_; }
  Stream& load_stream(Lane lane = Lane::main) noexcept { return at(lane).in; }
  Stream& write_stream(Lane lane = Lane::main) noexcept { return at(lane).out; }

 private:
  struct Entry {
    BlockCopy copy;
    std::int64_t slot = 0;
    bool kept = false;
    bool lives_here = false;
    std::uint64_t number = 0;  ///< in the order of loads
    Lane lane = Lane::main;    ///< whose slot it is while it passes
  };
  /// A slot and what has to be over before it gets another block.
  struct FreeSlot {
    std::int64_t slot = 0;
    std::vector<Event> uses;
  };
  struct LaneState {
    Stream in, out;
    std::int64_t slots = 0;                  ///< to pass blocks through
    std::map<std::uint64_t, Block> passing;  ///< copies that are not kept, by number
  };

  LaneState& at(Lane lane) noexcept {
    return lanes_[lane == Lane::main || !has_two_lanes() ? 0 : 1];
  }
  bool has_two_lanes() const noexcept { return options_.transit_beside > 0; }
  void bring(Block block, bool load, Lane lane);
  void settle_for_good(Block block, Lane lane);
  bool make_slot(Block block, Lane lane);
  std::optional<Block> oldest_passing(const LaneState& lane) const;
  bool may_go(Block block) const { return !entries_.at(block).copy.is_pinned(); }
  void evict(Block block, Lane lane);
  std::vector<Event> poisoned(const Entry& entry, Lane lane);
  void forget(std::map<Block, Entry>::iterator entry, std::vector<Event> uses);
  void load(Block block, Entry& entry, Lane lane);
  void copy(std::byte* to, const std::byte* from, std::uint64_t bytes, bool up, Lane lane);
  SectionRange in_entry(SectionRange of_record) const;

  HomeTiers& homes_;
  Options options_;
  std::unique_ptr<CachePolicy> policy_;
  Buffer memory_;
  std::vector<LaneState> lanes_;
  std::map<Block, Entry> entries_;
  std::vector<FreeSlot> free_;
  std::map<Block, FreeSlot> slot_for_good_;  ///< of the blocks that live here
  std::int64_t most_kept_ = 0, kept_ = 0;    ///< of the others, by the policy
  std::optional<Block> failed_use_;  ///< the policy was told of it, and the block could not be had
  std::uint64_t numbers_ = 0;
  Counters counters_;
};

}  // namespace moesaic::tiers
