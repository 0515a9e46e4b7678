#include "parallel/pipeline/simulate.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "core/base/error.h"

namespace moesaic::pipeline {
namespace {

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

class Simulator {
 public:
  Simulator(const Schedule& schedule, const Costs& costs, Communication communication)
      : schedule_(schedule),
        costs_(costs),
        is_blocking_(communication == Communication::blocking),
        ranks_(schedule.ranks.size()),
        made_(2 * at(schedule.placement.num_chunks()) * at(schedule.sizes.micro_batches)),
        arrived_(made_),
        posted_(2 * made_.size()) {
    result_.busy.assign(schedule.ranks.size(), 0);
    for (const auto& list : schedule.ranks)
      result_.spans.emplace_back(list.size());
  }

  Simulation run() {
    bool is_moving = true;
    while (is_moving) {
      is_moving = false;
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        while (step(r))
          is_moving = true;
      }
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      const std::size_t n = schedule_.ranks[r].size();
      MOESAIC_CHECK(ranks_[r].work.next >= n && ranks_[r].talk.next >= n,
                    "the schedule does not get to its end");
    }
    return std::move(result_);
  }

 private:
  using Time = std::optional<double>;
  /// A rank's place in its list, for computing or for exchanges, and when it is free to go on.
  struct Lane {
    std::size_t next = 0;
    double free = 0;
  };
  struct Rank {
    Lane work, talk;
    bool is_posted = false;
    double start = 0;  // of the exchange in progress
  };

  // Activation at boundary b, or gradient at boundary b, of a micro-batch.
  std::size_t index(Payload payload, int boundary, int micro_batch) const {
    const std::size_t pair = at(boundary) * at(schedule_.sizes.micro_batches) + at(micro_batch);
    return 2 * pair + (payload == Payload::activation ? 0U : 1U);
  }
  std::size_t index(const Message& m) const { return index(m.payload, m.boundary, m.micro_batch); }

  bool step(std::size_t r) {
    const auto& list = schedule_.ranks[r];
    Rank& rank = ranks_[r];
    const auto skip = [&](Lane& lane, bool exchanges) {
      while (lane.next < list.size() && list[lane.next].is_exchange() != exchanges)
        ++lane.next;
    };
    skip(rank.work, false);
    skip(rank.talk, true);
    const bool talks_first = rank.talk.next < rank.work.next;
    bool has_moved = false;
    if (rank.work.next < list.size() && !(is_blocking_ && talks_first))
      has_moved = work(r, list[rank.work.next]);
    if (rank.talk.next < list.size() && !(is_blocking_ && !talks_first) && talk(r))
      has_moved = true;
    return has_moved;
  }

  bool work(std::size_t r, const Action& a) {
    Lane& lane = ranks_[r].work;
    double start = lane.free;
    const bool is_forward = a.work == Work::forward;
    const int boundary = is_forward ? a.chunk - 1 : a.chunk;
    const bool has_input = a.work != Work::backward_weight && boundary >= 0 &&
                           boundary < schedule_.placement.num_chunks() - 1;
    if (has_input) {
      const std::size_t i =
          index(is_forward ? Payload::activation : Payload::gradient, boundary, a.micro_batch);
      const Time ready = schedule_.placement.is_crossed(boundary) ? arrived_[i] : made_[i];
      if (!ready) return false;
      start = std::max(start, *ready);
    }
    const double duration = cost(a), end = start + duration;
    result_.spans[r][lane.next] = {start, end};
    result_.busy[r] += duration;
    advance(lane, end, r);
    if (is_forward)
      made_[index(Payload::activation, a.chunk, a.micro_batch)] = end;
    else if (a.work != Work::backward_weight && a.chunk > 0)
      made_[index(Payload::gradient, a.chunk - 1, a.micro_batch)] = end;
    return true;
  }

