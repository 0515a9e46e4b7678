#pragma once
#include <optional>
#include <string>
#include <vector>

#include "comm/rank_status.h"

namespace moesaic {

/// What one rank's watchdog knows of another.
struct SeenRank {
  std::optional<RankStatus> status;  ///< its last one; none ever came: empty
  double silent_s =
      0;  ///< since it last gave a sign of life; of a rank that is alive this is short
};

/// Who keeps the job from getting on, in words for the user.
struct HangVerdict {
  std::vector<int> culprits;  ///< ascending; empty: it cannot be told
  std::string text;           ///< one sentence
};

/// By the statuses of all ranks (`seen[r]`: of rank r):
///  1. ranks that give no sign of life (silent for more than `silence_s`): stopped, killed, or their machine is gone;
///  2. else ranks that compute, or do something else, while others wait for them in an exchange;
///  3. else, when all are in exchanges: those in the earliest one, by number within a group that they share, or in another
///     than the rest;
///  4. else ranks that most others wait for.
HangVerdict judge_hang(const std::vector<SeenRank>& seen, double silence_s);

/// A line per rank, "rank 3 (host, pid 4711): …"; of many the first `most`.
std::string table_of(const std::vector<SeenRank>& seen, double silence_s, std::size_t most);

}  // namespace moesaic
