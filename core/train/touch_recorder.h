#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>
#include <vector>

#include "core/nn/expert_tiers.h"
#include "memory/tiers/touch_log.h"

namespace moesaic {

/// Writes which experts of this rank every step uses, as a touch log (docs/memory.md). Follows the first group of the tiers,
/// which has a storage for every layer with experts; while it lives the tiers tell it of every visit.
class TouchRecorder {
 public:
  /// `updates`: whose states an update moves. `updates_beside`: they run beside the next step's forward (ExpertUpdates), and
  /// stand there in the log. Throws ResourceError when the file cannot be written, as all calls do.
  TouchRecorder(ExpertTiers& tiers,
                const std::filesystem::path& path,
                tiers::Updates updates,
                bool updates_beside = false);
  ~TouchRecorder();
  TouchRecorder(const TouchRecorder&) = delete;
  TouchRecorder& operator=(const TouchRecorder&) = delete;

  /// What was seen since the last call, in its order, is this step. Updates follow, from the last layer to the first; where
  /// they run beside, those of the step before come between.
  void end_step(std::int64_t step);
  /// Of visits outside of a step nothing is kept.
  void forget() { visits_.clear(); }

 private:
  /// A visit may come in several parts, each about more rows.
  struct Seen {
    tiers::Visit visit;
    std::vector<std::int64_t> rows;  ///< by member; 1 each where the host does not know
  };
  void note(StorageId id, const MemberVisit& visit);
  std::vector<tiers::Visit> with_updates() const;

  ExpertTiers& tiers_;
  const TierGroup& group_;
  tiers::Updates updates_;
  bool updates_beside_;
  std::vector<Seen> visits_;
  std::optional<tiers::TouchLogWriter> writer_;
};

}  // namespace moesaic
