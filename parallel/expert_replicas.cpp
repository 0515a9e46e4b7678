#include "parallel/expert_replicas.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic {
namespace {

constexpr double kLeastGain = 0.01;

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// The experts of one node and how many of their turns each rank has.
class Node {
 public:
  Node(std::span<const double> load,
       const PlacesOfExperts& homes,
       std::int32_t each,
       int first_rank,
       int ranks,
       std::int32_t slots)
      : sums_(at(ranks), 0), free_(at(ranks), slots) {
    for (std::size_t e = 0; e < load.size(); ++e) {
      const int rank = homes[e] / each - first_rank;
      if (rank < 0 || rank >= ranks) continue;
      Expert expert{static_cast<std::int32_t>(e),
                    load[e] / kReplicaTurns,
                    std::vector<std::int32_t>(at(ranks), 0),
                    std::vector<char>(at(ranks), 0)};
      expert.turns[at(rank)] = kReplicaTurns;
      expert.is_here[at(rank)] = 1;
      experts_.push_back(std::move(expert));
      sums_[at(rank)] += load[e];
    }
    for (const double sum : sums_)
      mean_ += sum / ranks;
  }

  struct Expert {
    std::int32_t number;
    double unit;                      // load of a turn
    std::vector<std::int32_t> turns;  // by rank of the node
    std::vector<char> is_here;        // likewise
  };
  const std::vector<Expert>& experts() const { return experts_; }

  // Every step makes the fullest rank emptier and none as full, so this ends; the limit is for time alone.
  void balance() {
    const std::size_t most = 64 * sums_.size();
    for (std::size_t i = 0; i < most && relieve(); ++i) {
    }
  }

 private:
  struct Transfer {
    Expert* expert = nullptr;
    std::size_t to = 0;
    std::int32_t turns = 0;
    double amount = 0;
  };

  // What rank `to` can take over of an expert from `full`; nothing if it would be as full then.
  Transfer transfer(Expert& expert, std::size_t full, std::size_t to) const {
    const bool is_new = expert.is_here[to] == 0;
    if (to == full || (is_new && free_[to] == 0)) return {};
    const double room = std::min(sums_[full] - mean_, mean_ - sums_[to]);
    const auto most = static_cast<double>(expert.turns[full]);
    const double turns = std::clamp(std::floor(room / expert.unit), 1.0, most);
    const double amount = turns * expert.unit;
    if (sums_[to] + amount >= sums_[full] * (1 - 1e-9)) return {};
    if (is_new && amount < kLeastGain * mean_) return {};
    return {&expert, to, static_cast<std::int32_t>(turns), amount};
  }

  bool relieve() {
    const auto full =
        static_cast<std::size_t>(std::max_element(sums_.begin(), sums_.end()) - sums_.begin());
    if (sums_[full] - mean_ <= kLeastGain * mean_) return false;
    Transfer best;
    for (Expert& expert : experts_) {
      if (expert.turns[full] == 0 || expert.unit <= 0) continue;
      for (std::size_t to = 0; to < sums_.size(); ++to) {
        const Transfer next = transfer(expert, full, to);
        if (next.amount > best.amount * (1 + 1e-9)) best = next;
      }
    }
    if (best.expert == nullptr) return false;
    Expert& expert = *best.expert;
    expert.turns[full] -= best.turns;
    expert.turns[best.to] += best.turns;
    sums_[full] -= best.amount;
    sums_[best.to] += best.amount;
    if (expert.is_here[best.to] == 0) {
      expert.is_here[best.to] = 1;
      --free_[best.to];
    }
    return true;
  }

  std::vector<Expert> experts_;
  std::vector<double> sums_;
  std::vector<std::int32_t> free_;
  double mean_ = 0;
};

struct Share {
  std::int32_t place = 0, turns = 0;
};

// Turns of every place lie evenly among the others. Experts begin at different ones, so that the first tokens of a short
// micro-batch do not all go home.
void deal_turns(std::span<const Share> shares, std::int32_t expert, std::span<std::int32_t> turns) {
  std::vector<std::int32_t> given(shares.size(), 0);
  for (std::int32_t t = 0; t < kReplicaTurns; ++t) {
    std::size_t next = 0;
    std::int32_t largest = -1;
    for (std::size_t s = 0; s < shares.size(); ++s) {
      const std::int32_t due = shares[s].turns * (t + 1) - kReplicaTurns * given[s];
      if (given[s] < shares[s].turns && due > largest) {
        largest = due;
        next = s;
      }
    }
    ++given[next];
    turns[at((t + expert) % kReplicaTurns)] = shares[next].place;
  }
}

std::vector<std::int32_t> turns_of(const ExpertCopies& copies, std::size_t expert) {
  std::vector<std::int32_t> turns(at(copies.ranks), 0);
  for (std::int32_t t = 0; t < kReplicaTurns; ++t)
    ++turns[at(copies.rank_of(copies.place_of_turn[expert * kReplicaTurns + at(t)]))];
  return turns;
}

}  // namespace

