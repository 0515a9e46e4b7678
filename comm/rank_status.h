#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/activity.h"

namespace moesaic {

/// What a rank says about itself to the watchdogs of the others: a few lines "key value".
struct RankStatus {
  int rank = 0;
  std::string life;  ///< the same for all ranks of a job; another one's status is no news
  std::string host;
  std::int64_t pid = 0;
  std::uint64_t beat = 0;     ///< grows with every status
  double idle_s = 0;          ///< since its last sign of progress
  double limit_s = 0;         ///< how long that may last where it is
  bool expired = false;       ///< it has given up
  std::string period, place;  ///< "training", "step 12, backward, layer 3"
  /// An exchange that is under way; `operation` is empty when there is none.
  struct Operation {
    std::string operation, group, place, device;  ///< `device`: "cpu", "gpu"
    std::uint64_t number = 0, number_in_group = 0;
    std::int64_t bytes = 0;
    int ranks = 0, awaited = 0;
    bool is_moving = false;          ///< else it waits for work of this rank
    double seconds = 0;              ///< in this state
    std::vector<int> awaited_ranks;  ///< the first of them
  };
  Operation exchange;

  std::string text() const;
  /// Nothing when the text is not one, or was cut.
  static std::optional<RankStatus> parse(const std::string& text);
};

/// This rank's status as its threads have noted it; `rank`, `life`, `beat`, `idle_s`, `limit_s` and `expired` are left to the caller.
RankStatus status_of(const Activity& activity);

/// "all_reduce #87 of group world (2 ranks, 1.2 MB)".
std::string to_string(const RankStatus::Operation& operation);
/// Where the rank is, in words: "training, step 12, backward, layer 3; waits 5.0 s in all_reduce #87 … for rank 1".
std::string describe(const RankStatus& status);

}  // namespace moesaic
