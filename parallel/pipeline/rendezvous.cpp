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
        progress_(schedule.ranks.size()),
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

  /// An exchange that has begun, with one of its peers: what goes each way, in order, and how many pairs have ended.
  struct WithPeer {
    int peer = 0;
    std::vector<Message> sends, receives;
    std::size_t done = 0;
    std::size_t pairs() const { return std::max(sends.size(), receives.size()); }
  };
  using Progress = std::vector<WithPeer>;

  static Progress begin(const Action& action) {
    Progress progress;
    for (const Message& m : action.messages) {
      auto with = std::find_if(
          progress.begin(), progress.end(), [&](const WithPeer& w) { return w.peer == m.peer; });
      if (with == progress.end()) with = progress.insert(with, {.peer = m.peer});
      (m.is_send ? with->sends : with->receives).push_back(m);
    }
    return progress;
  }

  /// The messages of the pair that a peer is at.
  static std::vector<Message> current_pair(const WithPeer& with) {
    std::vector<Message> pair;
    if (with.done < with.sends.size()) pair.push_back(with.sends[with.done]);
    if (with.done < with.receives.size()) pair.push_back(with.receives[with.done]);
    return pair;
  }

  /// Posts the pair and ends it if both have been answered. False when nothing came of it.
  bool move(WithPeer& with) {
    const std::vector<Message> pair = current_pair(with);
    bool has_moved = false, is_over = true;
    for (const Message& m : pair) {
      if (!posted_[index(m, m.is_send)]) has_moved = true;
      posted_[index(m, m.is_send)] = true;
      is_over = is_over && is_answered(m);
    }
    if (is_over) ++with.done;
    return has_moved || is_over;
  }

  /// False when the rank has to wait, or is at its end.
  bool step(int rank) {
    const Action* action = current(rank);
    if (action == nullptr) return false;
    std::optional<Progress>& progress = progress_[at(rank)];
    bool has_moved = !progress.has_value();
    if (!progress) progress = begin(*action);
    bool is_over = true;
    for (WithPeer& with : *progress) {
      if (with.done < with.pairs() && move(with)) has_moved = true;
      is_over = is_over && with.done == with.pairs();
    }
    if (!is_over) return has_moved;
    ++next_[at(rank)];
    progress.reset();
    return true;
  }

  Message waits_for(int rank) const {
    for (const WithPeer& with : progress_[at(rank)].value()) {
      if (with.done == with.pairs()) continue;
      for (const Message& m : current_pair(with)) {
        if (!is_answered(m)) return m;
      }
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
  std::vector<std::optional<Progress>> progress_;
  std::vector<bool> posted_;
};

}  // namespace

std::string find_deadlock(const Schedule& schedule) {
  Rendezvous run(schedule);
  run.run();
  return run.circle();
}

}  // namespace moesaic::pipeline