std::int64_t ExpertCopies::num_copies() const {
  return std::count_if(
      expert_of_slot.begin(), expert_of_slot.end(), [](std::int32_t e) { return e >= 0; });
}

ExpertCopies no_copies(const PlacesOfExperts& homes, int ranks, std::int32_t slots) {
  MOESAIC_CHECK(ranks > 0 && slots >= 0 && homes.size() % at(ranks) == 0,
                fmt::format("{} experts on {} ranks", homes.size(), ranks));
  ExpertCopies copies{.ranks = ranks,
                      .homes = static_cast<std::int32_t>(homes.size()) / ranks,
                      .slots = slots,
                      .expert_of_slot = std::vector<std::int32_t>(at(ranks) * at(slots), -1),
                      .place_of_turn = {}};
  copies.place_of_turn.reserve(homes.size() * kReplicaTurns);
  for (const std::int32_t home : homes) {
    const std::int32_t place = home / copies.homes * copies.places_per_rank() + home % copies.homes;
    copies.place_of_turn.insert(copies.place_of_turn.end(), kReplicaTurns, place);
  }
  return copies;
}

ExpertCopies balanced_copies(std::span<const double> load,
                             const NodeGrid& grid,
                             const PlacesOfExperts& homes,
                             std::int32_t slots) {
  ExpertCopies copies = no_copies(homes, grid.ranks(), slots);
  MOESAIC_CHECK(load.size() == homes.size(), "a load for every expert");
  if (slots == 0 || grid.per_node == 1) return copies;
  for (int n = 0; n < grid.nodes; ++n) {
    const int first = n * grid.per_node;
    Node node(load, homes, copies.homes, first, grid.per_node, slots);
    node.balance();
    std::vector<std::int32_t> used(at(grid.per_node), 0);
    for (const Node::Expert& expert : node.experts()) {
      const std::int32_t home = homes[at(expert.number)] / copies.homes - first;
      if (expert.turns[at(home)] == kReplicaTurns) continue;
      std::vector<Share> shares;
      const auto own = at(expert.number) * kReplicaTurns;
      if (expert.turns[at(home)] > 0)
        shares.push_back({copies.place_of_turn[own], expert.turns[at(home)]});
      for (int r = 0; r < grid.per_node; ++r) {
        if (r == home || expert.turns[at(r)] == 0) continue;  // what was given away again is free
        const std::int32_t slot = used[at(r)]++;
        copies.expert_of_slot[at((first + r) * slots + slot)] = expert.number;
        shares.push_back(
            {(first + r) * copies.places_per_rank() + copies.homes + slot, expert.turns[at(r)]});
      }
      deal_turns(
          shares, expert.number, std::span(copies.place_of_turn).subspan(own, kReplicaTurns));
    }
  }
  return copies;
}

std::vector<double> rank_loads(std::span<const double> load, const ExpertCopies& copies) {
  std::vector<double> loads(at(copies.ranks), 0);
  for (std::size_t e = 0; e < load.size(); ++e) {
    const auto turns = turns_of(copies, e);
    for (std::size_t r = 0; r < loads.size(); ++r)
      loads[r] += load[e] * turns[r] / kReplicaTurns;
  }
  return loads;
}

std::vector<std::int64_t> rank_tokens(std::span<const std::int64_t> tokens,
                                      const ExpertCopies& copies) {
  std::vector<std::int64_t> all(at(copies.ranks), 0);
  for (std::size_t e = 0; e < tokens.size(); ++e) {
    const auto turns = turns_of(copies, e);
    std::int64_t upto = 0, dealt = 0;
    for (std::size_t r = 0; r < all.size(); ++r) {
      upto += turns[r];
      const std::int64_t until = tokens[e] * upto / kReplicaTurns;
      all[r] += until - dealt;
      dealt = until;
    }
  }
  return all;
}

std::vector<std::vector<CopyOfExpert>> rounds_of_copies(const ExpertCopies& copies,
                                                        const PlacesOfExperts& homes) {
  std::vector<std::vector<CopyOfExpert>> rounds;
  std::vector<std::size_t> of_home(at(copies.ranks), 0);
  for (std::size_t i = 0; i < copies.expert_of_slot.size(); ++i) {
    const std::int32_t expert = copies.expert_of_slot[i];
    if (expert < 0) continue;
    const std::int32_t home = homes[at(expert)];
    const CopyOfExpert copy{expert,
                            static_cast<int>(i) / copies.slots,
                            static_cast<std::int32_t>(i) % copies.slots,
                            home / copies.homes,
                            home % copies.homes};
    const std::size_t round = of_home[at(copy.home)]++;
    if (round == rounds.size()) rounds.emplace_back();
    rounds[round].push_back(copy);
  }
  return rounds;
}

}  // namespace moesaic
