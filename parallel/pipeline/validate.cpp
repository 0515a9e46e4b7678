#include "parallel/pipeline/validate.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"
#include "parallel/pipeline/rendezvous.h"

namespace moesaic::pipeline {
namespace {

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

using Problems = std::vector<std::string>;

/// Looks at the list of one rank by itself.
class RankCheck {
 public:
  RankCheck(const Schedule& schedule, int rank, const Limits& limits, Problems& problems)
      : placement_(schedule.placement),
        micro_batches_(schedule.sizes.micro_batches),
        rank_(rank),
        list_(schedule.ranks[at(rank)]),
        limits_(limits),
        problems_(problems),
        passes_(at(placement_.num_chunks() * micro_batches_)),
        in_flight_(at(placement_.num_chunks()), 0) {}

  void run() {
    for (index_ = 0; index_ < list_.size(); ++index_) {
      const Action& a = list_[index_];
      if (!a.is_exchange()) {
        work(a);
        continue;
      }
      if (a.messages.empty()) bad("has no messages");
      // What arrives in an exchange cannot leave in it.
      for (const Message& m : a.messages) {
        if (m.is_send) message(m);
      }
      for (const Message& m : a.messages) {
        if (!m.is_send) message(m);
      }
    }
    for (const int chunk : placement_.chunks_of(rank_)) {
      for (int m = 0; m < micro_batches_; ++m)
        finished(chunk, m);
    }
  }

 private:
  struct Pass {
    bool forward = false, backward = false, input = false, weight = false;
    bool got_activation = false, got_gradient = false;    // received, for this chunk
    bool sent_activation = false, sent_gradient = false;  // what this chunk made
  };

  void bad(const std::string& what) {
    problems_.push_back(
        fmt::format("rank {}, action {} ({}): {}", rank_, index_, to_string(list_[index_]), what));
  }

  bool is_here(int chunk) const {
    return 0 <= chunk && chunk < placement_.num_chunks() && placement_.rank_of(chunk) == rank_;
  }
  Pass& pass(int chunk, int micro_batch) {
    return passes_[at(chunk * micro_batches_ + micro_batch)];
  }

  void work(const Action& a) {
    if (!is_here(a.chunk)) return bad("the chunk is not on this rank");
    if (a.micro_batch < 0 || a.micro_batch >= micro_batches_) return bad("no such micro-batch");
    Pass& p = pass(a.chunk, a.micro_batch);
    switch (a.work) {
      case Work::forward:
        return forward(a, p);
      case Work::backward:
        return backward(a, p, p.backward);
      case Work::backward_input:
        return backward(a, p, p.input);
      default:
        if (p.weight || p.backward) return bad("a second time");
        if (!p.input) return bad("before its backward-input");
        p.weight = true;
        --in_flight_[at(a.chunk)];
    }
  }

  void forward(const Action& a, Pass& p) {
    if (p.forward) return bad("a second time");
    p.forward = true;
    const bool has_input =
        a.chunk == 0 ||
        (is_here(a.chunk - 1) ? pass(a.chunk - 1, a.micro_batch).forward : p.got_activation);
    if (!has_input) bad(fmt::format("without the activation at boundary {}", a.chunk - 1));
    const int now = ++in_flight_[at(a.chunk)];
    if (limits_.in_flight && now > *limits_.in_flight)
      bad(fmt::format(
          "{} micro-batches of the chunk are in flight; allowed: {}", now, *limits_.in_flight));
  }

  void backward(const Action& a, Pass& p, bool& done) {
    if (p.backward || p.input) return bad("a second time");
    done = true;
    if (!p.forward) bad("before its forward");
    const bool is_last = a.chunk == placement_.num_chunks() - 1;
    bool has_input = is_last || p.got_gradient;
    if (!is_last && is_here(a.chunk + 1)) {
      const Pass& later = pass(a.chunk + 1, a.micro_batch);
      has_input = later.backward || later.input;
    }
    if (!has_input) bad(fmt::format("without the gradient at boundary {}", a.chunk));
    if (a.work == Work::backward) --in_flight_[at(a.chunk)];
  }

