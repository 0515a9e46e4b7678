#pragma once
// Which experts a run used, visit by visit. Format: docs/memory.md.
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "memory/tiers/visits.h"

namespace moesaic {
class DurableFile;
}

namespace moesaic::tiers {

struct TouchLog {
  struct Entry {
    std::int64_t step = 0;
    Visit visit;
    std::vector<Block> blocks;  ///< in the order of their use
  };
  std::int32_t layers = 0, experts = 0;  ///< layers with experts, and experts of each
  std::uint64_t expert_bytes = 0;        ///< weights of an expert, as loaded for a visit
  std::uint64_t state_bytes = 0;         ///< what an update loads and writes besides
  Updates updates = Updates::none;
  std::vector<Entry> entries;      ///< every step has the same visits
  bool last_step_was_cut = false;  ///< the file ended within a step, which is left out

  std::int64_t blocks() const { return std::int64_t{layers} * experts; }
  std::int64_t first_step() const { return entries.front().step; }
  std::int64_t steps() const;
  /// The visits of a step.
  std::vector<Visit> schedule() const;
};

/// Throws InputError "FILE:LINE: …" for what is no log, or when a step has other visits than the first.
TouchLog read_touch_log(const std::filesystem::path& path);

/// Writes a log, a line per visit. A log that was there is replaced, another file is not (UsageError). Throws ResourceError.
class TouchLogWriter {
 public:
  /// Of `head` everything but the entries.
  TouchLogWriter(const std::filesystem::path& path, const TouchLog& head);
  ~TouchLogWriter();
  /// `tokens`: how many of a visit's tokens chose each expert.
  void forward(std::int64_t step, const Visit& visit, const std::vector<std::int64_t>& tokens);
  /// The same, without numbers.
  void forward_touched(std::int64_t step, const Visit& visit, const std::vector<Block>& blocks);
  /// Backward and update: their experts follow from the forwards.
  void other(std::int64_t step, const Visit& visit);
  void finish();

 private:
  std::unique_ptr<DurableFile> file_;
  std::int32_t experts_;
};

/// Writes all of a log.
void write_touch_log(const std::filesystem::path& path, const TouchLog& log);

/// A log made up: layer by layer the experts' popularity falls as 1 / rank^zipf, ranks shuffled; a share `drift` of the
/// ranks changes places from step to step. An expert that a token chooses with probability q (of top_k draws without
/// replacement, roughly) is used in a visit of n tokens with probability 1 - (1 - q)^n, each expert for itself.
struct TouchOptions {
  std::int32_t layers = 24, experts = 64;
  std::int64_t top_k = 8;
  std::int64_t tokens = 8192;  ///< of a micro-batch
  std::int32_t micro_batches = 4;
  std::int64_t steps = 12;
  double zipf = 0, drift = 0.02;
  std::uint64_t seed = 1;
  VisitOrder order = VisitOrder::horizontal;
  Updates updates = Updates::none;
  std::uint64_t expert_bytes = 0, state_bytes = 0;
};
TouchLog draw_touch_log(const TouchOptions& options);

/// Probabilities that a token chooses each expert: proportional to the weights where that is at most 1, of sum top_k.
std::vector<double> choice_probabilities(const std::vector<double>& weights, std::int64_t top_k);

/// The experts that backwards and updates use, from the forwards of their step; all blocks in the order of use. An update that
/// comes before its layer's forwards is of the step before: it runs beside them.
class TouchFiller {
 public:
  explicit TouchFiller(const TouchLog& log);
  /// The blocks of a visit; `touched` (ascending) for a forward, ignored for the others.
  std::vector<Block> blocks(std::int64_t step,
                            const Visit& visit,
                            const std::vector<Block>& touched);

 private:
  using Forwards = std::vector<std::pair<Visit, std::vector<Block>>>;
  const Forwards& updated_by(const Visit& update) const;

  std::int32_t experts_;
  Updates updates_;
  std::int64_t step_ = -1;
  Forwards forwards_, forwards_before_;  ///< of this step, and of the one before
};

}  // namespace moesaic::tiers
