#include "parallel/pipeline/orders.h"

#include <algorithm>
#include <tuple>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic::pipeline {
namespace {

std::size_t at(int i) {
  return static_cast<std::size_t>(i);
}

Action compute(Work work, int chunk, int micro_batch) {
  return {.work = work, .chunk = chunk, .micro_batch = micro_batch, .messages = {}};
}

/// `warmup` forwards, then a forward and a backward in turn, then the remaining backwards.
std::vector<Action> in_turn(std::vector<Action> forwards,
                            const std::vector<Action>& backwards,
                            std::size_t warmup) {
  std::vector<Action> order(forwards.begin(),
                            forwards.begin() + static_cast<std::ptrdiff_t>(warmup));
  for (std::size_t i = 0; i < backwards.size(); ++i) {
    if (warmup + i < forwards.size()) order.push_back(forwards[warmup + i]);
    order.push_back(backwards[i]);
  }
  return order;
}

/// All work of one direction of a rank: groups of `group` micro-batches pass its chunks one after the other.
std::vector<Action> in_groups(Work work, const Sizes& sizes, int rank, int group) {
  std::vector<Action> order;
  for (int first = 0; first < sizes.micro_batches; first += group) {
    for (int i = 0; i < sizes.chunks; ++i) {
      const int turn = work == Work::forward ? i : sizes.chunks - 1 - i;
      for (int m = first; m < first + group; ++m)
        order.push_back(compute(work, turn * sizes.stages + rank, m));
    }
  }
  return order;
}

/// Of micro-batches [first, first + group), by their pieces in reverse.
std::vector<Action> backwards_of(const Sizes& sizes, int chunk, int first, int group) {
  std::vector<Action> order;
  for (int begin = first; begin < first + group; begin += sizes.pieces)
    for (int m = begin + sizes.pieces; m-- > begin;)
      order.push_back(compute(Work::backward, chunk, m));
  return order;
}

/// Where they turn at the end, the last chunk's forwards and backwards stand together in the middle.
std::vector<Action> vertical_order(const Sizes& sizes) {
  const int group = sizes.in_a_group(), turning = sizes.turns_at_end ? sizes.chunks - 1 : -1;
  std::vector<Action> order;
  for (int first = 0; first < sizes.micro_batches; first += group) {
    for (int c = 0; c < sizes.chunks; ++c) {
      for (int m = first; m < first + group; ++m) {
        order.push_back(compute(Work::forward, c, m));
        if (c == turning) order.push_back(compute(Work::backward, c, m));
      }
    }
    for (int c = sizes.chunks; c-- > 0;) {
      if (c == turning) continue;
      const std::vector<Action> backwards = backwards_of(sizes, c, first, group);
      order.insert(order.end(), backwards.begin(), backwards.end());
    }
  }
  return order;
}

}  // namespace

Orders fixed_order(Kind kind, const Sizes& sizes) {
  if (kind == Kind::vertical) return {vertical_order(sizes)};
  // A smaller last group of an interleaved schedule: the order of a full one, without the micro-batches that are not
  // there. What is left of an order that can run can run.
  Sizes full = sizes;
  const int group = kind == Kind::gpipe ? sizes.micro_batches : sizes.stages;
  full.micro_batches = (sizes.micro_batches + group - 1) / group * group;
  Orders orders;
  for (int rank = 0; rank < sizes.stages; ++rank) {
    const auto forwards = in_groups(Work::forward, full, rank, group);
    const auto backwards = in_groups(Work::backward, full, rank, group);
    const int below = sizes.stages - 1 - rank;
    int warmup = below;
    if (kind == Kind::gpipe) warmup = static_cast<int>(forwards.size());
    if (kind == Kind::interleaved) warmup = 2 * below + (sizes.chunks - 1) * group;
    orders.push_back(in_turn(forwards, backwards, std::min(at(warmup), forwards.size())));
    std::erase_if(orders.back(),
                  [&](const Action& a) { return a.micro_batch >= sizes.micro_batches; });
  }
  return orders;
}

namespace {

/// When the two passes of a (chunk, micro-batch) pair end; -1 = not known yet.
class Ends {
 public:
  Ends(const Placement& placement, int micro_batches)
      : last_chunk_(placement.num_chunks() - 1),
        micro_batches_(micro_batches),
        forward_(at(placement.num_chunks() * micro_batches), -1),
        backward_(forward_) {}

