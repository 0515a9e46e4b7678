#include "parallel/pipeline/rendezvous.h"

#include <algorithm>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::pipeline {
namespace {

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

class Rendezvous {
 public:
  explicit Rendezvous(const Schedule& schedule)
      : schedule_(schedule),
        next_(schedule.ranks.size(), 0),
        is_posted_(schedule.ranks.size(), false),
        posted_(4 * at(schedule.placement.num_chunks()) * at(schedule.sizes.micro_batches), false) {
  }

  void run() {
    bool is_moving = true;
    while (is_moving) {
      is_moving = false;
      for (int rank = 0; rank < schedule_.placement.stages(); ++rank) {
        while (step(rank))
          is_moving = true;
      }
    }
  }

  /// The circle that a rank that is stuck leads to.
  std::string circle() const {
    std::vector<int> path;
    for (int rank = 0; rank < schedule_.placement.stages() && path.empty(); ++rank) {
      if (current(rank) != nullptr) path.push_back(rank);
    }
    if (path.empty()) return "";
    while (true) {
      const int peer = waits_for(path.back()).peer;
      MOESAIC_CHECK(current(peer) != nullptr, "a receive without a send");
      const auto seen = std::find(path.begin(), path.end(), peer);
      if (seen == path.end()) {
        path.push_back(peer);
        continue;
      }
      path.erase(path.begin(), seen);
      return text(path);
    }
  }

 private:
  const Action* current(int rank) const {
    const auto& list = schedule_.ranks[at(rank)];
    return next_[at(rank)] < list.size() ? &list[next_[at(rank)]] : nullptr;
  }

  std::vector<bool>::size_type index(const Message& m, bool is_send) const {
    const std::size_t pair = at(m.boundary) * at(schedule_.sizes.micro_batches) + at(m.micro_batch);
    return 4 * pair + (m.payload == Payload::activation ? 0U : 2U) + (is_send ? 1U : 0U);
  }
  bool is_answered(const Message& m) const { return posted_[index(m, !m.is_send)]; }

  /// False when the rank has to wait, or is at its end.
  bool step(int rank) {
    const Action* action = current(rank);
    if (action == nullptr) return false;
    bool has_moved = false;
    if (!is_posted_[at(rank)]) {
      for (const Message& m : action->messages)
        posted_[index(m, m.is_send)] = true;
      is_posted_[at(rank)] = true;
      has_moved = true;
    }
    const auto& messages = action->messages;
    if (std::all_of(
            messages.begin(), messages.end(), [&](const Message& m) { return is_answered(m); })) {
      ++next_[at(rank)];
      is_posted_[at(rank)] = false;
      has_moved = true;
    }
    return has_moved;
  }

  Message waits_for(int rank) const {
    for (const Message& m : current(rank)->messages) {
      if (!is_answered(m)) return m;
    }
    check_failed(__FILE__, __LINE__, "a message is missing", "a rank that waits for nothing");
  }

  std::string text(const std::vector<int>& ranks) const {
    std::string all = "deadlock:";
    for (const int rank : ranks) {
      const Message m = waits_for(rank);
      all += fmt::format("{} rank {} waits in action {} ({}) for rank {} to {} it",
                         rank == ranks.front() ? "" : ";",
                         rank,
                         next_[at(rank)],
                         to_string(m),
                         m.peer,
                         m.is_send ? "receive" : "send");
    }
    return all;
  }

  const Schedule& schedule_;
  std::vector<std::size_t> next_;
  std::vector<bool> is_posted_;
  std::vector<bool> posted_;
};

}  // namespace

std::string find_deadlock(const Schedule& schedule) {
  Rendezvous run(schedule);
  run.run();
  return run.circle();
}

}  // namespace moesaic::pipeline
