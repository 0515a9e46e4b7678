// Schedules as data: what the generators make, what the validator finds, what the simulation says about both.
#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "core/base/error.h"
#include "parallel/pipeline/grid.h"
#include "parallel/pipeline/orders.h"
#include "parallel/pipeline/schedule.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/validate.h"
#include "tests/support/catch.h"

namespace moesaic::pipeline {
namespace {

constexpr Kind kKinds[] = {
    Kind::gpipe, Kind::one_f_one_b, Kind::interleaved, Kind::zero_bubble, Kind::vertical};

std::string text(Kind kind, const Sizes& s) {
  return std::string(name(kind)) + " stages " + std::to_string(s.stages) + " chunks " +
         std::to_string(s.chunks) + " micro-batches " + std::to_string(s.micro_batches);
}

/// Every legal schedule of up to 8 stages, 4 chunks per rank and 16 micro-batches.
void for_each_schedule(const std::function<void(const Schedule&)>& body) {
  for (const Kind kind : kKinds) {
    for (int p = 1; p <= 8; ++p) {
      for (int v = 1; v <= 4; ++v) {
        for (int m = 1; m <= 16; ++m) {
          const Sizes sizes{p, v, m};
          if (size_problem(kind, sizes).empty()) body(make_schedule(kind, sizes));
        }
      }
    }
  }
}

double unit_makespan(const Schedule& s, Communication c = Communication::overlapped) {
  return simulate(s, Costs::unit(s.placement.num_chunks()), c).makespan;
}

bool contains(const std::string& all, const std::string& part) {
  return all.find(part) != std::string::npos;
}

bool any_contains(const std::vector<std::string>& lines, const std::string& part) {
  return std::any_of(
      lines.begin(), lines.end(), [&](const std::string& line) { return contains(line, part); });
}

std::string joined(const std::vector<std::string>& lines) {
  std::string all;
  for (const std::string& line : lines)
    all += line + "\n";
  return all;
}

/// The place of a rank's action.
std::size_t find(const Schedule& s, int rank, Work work, int chunk, int micro_batch) {
  const auto& list = s.ranks[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i].work == work && list[i].chunk == chunk && list[i].micro_batch == micro_batch)
      return i;
  }
  FAIL("no such action");
  return 0;
}

/// Every exchange cut into its messages.
Schedule one_by_one(Schedule s, bool sends_first = false) {
  for (auto& list : s.ranks) {
    std::vector<Action> cut;
    for (Action& a : list) {
      if (sends_first)
        std::stable_partition(
            a.messages.begin(), a.messages.end(), [](const Message& m) { return m.is_send; });
      if (!a.is_exchange()) cut.push_back(a);
      for (const Message& m : a.messages)
        cut.push_back({.work = Work::exchange, .messages = {m}});
    }
    list = std::move(cut);
  }
  return s;
}

TEST_CASE("pipeline: every legal schedule is valid, and within its bounds of memory") {
  int count = 0;
  for_each_schedule([&](const Schedule& s) {
    ++count;
    INFO(text(s.kind, s.sizes));
    const auto found = problems(s);
    INFO(joined(found));
    REQUIRE(found.empty());
    // Even when no two messages are posted together.
    const auto single = problems(one_by_one(s));
    INFO(joined(single));
    REQUIRE(single.empty());
    const Slots slots = count_slots(s);
    for (int rank = 0; rank < s.sizes.stages; ++rank) {
      const int kept = slots.per_rank[static_cast<std::size_t>(rank)];
      const int all = s.sizes.chunks * s.sizes.micro_batches;
      const int p = s.sizes.stages, v = s.sizes.chunks;
      if (s.kind == Kind::gpipe || s.kind == Kind::vertical) REQUIRE(kept == all);
      if (s.kind == Kind::one_f_one_b) REQUIRE(kept == std::min(all, p - rank));
      if (s.kind == Kind::interleaved)
        REQUIRE(kept <= std::min(all, 2 * (p - 1 - rank) + (v - 1) * p + 1));
      if (s.kind == Kind::zero_bubble) REQUIRE(kept <= std::min(all, p * v));
      for (const int chunk : s.placement.chunks_of(rank))
        REQUIRE(problems(s,
                         {.in_flight = slots.per_chunk[static_cast<std::size_t>(chunk)] +
                                       s.sizes.micro_batches})
                    .empty());
    }
    REQUIRE(problems(
                s, {.in_flight = *std::max_element(slots.per_chunk.begin(), slots.per_chunk.end())})
                .empty());
  });
  REQUIRE(count == 8 * 16 * (4 + 1 + 3 + 2) + 16 * 4);
}