  double cost(const Action& a) const {
    const std::size_t c = at(a.chunk);
    if (a.work == Work::forward) return costs_.forward[c];
    double sum = 0;
    if (a.work != Work::backward_weight) sum += costs_.backward_input[c];
    if (a.work != Work::backward_input) sum += costs_.backward_weight[c];
    return sum;
  }

  /// Posts the exchange, or ends it; false when it has to wait.
  bool talk(std::size_t r) {
    Rank& rank = ranks_[r];
    const Action& a = schedule_.ranks[r][rank.talk.next];
    const bool is_new = !rank.is_posted;
    if (is_new && !post(rank, a)) return false;
    double end = rank.start;
    for (const Message& m : a.messages) {
      const Time mine = posted_[2 * index(m) + (m.is_send ? 1U : 0U)];
      const Time other = posted_[2 * index(m) + (m.is_send ? 0U : 1U)];
      if (!other) return is_new;
      end = std::max(end, std::max(*mine, *other) + costs_.message);
    }
    for (const Message& m : a.messages) {
      if (!m.is_send) arrived_[index(m)] = end;
    }
    result_.spans[r][rank.talk.next] = {rank.start, end};
    rank.is_posted = false;
    advance(rank.talk, end, r);
    return true;
  }

  bool post(Rank& rank, const Action& a) {
    double start = rank.talk.free;
    for (const Message& m : a.messages) {
      if (!m.is_send) continue;
      const Time made = made_[index(m)];
      if (!made) return false;
      start = std::max(start, *made);
    }
    for (const Message& m : a.messages)
      posted_[2 * index(m) + (m.is_send ? 1U : 0U)] = start;
    rank.start = start;
    rank.is_posted = true;
    return true;
  }

  void advance(Lane& lane, double end, std::size_t r) {
    ++lane.next;
    lane.free = end;
    if (is_blocking_) ranks_[r].work.free = ranks_[r].talk.free = end;
    result_.makespan = std::max(result_.makespan, end);
  }

  const Schedule& schedule_;
  const Costs& costs_;
  bool is_blocking_;
  std::vector<Rank> ranks_;
  std::vector<Time> made_, arrived_, posted_;
  Simulation result_;
};

}  // namespace

Costs Costs::unit(int num_chunks) {
  const std::vector<double> ones(at(num_chunks), 1.0);
  return {.forward = ones, .backward_input = ones, .backward_weight = ones, .message = 0};
}

double Simulation::bubble_fraction() const {
  if (makespan <= 0) return 0;
  const double sum = std::accumulate(busy.begin(), busy.end(), 0.0);
  return 1 - sum / (makespan * static_cast<double>(busy.size()));
}

Simulation simulate(const Schedule& schedule, const Costs& costs, Communication communication) {
  const std::size_t chunks = at(schedule.placement.num_chunks());
  MOESAIC_CHECK(costs.forward.size() == chunks && costs.backward_input.size() == chunks &&
                    costs.backward_weight.size() == chunks,
                "costs for another number of chunks");
  return Simulator(schedule, costs, communication).run();
}

Slots count_slots(const Schedule& schedule) {
  const std::size_t ranks = schedule.ranks.size();
  std::vector<int> in_flight(at(schedule.placement.num_chunks()), 0);
  Slots peak{in_flight, std::vector<int>(ranks, 0), std::vector<int>(ranks, 0)};
  for (std::size_t r = 0; r < ranks; ++r) {
    int kept = 0, deferred = 0;
    for (const Action& a : schedule.ranks[r]) {
      const std::size_t c = at(a.chunk);
      if (a.work == Work::forward) {
        peak.per_chunk[c] = std::max(peak.per_chunk[c], ++in_flight[c]);
        peak.per_rank[r] = std::max(peak.per_rank[r], ++kept);
      } else if (a.work == Work::backward_input) {
        peak.deferred[r] = std::max(peak.deferred[r], ++deferred);
      } else if (!a.is_exchange()) {
        --in_flight[c];
        --kept;
        if (a.work == Work::backward_weight) --deferred;
      }
    }
  }
  return peak;
}

}  // namespace moesaic::pipeline