  /// When the action's inputs are there, or -1.
  int ready(const Action& a) const {
    if (a.work == Work::forward)
      return a.chunk == 0 ? 0 : forward_[index(a.chunk - 1, a.micro_batch)];
    const int own =
        (a.work == Work::backward_weight ? backward_ : forward_)[index(a.chunk, a.micro_batch)];
    if (a.work == Work::backward_weight || a.chunk == last_chunk_ || own < 0) return own;
    const int later = backward_[index(a.chunk + 1, a.micro_batch)];
    return later < 0 ? -1 : std::max(own, later);
  }
  void set(const Action& a, int end) {
    if (a.work == Work::forward) forward_[index(a.chunk, a.micro_batch)] = end;
    if (a.work == Work::backward || a.work == Work::backward_input)
      backward_[index(a.chunk, a.micro_batch)] = end;
  }

 private:
  std::size_t index(int chunk, int micro_batch) const {
    return at(chunk * micro_batches_ + micro_batch);
  }
  int last_chunk_, micro_batches_;
  std::vector<int> forward_, backward_;
};

int units(Work work) {
  return work == Work::backward ? 2 : 1;
}

int micro_batches_of(const Orders& orders) {
  int n = 0;
  for (const auto& order : orders) {
    for (const Action& a : order)
      n = std::max(n, a.micro_batch + 1);
  }
  return n;
}

}  // namespace

std::vector<std::vector<int>> unit_times(const Orders& orders, const Placement& placement) {
  Ends ends(placement, micro_batches_of(orders));
  std::vector<std::vector<int>> starts(orders.size());
  std::vector<int> free(orders.size(), 0);
  bool is_moving = true;
  while (is_moving) {
    is_moving = false;
    for (std::size_t r = 0; r < orders.size(); ++r) {
      while (starts[r].size() < orders[r].size()) {
        const Action& a = orders[r][starts[r].size()];
        const int ready = ends.ready(a);
        if (ready < 0) break;
        starts[r].push_back(std::max(ready, free[r]));
        free[r] = starts[r].back() + units(a.work);
        ends.set(a, free[r]);
        is_moving = true;
      }
    }
  }
  for (std::size_t r = 0; r < orders.size(); ++r) {
    MOESAIC_CHECK(
        starts[r].size() == orders[r].size(),
        fmt::format(
            "rank {} waits for ever before its {}", r, to_string(orders[r][starts[r].size()])));
  }
  return starts;
}

namespace {

/// A step in the one sequence of all events: at equal times messages come before what they may be needed for.
struct Event {
  int time = 0;
  bool is_work = false;
  int rank = 0;  ///< of the work, or of the sender
  Action action;
  Message send;
  auto key() const { return std::tuple(time, is_work, rank, send.boundary, send.micro_batch); }
};

/// The message that carries the result of `a`, if it has to leave the rank.
bool message_of(const Action& a, const Placement& placement, Message& message) {
  const bool is_forward = a.work == Work::forward;
  if (a.work == Work::backward_weight) return false;
  const int boundary = is_forward ? a.chunk : a.chunk - 1;
  if (boundary < 0 || boundary >= placement.num_chunks() - 1 || !placement.is_crossed(boundary))
    return false;
  message = {.is_send = true,
             .payload = is_forward ? Payload::activation : Payload::gradient,
             .boundary = boundary,
             .micro_batch = a.micro_batch,
             .peer = placement.rank_of(is_forward ? boundary + 1 : boundary)};
  return true;
}

void post(std::vector<Action>& list, const Message& message) {
  if (list.empty() || !list.back().is_exchange())
    list.push_back({.work = Work::exchange, .messages = {}});
  list.back().messages.push_back(message);
}

}  // namespace

std::vector<std::vector<Action>> with_exchanges(const Orders& orders, const Placement& placement) {
  const auto starts = unit_times(orders, placement);
  std::vector<Event> events;
  for (std::size_t r = 0; r < orders.size(); ++r) {
    for (std::size_t i = 0; i < orders[r].size(); ++i) {
      const Action& a = orders[r][i];
      const int rank = static_cast<int>(r);
      events.push_back(
          {.time = starts[r][i], .is_work = true, .rank = rank, .action = a, .send = {}});
      Message message;
      if (message_of(a, placement, message))
        events.push_back({.time = starts[r][i] + units(a.work),
                          .is_work = false,
                          .rank = rank,
                          .action = {},
                          .send = message});
    }
  }
  std::sort(events.begin(), events.end(), [](const Event& a, const Event& b) {
    return a.key() < b.key();
  });
  std::vector<std::vector<Action>> lists(orders.size());
  for (const Event& e : events) {
    if (e.is_work) {
      lists[at(e.rank)].push_back(e.action);
      continue;
    }
    post(lists[at(e.rank)], e.send);
    Message received = e.send;
    received.is_send = false;
    received.peer = e.rank;
    post(lists[at(e.send.peer)], received);
  }
  return lists;
}

}  // namespace moesaic::pipeline
