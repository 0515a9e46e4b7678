#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/nn/expert_tiers.h"
#include "core/train/optimizer.h"
#include "kernels/backend.h"

namespace moesaic {

/// Updates of offloaded experts on a stream of their own, beside the next step's forward: what they bring from host memory
/// and back then hides behind its products. An expert's next use waits for its update and for no other. Enqueued layer
/// by layer, a little ahead of the forward (updates_due), and all at once when anything but a forward comes.
/// The same ops on the same values as right after the step, so the same bits.
class ExpertUpdates final : public ExpertTiers::PutOff {
 public:
  /// Where weights are offloaded, no other rank waits for them, and nothing that the next step overwrites is read.
  static bool can_run_beside(const ParameterStore& params, const Optimizer& optimizer);

  /// `options`: of the backend beside. All that is given must live longer.
  ExpertUpdates(ParameterStore& params, Optimizer& optimizer, const BackendOwner::Options& options);
  /// Updates that were not enqueued are lost; see finish().
  ~ExpertUpdates() override;
  ExpertUpdates(const ExpertUpdates&) = delete;
  ExpertUpdates& operator=(const ExpertUpdates&) = delete;

  /// The step's scalars, clip factor among them, are final on `main`: its updates begin.
  void begin(Backend& main);
  void finish() override;

  void before(StorageId id, const MemberVisit& visit) override;
  void after(StorageId id, const MemberVisit& visit) override;
  bool awaits(StorageId id) const override;

 private:
  struct Group {
    std::span<const StorageId> storages;
    std::int32_t done = 0;  ///< enqueued, from the first storage on
    std::int32_t layers() const { return static_cast<std::int32_t>(storages.size()); }
  };
  struct Place {
    std::size_t group = 0;
    std::int32_t layer = 0;
  };
  Place place_of(StorageId id) const;
  void update(Group& group, std::int32_t until, bool outside);
  void update_all(bool outside);

  ParameterStore& params_;
  Optimizer& optimizer_;
  BackendOwner beside_;
  std::vector<Group> groups_;
  bool is_updating_ = false;  ///< the calls of the tiers are its own
};

}  // namespace moesaic