TEST_CASE("pipeline: sizes that a schedule does not have are refused with the nearest valid ones") {
  const auto refused = [](Kind kind, Sizes sizes, const std::string& part) {
    INFO(text(kind, sizes));
    CHECK(contains(size_problem(kind, sizes), part));
    CHECK_THROWS_AS(make_schedule(kind, sizes), UsageError);
  };
  refused(Kind::one_f_one_b, {2, 2, 4}, "not 2. Nearest valid: 1");
  refused(Kind::interleaved, {2, 1, 4}, "Nearest valid: 2");
  refused(Kind::zero_bubble, {2, 3, 4}, "Nearest valid: 2");
  refused(Kind::vertical, {2, 3, 4}, "not of 2. Nearest valid: 1");
  refused(Kind::gpipe, {0, 1, 4}, "at least 1");
  refused(Kind::gpipe, {1, 0, 4}, "at least 1");
  refused(Kind::gpipe, {1, 1, 0}, "at least 1");
  refused(Kind::vertical, {.chunks = 2, .micro_batches = 4, .pieces = 3}, "runs of 3 pieces");
  refused(Kind::vertical, {.chunks = 2, .micro_batches = 4, .together = 3}, "groups of 3");
  refused(Kind::gpipe, {.micro_batches = 4, .pieces = 2}, "only vertical does");
}

TEST_CASE("pipeline: idle time is that of the closed formulas") {
  for_each_schedule([](const Schedule& s) {
    const int p = s.sizes.stages, v = s.sizes.chunks, m = s.sizes.micro_batches;
    INFO(text(s.kind, s.sizes));
    const Simulation run = simulate(s, Costs::unit(s.placement.num_chunks()));
    REQUIRE(run.makespan >= 3 * v * m + p - 1);
    const double bubble = run.bubble_fraction();
    if (s.kind == Kind::one_f_one_b || (s.kind == Kind::gpipe && v == 1)) {
      REQUIRE(bubble == Approx((p - 1.0) / (m + p - 1.0)));
      // Equal costs: sends that wait for their receives cost nothing.
      if (s.kind == Kind::one_f_one_b)
        REQUIRE(unit_makespan(s, Communication::blocking) == run.makespan);
    }
    if (s.kind == Kind::interleaved && m % p == 0)
      REQUIRE(bubble == Approx((p - 1.0) / (v * m + p - 1.0)));
    if (s.kind == Kind::zero_bubble && v == 1) {
      REQUIRE(run.makespan == (m >= p ? 3 * m + p - 1 : 2 * m + 2 * p - 1));
      if (m >= p) REQUIRE(bubble == Approx((p - 1.0) / (3 * m + p - 1.0)));
    }
    // ZB-V: within two units of the bound that no schedule can beat.
    if (s.kind == Kind::zero_bubble && v == 2 && m >= 2 * p)
      REQUIRE(run.makespan <= 6 * m + p - 1 + 2);
  });
}

TEST_CASE("pipeline: zero bubble idles less than 1f1b, and ZB-V less than ZB-H1") {
  for (int p = 2; p <= 8; ++p) {
    for (int m = p; m <= 16; ++m) {
      CAPTURE(p, m);
      const auto bubble = [&](Kind kind, int chunks) {
        const Schedule s = make_schedule(kind, {p, chunks, m});
        return simulate(s, Costs::unit(s.placement.num_chunks())).bubble_fraction();
      };
      CHECK(bubble(Kind::zero_bubble, 1) < bubble(Kind::one_f_one_b, 1));
      CHECK(bubble(Kind::zero_bubble, 2) < bubble(Kind::zero_bubble, 1));
    }
  }
}

