#pragma once
// What ExpertTiers is made of; for its own sources.
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/nn/block_tier.h"
#include "core/nn/slot_tables.h"

namespace moesaic {

struct ExpertTiers::Impl {
  /// Of a member in this step.
  enum class Gradient : std::uint8_t { none, there, spent };

  struct Group {
    TierGroupOptions options;
    std::unique_ptr<BlockTier> weights, gradients, states;  ///< null where there is nothing
    std::vector<Gradient> gradient;                         ///< by block
    std::int64_t ring = 0;  ///< slots that gradients go round in; 0: each has a block of its own
    std::vector<std::int64_t>
        first_state;  ///< by storage: the block of its first own member's state
  };
  struct Place {
    const TierGroup* about = nullptr;
    Group* group = nullptr;
    std::int64_t storage = 0;  ///< number in the group

    tiers::Block block(std::int64_t member) const { return storage * about->members + member; }
    bool owns(std::int64_t member) const;
    tiers::Block state_block(std::int64_t member) const;
    /// In the cache of gradients.
    tiers::Block gradient_block(std::int64_t member) const;
  };

  Impl(std::vector<TierGroup> groups,
       ExpertTierOptions options,
       const Precision& precision,
       Device device,
       bool pretend);

  Place place(StorageId id);
  void add_tiers(std::size_t group);
  void make_tables();
  bool is_dry(const Stream& stream) const { return pretend || stream.mode() == Stream::Mode::dry; }
  /// Memory that is never read.
  TensorView pretended(Shape shape, DType dtype) const;
  DType state_dtype(const std::string& section) const {
    return section == "remainder" ? DType::u16 : precision.master;
  }

  /// All members of a storage at once, on memory that is never read.
  MemberRun pretended_run(const TierGroup& about, DType dtype) const;
  static std::vector<tiers::Block> begin_visit(BlockTier& tier,
                                               const Place& place,
                                               const MemberVisit& visit,
                                               const std::vector<std::int64_t>& members);
  /// Members that the visit is about, in the order of their use.
  static std::vector<std::int64_t> members_of(const MemberVisit& visit, std::int64_t members);
  using Bring = std::function<std::int64_t(BlockPins& pins, std::int64_t member)>;
  void in_runs(BlockTier& tier,
               const TensorView& slots,
               const std::function<tiers::Block(std::int64_t member)>& block_of,
               const std::vector<std::int64_t>& members,
               Stream& stream,
               const Bring& bring,
               const MemberWork& work);
  std::int64_t bring_gradient(const Place& place,
                              std::int64_t member,
                              MemberAccess access,
                              Stream& stream,
                              BlockPins& pins);
  MemberTensors pretended_member(const Place& place, const Access& access) const;
  MemberTensors bring_member(const Place& place,
                             std::int64_t member,
                             const Access& access,
                             Stream& stream,
                             BlockPins& pins);
  void name_states(const Place& place,
                   MemberTensors& tensors,
                   const std::function<TensorView(int section, DType dtype)>& view) const;
  void set_schedule_of(BlockTier& tier,
                       const TierGroup& about,
                       tiers::ScheduleForecast::Options forecast) const;

  std::vector<TierGroup> groups;
  ExpertTierOptions options;
  Precision precision;
  Device device;
  bool pretend = false;
  std::vector<Group> own;  ///< one for each of `groups`
  std::unordered_map<std::int32_t, std::pair<std::size_t, std::int64_t>> places;  ///< of storages
  std::int64_t table_length = 0, table_count = 0;
  std::optional<SlotTables> tables;
  Buffer zeros;  ///< what a gradient without a value is read as
  TensorView zero_gradient(const TierGroup& about) const {
    return zeros.bytes() > 0 ? zeros.view({about.rows, about.cols}, precision.grad) : TensorView();
  }
  bool schedule_has_updates = true;
  bool updates_all = true;            ///< the schedule's updates use all members
  std::int32_t last_micro_batch = 0;  ///< of the schedule
  void drop_gradient(const Place& place, std::int64_t member, Gradient now) const;
  std::vector<tiers::Foreseen> next_loads(const BlockTier& tier,
                                          const Place& place,
                                          const MemberVisit& visit) const;
  Observer observer;
  PutOff* put_off = nullptr;
  void catch_up() {
    if (put_off != nullptr) put_off->finish();
  }
  void catch_up_for(const Access& access) {
    if (access.weight != MemberAccess::none || access.state != MemberAccess::none)
      return catch_up();
    if (put_off != nullptr) put_off->before_gradients();
  }
  std::unordered_map<std::int32_t, TierCounters> of_storage;  ///< what the calls about it did
  TierCounters sum_of(const Group& group) const;

  /// A call about a storage: what its tiers do meanwhile is counted for it.
  class Call {
   public:
    Call(Impl& impl, StorageId id, const Group& group)
        : impl_(impl), id_(id), group_(group), before_(impl.sum_of(group)) {}
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Impl& impl_;
    StorageId id_;
    const Group& group_;
    TierCounters before_;
  };
};

}  // namespace moesaic
