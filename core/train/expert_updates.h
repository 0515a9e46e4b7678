#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/config/config.h"
#include "core/nn/expert_tiers.h"
#include "core/train/member_lag.h"
#include "core/train/optimizer.h"
#include "core/train/step_record.h"
#include "core/train/tier_schedule.h"
#include "kernels/backend.h"

namespace moesaic {

/// Updates of offloaded experts on streams of their own, beside the next step's forward: what they bring from host memory
/// and back then hides behind its products. An expert's next use waits for its update and for no other. Enqueued layer
/// by layer, a little ahead of the forward (updates_due), and all at once when anything but a forward comes.
/// A layer's updates come in parts where its micro-batches follow each other.
/// The same ops on the same values as right after the step, so the same bits.
///
/// Several streams, because a small kernel gets room on the device only where one of the forward's ends: what waits there
/// on other streams then gets it, too.
///
/// Where gradients go round in a ring (ExpertTierOptions::gradients_in_ring) the updates of a layer are enqueued in the step's
/// last backward instead, behind that of the layer, beside those of the layers before: gradients are given up there and then.
/// A step whose losses are not finite skips them; no update writes anything that is not finite because a gradient is not, but
/// the step is half made then (Optimizer::Outcome).
///
/// With OptimizerOptions::lazy_untouched experts without a gradient are left alone, and given what they missed when they are next
/// used, before a forward that has tokens for them; all of them before anything else looks at weights or states.
class ExpertUpdates final : public ExpertTiers::PutOff {
 public:
  /// Where weights are offloaded, no other rank waits for them, nothing that the next step overwrites is read, and there is
  /// something to hide: Muon's products take longer than its copies, and have them beside already. With lazy_untouched Muon's
  /// are made beside as well, but for matrices that ranks put together.
  static bool can_run_beside(const ParameterStore& params, const Optimizer& optimizer);
  /// Throws UsageError when experts.update: in_backward asks for what these ranks, or a phase's micro-batches, do not allow.
  static void check_in_backward(const config::Config& config,
                                const ParameterStore& params,
                                const Optimizer& optimizer);

  /// `options`: of each backend beside. All that is given must live longer.
  ExpertUpdates(ParameterStore& params, Optimizer& optimizer, const BackendOwner::Options& options);
  /// Updates that were not enqueued are lost; see finish().
  ~ExpertUpdates() override;
  /// How many backends there are beside.
  static int streams_on(Device device) { return device.kind == Device::Kind::cuda ? 6 : 2; }
  ExpertUpdates(const ExpertUpdates&) = delete;
  ExpertUpdates& operator=(const ExpertUpdates&) = delete;

  /// Of each layer's updates from now on (UpdatePace), when all are enqueued.
  void set_parts(std::int32_t parts);
  /// Whether the updates are made in the backward; else beside the next forward.
  bool in_backward() const { return in_backward_; }
  /// The step's scalars, clip factor among them, are final on `main`: its updates begin, or were all made in the backward.
  void begin(Backend& main);
  /// All forwards of the step are enqueued, and its losses guarded (Optimizer::guard_losses()): updates may be made from now on.
  void begin_backward(Backend& main);
  /// Updates the storages from `first` on that were not yet; Optimizer::gradients_final() has been told of them.
  void gradients_final(Backend& main, StorageId first);
  void before_gradients() override;
  void finish() override;
  /// So far; nothing where no expert ever misses an update.
  std::optional<ExpertReplays> replays() const;

  void before(StorageId id, const MemberVisit& visit) override;
  void after(StorageId id, const MemberVisit& visit) override;
  bool awaits(StorageId id) const override;

 private:
  struct Group {
    std::span<const StorageId> storages;
    std::int32_t done = 0;  ///< parts that are enqueued, from the first of the first storage on
    std::vector<LateUpdates> updates;  ///< of the storage in progress
    std::int32_t layers() const { return static_cast<std::int32_t>(storages.size()); }
  };
  struct Place {
    std::size_t group = 0;
    std::int32_t layer = 0;
  };
  Place place_of(StorageId id) const;
  UpdatePace pace(const Group& group) const { return {group.layers(), parts_}; }
  void update_part(Group& group, bool outside);
  void update(Group& group, std::int32_t until, bool outside);
  void update_all(bool outside);
  void finish_step_before();
  void let_wait_for(Backend& main);
  void replay(StorageId id, std::span<const std::int64_t> rows);
  void count(StorageId id, std::span<const LateUpdates> updates, std::int64_t in_time);

  ParameterStore& params_;
  Optimizer& optimizer_;
  std::vector<std::unique_ptr<BackendOwner>> owners_;
  std::vector<Backend*> beside_;
  MemberLag lag_;
  ExpertReplays replays_;
  std::vector<Group> groups_;
  std::int32_t parts_ = 1;
  bool is_updating_ = false;  ///< the calls of the tiers are its own
  bool in_backward_ = false;
  /// Between begin_backward() and begin(): the storages that are not updated yet, in the order of declaration.
  std::optional<std::vector<StorageId>> left_;
};

}  // namespace moesaic