TEST_CASE("pipeline: messages take their time") {
  const Schedule s = make_schedule(Kind::one_f_one_b, {2, 1, 1});
  Costs costs = Costs::unit(2);
  costs.message = 10;
  // F, message, F, B, message, B.
  CHECK(simulate(s, costs).makespan == 1 + 10 + 1 + 2 + 10 + 2);
  CHECK(simulate(s, costs, Communication::blocking).makespan == 26);
  costs.backward_weight[1] = 5;
  CHECK(simulate(s, costs).makespan == 30);
  CHECK_THROWS_AS(simulate(s, Costs::unit(3)), InternalError);
}

TEST_CASE(
    "pipeline: uneven chunks; exchanges beside the computing cost no more than blocking ones") {
  for (const Kind kind : kKinds) {
    const int chunks = kind == Kind::one_f_one_b ? 1 : 2;
    const Schedule s = make_schedule(kind, {kind == Kind::vertical ? 1 : 4, chunks, 8});
    Costs costs = Costs::unit(s.placement.num_chunks());
    for (std::size_t c = 0; c < costs.forward.size(); ++c) {
      costs.forward[c] += 0.25 * static_cast<double>(c % 3);
      costs.backward_weight[c] -= 0.125 * static_cast<double>(c % 2);
    }
    costs.message = 0.0625;
    INFO(name(kind));
    CHECK(simulate(s, costs).makespan <= simulate(s, costs, Communication::blocking).makespan);
  }
}

// --- planted faults

TEST_CASE("pipeline: a deadlock is found and names the ranks and actions of its circle") {
  // Textbook 1f1b with separate sends and receives: each rank sends its forward before it receives a gradient, and its
  // gradient before it receives a forward.
  const auto plain = [](int rank, Work work, int m) {
    return Action{.work = work, .chunk = rank, .micro_batch = m, .messages = {}};
  };
  const auto one = [](bool is_send, Payload payload, int m, int peer) {
    return Action{.work = Work::exchange,
                  .messages = {{.is_send = is_send,
                                .payload = payload,
                                .boundary = 0,
                                .micro_batch = m,
                                .peer = peer}}};
  };
  constexpr auto kA = Payload::activation, kG = Payload::gradient;
  Schedule s{.kind = Kind::one_f_one_b,
             .sizes = {2, 1, 2},
             .placement = Placement(Placement::Form::loop, 2, 1),
             .ranks = {}};
  s.ranks = {{plain(0, Work::forward, 0),
              one(true, kA, 0, 1),
              plain(0, Work::forward, 1),
              one(true, kA, 1, 1),
              one(false, kG, 0, 1),
              plain(0, Work::backward, 0),
              one(false, kG, 1, 1),
              plain(0, Work::backward, 1)},
             {one(false, kA, 0, 0),
              plain(1, Work::forward, 0),
              plain(1, Work::backward, 0),
              one(true, kG, 0, 0),
              one(false, kA, 1, 0),
              plain(1, Work::forward, 1),
              plain(1, Work::backward, 1),
              one(true, kG, 1, 0)}};
  const auto found = problems(s);
  INFO(joined(found));
  REQUIRE(found.size() == 1);
  CHECK(
      found[0] ==
      "deadlock: rank 0 waits in action 3 (send activation at boundary 0 of micro-batch 1 to rank "
      "1) for rank 1 to receive it; rank 1 waits in action 3 (send gradient at boundary 0 of "
      "micro-batch 0 to rank 0) for rank 0 to receive it");
  CHECK_THROWS_AS(validate(s), InternalError);
  // Posted together, the same messages pass.
  const auto join = [](std::vector<Action>& list, std::size_t i) {
    list[i].messages.push_back(list[i + 1].messages[0]);
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(i) + 1);
  };
  join(s.ranks[0], 3);
  join(s.ranks[1], 3);
  CHECK(problems(s).empty());
}

