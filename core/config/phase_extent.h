#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "core/config/check.h"
#include "core/config/config.h"

namespace moesaic::config {

/// Where a phase lies in the run and how a step of it is cut.
struct PhaseExtent {
  std::int64_t begin = 0;              ///< steps before it
  std::int64_t until = 0;              ///< its last step
  std::int64_t first_token = 0;        ///< tokens seen before it
  std::int64_t sequence_length = 0;    ///< tokens
  std::int64_t global_batch_size = 0;  ///< sequences per step, over all ranks
  std::int64_t micro_batch_size = 0;   ///< sequences that pass the model at once on a rank

  std::int64_t tokens_per_step() const { return sequence_length * global_batch_size; }
  std::int64_t end_token() const { return first_token + (until - begin) * tokens_per_step(); }
};

/// The phases of a configuration that passed its checks; one for the whole run when it names none.
std::vector<PhaseExtent> phase_extents(const Config& config);

/// How many pieces layers work off the `tokens` tokens of a micro-batch in (activations.piece_tokens): the fewest equal ones
/// of at most so many tokens that divide among the ranks along tp; 0 = none of at least half as many.
std::int64_t pieces_of_micro_batch(const Config& config, std::int64_t tokens);

/// Computes what a configuration leaves to its token counts, and writes it where everybody reads it:
///   train.global_batch_size      = train.global_batch_tokens / data.sequence_length
///   train.phases[i].until        = the first step after which until_tokens tokens have been seen, or the end of the run
///   train.steps                  = the first step after which train.tokens have been seen, or the end of the last phase
/// All in integers, so a step's phase, batch and samples do not depend on where a run was interrupted. Appends the keys
/// that it filled to `derived`. Returns what contradicts itself or is missing.
std::vector<Finding> derive_steps(Config& config, std::set<std::string>& derived);

}  // namespace moesaic::config
