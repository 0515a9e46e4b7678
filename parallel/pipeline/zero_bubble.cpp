#include <algorithm>
#include <deque>
#include <optional>

#include "core/base/error.h"
#include "parallel/pipeline/orders.h"

namespace moesaic::pipeline {
namespace {

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

/// What a rank prefers among the work that is ready.
struct Rule {
  bool forward_first = false;
  bool oldest_first =
      false;  ///< backwards: the oldest micro-batch first, else the last chunk first
};

/// One run of the list scheduler. Every action takes one unit.
class ListScheduler {
 public:
  ListScheduler(const Placement& placement, int micro_batches, Rule rule)
      : placement_(placement),
        micro_batches_(micro_batches),
        rule_(rule),
        orders_(at(placement.stages())),
        ranks_(at(placement.stages())),
        forwards_(at(placement.num_chunks())),
        backwards_(forwards_) {}

  void run() {
    const std::size_t all = 3 * at(placement_.num_chunks()) * at(micro_batches_);
    for (std::size_t done = 0; done < all; ++now_) {
      // Nobody sees what others finish in this unit before it is over.
      std::vector<std::optional<Action>> chosen;
      for (int rank = 0; rank < placement_.stages(); ++rank)
        chosen.push_back(choose(rank));
      std::size_t started = 0;
      for (int rank = 0; rank < placement_.stages(); ++rank) {
        if (!chosen[at(rank)]) continue;
        take(rank, *chosen[at(rank)]);
        ++started;
      }
      MOESAIC_CHECK(started > 0, "no rank can go on");
      done += started;
    }
  }
  int makespan() const noexcept { return now_; }
  Orders orders() && { return std::move(orders_); }

 private:
  struct Rank {
    int before_backward =
        0;  ///< pairs (chunk, micro-batch) after forward and before backward-input
    std::deque<Action> weights;  ///< backward-weights that are due, oldest first
    int kept() const { return before_backward + static_cast<int>(weights.size()); }
  };

  std::optional<Action> choose(int rank) const {
    auto first = rule_.forward_first ? forward(rank) : backward(rank);
    if (!first) first = rule_.forward_first ? backward(rank) : forward(rank);
    if (!first && !ranks_[at(rank)].weights.empty()) first = ranks_[at(rank)].weights.front();
    return first;
  }

  // Later chunks first: they are nearer to their backward. A micro-batch that enters leaves room to pass the rank's
  // later chunks, or ranks would wait for each other with full memory.
  std::optional<Action> forward(int rank) const {
    const auto& chunks = placement_.chunks_of(rank);
    for (std::size_t i = chunks.size(); i-- > 0;) {
      const int chunk = chunks[i], next = forwards_[at(chunk)];
      if (next == micro_batches_ || (chunk > 0 && forwards_[at(chunk - 1)] <= next)) continue;
      const int room = static_cast<int>(chunks.size() - 1 - i);
      if (ranks_[at(rank)].kept() + room >= limit()) continue;
      if (i == 0 && ranks_[at(rank)].before_backward >= entry_limit(rank)) continue;
      return Action{.work = Work::forward, .chunk = chunk, .micro_batch = next, .messages = {}};
    }
    return std::nullopt;
  }

  std::optional<Action> backward(int rank) const {
    std::optional<Action> best;
    const auto& chunks = placement_.chunks_of(rank);
    for (std::size_t i = chunks.size(); i-- > 0;) {
      const int chunk = chunks[i], next = backwards_[at(chunk)];
      const bool is_last = chunk == placement_.num_chunks() - 1;
      if (next == forwards_[at(chunk)] || (!is_last && backwards_[at(chunk + 1)] <= next)) continue;
      if (!best || (rule_.oldest_first && next < best->micro_batch))
        best = Action{
            .work = Work::backward_input, .chunk = chunk, .micro_batch = next, .messages = {}};
    }
    return best;
  }

  void take(int rank, const Action& a) {
    Rank& state = ranks_[at(rank)];
    orders_[at(rank)].push_back(a);
    if (a.work == Work::forward) {
      ++forwards_[at(a.chunk)];
      ++state.before_backward;
    } else if (a.work == Work::backward_input) {
      ++backwards_[at(a.chunk)];
      --state.before_backward;
      state.weights.push_back(a);
      state.weights.back().work = Work::backward_weight;
    } else {
      state.weights.pop_front();
    }
  }

  int chunks_per_rank() const { return placement_.num_chunks() / placement_.stages(); }
  int limit() const { return placement_.num_chunks(); }
  // With one chunk, what 1f1b keeps. With two, one pair less than the memory would hold: the way back needs it.
  int entry_limit(int rank) const {
    return chunks_per_rank() == 1 ? placement_.stages() - rank
                                  : std::max(1, placement_.num_chunks() - 1);
  }

  const Placement& placement_;
  int micro_batches_;
  Rule rule_;
  int now_ = 0;
  Orders orders_;
  std::vector<Rank> ranks_;
  std::vector<int> forwards_, backwards_;  // done, per chunk; micro-batches pass in order
};

}  // namespace

Orders zero_bubble_order(const Placement& placement, int micro_batches) {
  std::optional<ListScheduler> best;
  for (const bool forward_first : {false, true}) {
    for (const bool oldest_first : {true, false}) {
      ListScheduler run(
          placement, micro_batches, {.forward_first = forward_first, .oldest_first = oldest_first});
      run.run();
      if (!best || run.makespan() < best->makespan()) best.emplace(std::move(run));
    }
  }
  return std::move(*best).orders();
}

}  // namespace moesaic::pipeline