TEST_CASE("pipeline: a circle through more ranks; posted together, the same messages pass") {
  // A ring of three ranks with two chunks each: all send to the next and receive from the one before.
  const Schedule s = make_schedule(Kind::gpipe, {3, 2, 3});
  CHECK(problems(s).empty());
  const auto found = problems(one_by_one(s, true));
  INFO(joined(found));
  REQUIRE(found.size() == 1);
  for (const std::string rank : {"0", "1", "2"})
    CHECK(contains(found[0], "rank " + rank + " waits in action "));
  CHECK(contains(found[0], "(send activation at boundary 2 of micro-batch 0 to rank 0)"));
}

/// The problems of a valid schedule after `change`.
std::vector<std::string> after(const std::function<void(Schedule&)>& change,
                               Kind kind = Kind::one_f_one_b,
                               Sizes sizes = {3, 1, 4}) {
  Schedule s = make_schedule(kind, sizes);
  change(s);
  return problems(s);
}

TEST_CASE("pipeline: faults in a rank's list are found") {
  const auto erase = [](Schedule& s, int rank, Work work, int chunk, int m) {
    auto& list = s.ranks[static_cast<std::size_t>(rank)];
    list.erase(list.begin() + static_cast<std::ptrdiff_t>(find(s, rank, work, chunk, m)));
  };
  CHECK(any_contains(after([&](Schedule& s) { erase(s, 1, Work::forward, 1, 2); }),
                     "rank 1: no forward of micro-batch 2 at chunk 1"));
  CHECK(any_contains(after([&](Schedule& s) { erase(s, 2, Work::backward, 2, 0); }),
                     "rank 2: no backward of micro-batch 0 at chunk 2"));
  CHECK(any_contains(after([&](Schedule& s) { s.ranks[0].push_back(s.ranks[0][0]); }),
                     "(forward of micro-batch 0 through chunk 0): a second time"));
  CHECK(any_contains(after([&](Schedule& s) {
                       auto& list = s.ranks[2];
                       std::swap(list[find(s, 2, Work::forward, 2, 0)],
                                 list[find(s, 2, Work::backward, 2, 0)]);
                     }),
                     "before its forward"));
  CHECK(any_contains(after(
                         [&](Schedule& s) {
                           auto& list = s.ranks[0];
                           std::swap(list[find(s, 0, Work::backward_input, 0, 1)],
                                     list[find(s, 0, Work::backward_weight, 0, 1)]);
                         },
                         Kind::zero_bubble),
                     "before its backward-input"));
  CHECK(any_contains(
      after([&](Schedule& s) { erase(s, 1, Work::backward_weight, 1, 3); }, Kind::zero_bubble),
      "rank 1: no backward-weight of micro-batch 3 at chunk 1"));
  CHECK(any_contains(after([](Schedule& s) { s.ranks[0][0].chunk = 1; }),
                     "the chunk is not on this rank"));
  CHECK(any_contains(after([](Schedule& s) { s.ranks[0][0].micro_batch = 4; }),
                     "no such micro-batch"));
  CHECK(any_contains(after([](Schedule& s) { s.ranks.pop_back(); }), "2 lists for 3 ranks"));
  CHECK(any_contains(
      after([](Schedule& s) { s.ranks[0].push_back({.work = Work::exchange, .messages = {}}); }),
      "has no messages"));
}