  void message(const Message& m) {
    if (m.boundary < 0 || m.boundary + 1 >= placement_.num_chunks())
      return bad(fmt::format("there is no boundary {}", m.boundary));
    if (m.micro_batch < 0 || m.micro_batch >= micro_batches_) return bad("no such micro-batch");
    const bool is_activation = m.payload == Payload::activation;
    // The chunk on this rank, and that of the peer.
    const int own = m.is_send == is_activation ? m.boundary : m.boundary + 1;
    const int other = 2 * m.boundary + 1 - own;
    if (!is_here(own) || placement_.rank_of(other) != m.peer || m.peer == rank_)
      return bad(fmt::format("boundary {} lies between rank {} and rank {}",
                             m.boundary,
                             placement_.rank_of(m.boundary),
                             placement_.rank_of(m.boundary + 1)));
    Pass& p = pass(own, m.micro_batch);
    if (m.is_send) {
      if (!(is_activation ? p.forward : p.backward || p.input))
        bad(to_string(m) + " before it is made");
      if (std::exchange(is_activation ? p.sent_activation : p.sent_gradient, true))
        bad(to_string(m) + " a second time");
    } else if (std::exchange(is_activation ? p.got_activation : p.got_gradient, true)) {
      bad(to_string(m) + " a second time");
    }
  }

  void finished(int chunk, int micro_batch) {
    const Pass& p = pass(chunk, micro_batch);
    const auto missing = [&](bool is_there, const char* what) {
      if (!is_there)
        problems_.push_back(fmt::format(
            "rank {}: no {} of micro-batch {} at chunk {}", rank_, what, micro_batch, chunk));
    };
    missing(p.forward, "forward");
    missing(p.backward || p.input, "backward");
    missing(p.backward || p.weight, "backward-weight");
    if (chunk + 1 < placement_.num_chunks() && placement_.is_crossed(chunk))
      missing(p.sent_activation, "send of the activation");
    if (chunk > 0 && placement_.is_crossed(chunk - 1))
      missing(p.sent_gradient, "send of the gradient");
  }

  const Placement& placement_;
  int micro_batches_, rank_;
  const std::vector<Action>& list_;
  const Limits& limits_;
  Problems& problems_;
  std::vector<Pass> passes_;
  std::vector<int> in_flight_;  // per chunk
  std::size_t index_ = 0;
};

using Pair = std::pair<int, int>;  // from, to
using Content = std::tuple<Payload, int, int>;

std::map<Pair, std::vector<Content>> contents(const Schedule& schedule, bool sends) {
  std::map<Pair, std::vector<Content>> all;
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
    const int rank = static_cast<int>(r);
    for (const Action& a : schedule.ranks[r]) {
      for (const Message& m : a.messages) {
        if (m.is_send == sends)
          all[sends ? Pair(rank, m.peer) : Pair(m.peer, rank)].emplace_back(
              m.payload, m.boundary, m.micro_batch);
      }
    }
  }
  return all;
}

std::string to_string(const std::vector<Content>& list, std::size_t k) {
  if (k >= list.size()) return "nothing";
  const auto [payload, boundary, micro_batch] = list[k];
  return fmt::format("the {} at boundary {} of micro-batch {}",
                     payload == Payload::activation ? "activation" : "gradient",
                     boundary,
                     micro_batch);
}

void check_pairs(const Schedule& schedule, Problems& problems) {
  auto sends = contents(schedule, true), receives = contents(schedule, false);
  for (const auto& entry : receives)
    sends[entry.first];
  for (const auto& [pair, sent] : sends) {
    const auto& expected = receives[pair];
    if (sent == expected) continue;
    std::size_t k = 0;
    while (k < sent.size() && k < expected.size() && sent[k] == expected[k])
      ++k;
    problems.push_back(fmt::format("message {} from rank {} to rank {}: sent is {}, expected {}",
                                   k,
                                   pair.first,
                                   pair.second,
                                   to_string(sent, k),
                                   to_string(expected, k)));
  }
}

}  // namespace

std::vector<std::string> problems(const Schedule& schedule, const Limits& limits) {
  if (schedule.ranks.size() != at(schedule.placement.stages()))
    return {
        fmt::format("{} lists for {} ranks", schedule.ranks.size(), schedule.placement.stages())};
  Problems found;
  for (int rank = 0; rank < schedule.placement.stages(); ++rank)
    RankCheck(schedule, rank, limits, found).run();
  if (found.empty()) check_pairs(schedule, found);
  if (found.empty()) {
    if (const std::string circle = find_deadlock(schedule); !circle.empty())
      found.push_back(circle);
  }
  return found;
}

void validate(const Schedule& schedule) {
  const Problems found = problems(schedule);
  if (found.empty()) return;
  std::string text;
  for (const std::string& problem : found)
    text += "\n  " + problem;
  throw InternalError(
      fmt::format("pipeline schedule {} with {} stages, {} chunks, {} micro-batches "
                  "cannot run:{}",
                  name(schedule.kind),
                  schedule.sizes.stages,
                  schedule.sizes.chunks,
                  schedule.sizes.micro_batches,
                  text));
}

}  // namespace moesaic::pipeline