TEST_CASE("pipeline: faults in messages are found") {
  const auto first_exchange = [](Schedule& s, std::size_t rank) -> std::size_t {
    std::size_t i = 0;
    while (!s.ranks[rank][i].is_exchange())
      ++i;
    return i;
  };
  CHECK(any_contains(after([&](Schedule& s) {
                       s.ranks[1].erase(s.ranks[1].begin() +
                                        static_cast<std::ptrdiff_t>(first_exchange(s, 1)));
                     }),
                     "without the activation at boundary 0"));
  CHECK(any_contains(after([&](Schedule& s) {
                       s.ranks[0].erase(s.ranks[0].begin() +
                                        static_cast<std::ptrdiff_t>(first_exchange(s, 0)));
                     }),
                     "rank 0: no send of the activation of micro-batch 0 at chunk 0"));
  CHECK(any_contains(after([&](Schedule& s) { std::swap(s.ranks[0][0], s.ranks[0][1]); }),
                     "before it is made"));
  CHECK(any_contains(after([&](Schedule& s) { s.ranks[0][1].messages[0].peer = 2; }),
                     "boundary 0 lies between rank 0 and rank 1"));
  CHECK(any_contains(after([&](Schedule& s) { s.ranks[0][1].messages[0].boundary = 2; }),
                     "there is no boundary 2"));
  CHECK(any_contains(
      after([&](Schedule& s) { s.ranks[0][1].messages.push_back(s.ranks[0][1].messages[0]); }),
      "a second time"));
  // Two sends in the other order than their receives: each rank by itself is in order.
  CHECK(any_contains(after([](Schedule& s) {
                       std::vector<Message*> sends;
                       for (Action& a : s.ranks[0]) {
                         for (Message& m : a.messages) {
                           if (m.is_send) sends.push_back(&m);
                         }
                       }
                       // Micro-batches 1 and 0: both are made before the second send.
                       s.ranks[0].erase(s.ranks[0].begin() + 1);
                       auto& list = s.ranks[0];
                       for (std::size_t i = 0; i < list.size(); ++i) {
                         if (!list[i].is_exchange()) continue;
                         Message late = list[i].messages[0];
                         late.micro_batch = 0;
                         list.insert(list.begin() + static_cast<std::ptrdiff_t>(i) + 1,
                                     {.work = Work::exchange, .messages = {late}});
                         break;
                       }
                     }),
                     "message 0 from rank 0 to rank 1: sent is the activation at boundary 0 of "
                     "micro-batch 1, expected the activation at boundary 0 of micro-batch 0"));
}

TEST_CASE("pipeline: a ceiling of micro-batches in flight") {
  const Schedule s = make_schedule(Kind::gpipe, {2, 1, 4});
  const auto found = problems(s, {.in_flight = 3});
  REQUIRE(found.size() == 2);
  CHECK(contains(found[0], "4 micro-batches of the chunk are in flight; allowed: 3"));
  CHECK(problems(s, {.in_flight = 4}).empty());
}

TEST_CASE("pipeline: orders that wait for each other in a circle are an error") {
  const Placement placement(Placement::Form::loop, 2, 1);
  Orders orders = fixed_order(Kind::one_f_one_b, {2, 1, 2});
  std::swap(orders[0][0], orders[0].back());
  CHECK_THROWS_AS(unit_times(orders, placement), InternalError);
}

TEST_CASE("pipeline: placements") {
  const Placement loop(Placement::Form::loop, 3, 2), vee(Placement::Form::vee, 3, 2);
  const auto ranks = [](const Placement& p) {
    std::vector<int> all;
    for (int c = 0; c < p.num_chunks(); ++c)
      all.push_back(p.rank_of(c));
    return all;
  };
  CHECK(ranks(loop) == std::vector<int>{0, 1, 2, 0, 1, 2});
  CHECK(ranks(vee) == std::vector<int>{0, 1, 2, 2, 1, 0});
  CHECK(vee.chunks_of(1) == std::vector<int>{1, 4});
  CHECK_FALSE(vee.is_crossed(2));
  CHECK(loop.is_crossed(2));
  CHECK_FALSE(Placement(Placement::Form::loop, 1, 3).is_crossed(1));
  CHECK_THROWS_AS(loop.rank_of(6), InternalError);
}

// --- what users see

TEST_CASE("pipeline: the grid of 1f1b") {
  CHECK(grid_text(make_schedule(Kind::one_f_one_b, {2, 1, 2})) ==
        "rank 0 F0 F1 .  .  B0 B0 .  B1 B1\n"
        "rank 1 .  F0 B0 B0 F1 B1 B1 .  .\n");
}

TEST_CASE("pipeline: the grids of the vertical order") {
  CHECK(grid_text(make_schedule(Kind::vertical, {1, 2, 2})) ==
        "rank 0 F0a F1a F0b F1b B0b B0b B1b B1b B0a B0a B1a B1a\n");
  const Schedule turning = make_schedule(Kind::vertical, {1, 2, 2, true});
  CHECK(grid_text(turning) == "rank 0 F0a F1a F0b B0b B0b F1b B1b B1b B0a B0a B1a B1a\n");
  CHECK(count_slots(turning).per_chunk == std::vector<int>{2, 1});
}

TEST_CASE("pipeline: pieces of micro-batches come back from the last to the first") {
  const auto grid = [](const Sizes& sizes) {
    return grid_text(make_schedule(Kind::vertical, sizes));
  };
  const Sizes one{.chunks = 2, .micro_batches = 2, .turns_at_end = true, .pieces = 2};
  CHECK(grid(one) == "rank 0 F0a F1a F0b B0b B0b F1b B1b B1b B1a B1a B0a B0a\n");
  // All micro-batches together, or each with its pieces by itself.
  Sizes two{.chunks = 2, .micro_batches = 4, .turns_at_end = false, .pieces = 2};
  CHECK(grid(two) ==
        "rank 0 F0a F1a F2a F3a F0b F1b F2b F3b B1b B1b B0b B0b B3b B3b B2b B2b B1a B1a B0a B0a "
        "B3a B3a B2a B2a\n");
  CHECK(count_slots(make_schedule(Kind::vertical, two)).per_chunk == std::vector<int>{4, 4});
  two.together = 2;
  CHECK(grid(two) ==
        "rank 0 F0a F1a F0b F1b B1b B1b B0b B0b B1a B1a B0a B0a F2a F3a F2b F3b B3b B3b B2b B2b "
        "B3a B3a B2a B2a\n");
  CHECK(count_slots(make_schedule(Kind::vertical, two)).per_chunk == std::vector<int>{2, 2});
}

TEST_CASE("pipeline: the grid of a zero-bubble schedule over two chunks, cut to a width") {
  const Schedule s = make_schedule(Kind::zero_bubble, {2, 2, 4});
  const std::string whole = grid_text(s), cut = grid_text(s, 60);
  INFO(whole);
  INFO(cut);
  CHECK(contains(whole, "rank 0 F0a F1a"));
  CHECK(contains(whole, "W3a"));
  CHECK_FALSE(contains(whole, "left out"));
  CHECK(contains(cut, "…"));
  CHECK(contains(cut, "of 25 columns are left out"));
  CHECK(grid_text(s, 1000) == whole);
}

TEST_CASE("pipeline: CSV holds every action and message") {
  const Schedule s = make_schedule(Kind::zero_bubble, {2, 1, 1});
  const std::string csv = schedule_csv(s, simulate(s, Costs::unit(2)));
  CHECK(csv ==
        "rank,action,start,end,work,chunk,micro_batch,direction,payload,boundary,peer\n"
        "0,0,0,1,forward,0,0,,,,\n"
        "0,1,1,3,exchange,,0,send,activation,0,1\n"
        "0,1,1,3,exchange,,0,receive,gradient,0,1\n"
        "0,2,3,4,backward_input,0,0,,,,\n"
        "0,3,4,5,backward_weight,0,0,,,,\n"
        "1,0,0,1,exchange,,0,receive,activation,0,0\n"
        "1,1,1,2,forward,1,0,,,,\n"
        "1,2,2,3,backward_input,1,0,,,,\n"
        "1,3,3,3,exchange,,0,send,gradient,0,0\n"
        "1,4,3,4,backward_weight,1,0,,,,\n");
}

}  // namespace
}  // namespace moesaic::pipeline
