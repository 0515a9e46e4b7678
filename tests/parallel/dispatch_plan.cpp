// Plans of exchanges without a communicator: the pure function, the counts that every rank derives, volumes.
#include <map>
#include <numeric>
#include <set>

#include "parallel/dispatch/node_grid.h"
#include "parallel/dispatch/plan_state.h"
#include "parallel/dispatch/volumes.h"
#include "tests/parallel/dispatch_support.h"

namespace moesaic::test {
namespace {

const std::vector<NodeGrid> kGrids{
    {1, 1}, {1, 2}, {2, 1}, {3, 1}, {2, 2}, {4, 1}, {1, 4}, {2, 3}, {3, 2}, {4, 2}, {2, 4}, {5, 3}};

ExchangeCase case_of(NodeGrid grid, std::int64_t tokens, std::int64_t choices, double drop = 0.1) {
  ExchangeCase c;
  c.grid = grid;
  c.choices = choices;
  c.experts_per_rank = 3;
  c.drop = drop;
  c.seed = static_cast<std::uint64_t>(grid.nodes * 100 + grid.per_node * 10 + choices);
  for (int r = 0; r < grid.ranks(); ++r)
    c.tokens.push_back(tokens + r % 3);
  return c;
}

std::vector<TokenChoices> drawn(const ExchangeCase& c) {
  return choices_of(c, draw_tokens(c));
}

RoutedPlan routed(const ExchangeCase& c, ExchangeMethod method) {
  return route_tokens(method, c.grid, c.experts_per_rank, drawn(c));
}

BackendOwner& backend_owner() {
  static BackendOwner owner(
      {.mode = Stream::Mode::immediate, .scratch_bytes = 1 << 20, .name = "test"});
  return owner;
}

}  // namespace

TEST_CASE("routed plan: every choice arrives once, where its expert lives") {
  for (const NodeGrid& grid : kGrids) {
    for (const ExchangeMethod method : kExchangeMethods) {
      const ExchangeCase c = case_of(grid, 7, 3);
      INFO(name(method) << ", " << c.text());
      const auto choices = drawn(c);
      const RoutedPlan plan = route_tokens(method, grid, c.experts_per_rank, choices);
      std::set<std::tuple<int, std::int64_t, std::size_t>> seen;
      for (int r = 0; r < grid.ranks(); ++r) {
        std::set<std::pair<int, std::int64_t>> rows;
        for (const RoutedRow& row : plan.hops.back()[static_cast<std::size_t>(r)].received) {
          bool useful = false;
          for (std::size_t j = 0; j < row.places.size(); ++j) {
            if (row.places[j] < 0) continue;
            useful = true;
            REQUIRE(row.places[j] / c.experts_per_rank == r);
            REQUIRE(row.places[j] ==
                    choices[static_cast<std::size_t>(row.source)]
                        .places[static_cast<std::size_t>(row.token * c.choices) + j]);
            REQUIRE(seen.emplace(row.source, row.token, j).second);
          }
          REQUIRE((useful || is_dense(method)));
          const bool first = rows.emplace(row.source, row.token).second;
          REQUIRE((first || method == ExchangeMethod::pair));
        }
      }
      std::size_t wanted = 0;
      for (const TokenChoices& rank : choices)
        wanted += static_cast<std::size_t>(
            std::count_if(rank.places.begin(), rank.places.end(), [](auto p) { return p >= 0; }));
      REQUIRE(seen.size() == wanted);
    }
  }
}

TEST_CASE("routed plan: an example by hand, two nodes of two ranks") {
  // One expert a rank. Rank 0 has two tokens: one for ranks 2 and 3, one for ranks 0 and 3.
  const std::vector<TokenChoices> choices{{2, {2, 3, 3, 0}}, {2, {}}, {2, {}}, {2, {}}};
  const NodeGrid grid{2, 2};
  const auto sends = [&](ExchangeMethod m, std::size_t hop, std::size_t rank) {
    return route_tokens(m, grid, 1, choices).hops[hop][rank].send_rows;
  };
  using Rows = std::vector<std::int64_t>;
  CHECK(sends(ExchangeMethod::flat, 0, 0) == Rows{1, 0, 1, 2});
  CHECK(sends(ExchangeMethod::pair, 0, 0) == Rows{1, 0, 1, 2});
  CHECK(sends(ExchangeMethod::inter_first, 0, 0) == Rows{1, 0, 2, 0});
  CHECK(sends(ExchangeMethod::inter_first, 1, 2) == Rows{0, 0, 1, 2});
  CHECK(sends(ExchangeMethod::inter_first, 1, 0) == Rows{1, 0, 0, 0});
  CHECK(sends(ExchangeMethod::intra_first, 0, 0) == Rows{2, 2, 0, 0});
  CHECK(sends(ExchangeMethod::intra_first, 1, 0) == Rows{1, 0, 1, 0});
  CHECK(sends(ExchangeMethod::intra_first, 1, 1) == Rows{0, 0, 0, 2});
  // Node 1's turn: token 0 leaves through number 1, token 1 through number 0.
  CHECK(sends(ExchangeMethod::intra_first_3, 0, 0) == Rows{1, 1, 0, 0});
  CHECK(sends(ExchangeMethod::intra_first_3, 1, 0) == Rows{1, 0, 1, 0});
  CHECK(sends(ExchangeMethod::intra_first_3, 1, 1) == Rows{0, 0, 0, 1});
  CHECK(sends(ExchangeMethod::intra_first_3, 2, 3) == Rows{0, 0, 1, 1});
  CHECK(sends(ExchangeMethod::dense, 0, 0) == Rows{2, 2, 2, 2});
  CHECK(sends(ExchangeMethod::hdense, 1, 2) == Rows{0, 0, 2, 2});
  const Traffic t =
      route_tokens(ExchangeMethod::inter_first, grid, 1, choices).sent_by(0, grid, 10);
  CHECK(t.rows == std::array<std::int64_t, 3>{2, 0, 2});
  CHECK(t.bytes == std::array<std::int64_t, 3>{20, 0, 20});
}

TEST_CASE("counts of all ranks give the rows of every hop") {
  Backend& backend = backend_owner().backend();
  for (const NodeGrid& grid : kGrids) {
    for (const ExchangeMethod method : kExchangeMethods) {
      if (is_dense(method)) continue;
      for (const std::int64_t k : {1, 4}) {
        const ExchangeCase c = case_of(grid, 9, k);
        INFO(name(method) << ", " << c.text());
        const auto choices = drawn(c);
        const std::int64_t n = num_counts(method, grid);
        const int runs = token_runs(method, grid);
        const Field counts({grid.ranks(), n}, DType::i32);
        for (int r = 0; r < grid.ranks(); ++r) {
          const auto& own = choices[static_cast<std::size_t>(r)];
          const Field places({own.tokens(), k}, DType::i32, own.places);
          const TensorView all = counts.view().rows(r, r + 1).reshaped({runs, n / runs});
          for (int i = 0; i < runs; ++i) {
            run(backend,
                ExchangeCounts{
                    .counts = all.rows(i, i + 1).reshaped({n / runs}),
                    .places = places.view().rows(run_begin(method, grid, own.tokens(), i),
                                                 run_begin(method, grid, own.tokens(), i + 1)),
                    .grid = grid.places(r, c.experts_per_rank),
                    .hops = hops_of(method),
                    .per_choice = method == ExchangeMethod::pair});
          }
        }
        const HopTable table = hop_table(
            method,
            grid,
            {counts.view().as<std::int32_t>(), static_cast<std::size_t>(n * grid.ranks())});
        const RoutedPlan plan = routed(c, method);
        for (std::size_t hop = 0; hop < plan.hops.size(); ++hop) {
          for (int from = 0; from < grid.ranks(); ++from) {
            const auto& sent = plan.hops[hop][static_cast<std::size_t>(from)].send_rows;
            for (int to = 0; to < grid.ranks(); ++to)
              REQUIRE(table.at(hop, from, to) == sent[static_cast<std::size_t>(to)]);
          }
        }
        for (int r = 0; r < grid.ranks(); ++r) {
          std::int64_t copies = 0;
          for (const TokenChoices& rank : choices) {
            for (const std::int32_t p : rank.places)
              copies += p >= 0 && p / c.experts_per_rank == r ? 1 : 0;
          }
          REQUIRE(table.copies[static_cast<std::size_t>(r)] == copies);
        }
      }
    }
  }
}

TEST_CASE("no routing brings more rows than the bounds say") {
  for (const NodeGrid& grid : kGrids) {
    for (const ExchangeMethod method : kExchangeMethods) {
      for (const Spread spread :
           {Spread::even, Spread::last_rank, Spread::own_rank, Spread::one_expert}) {
        ExchangeCase c = case_of(grid, 6, 4, 0);
        c.spread = spread;
        INFO(name(method) << ", " << c.text());
        const RoutedPlan plan = routed(c, method);
        for (std::size_t hop = 0; hop < plan.hops.size(); ++hop) {
          const auto h = static_cast<int>(hop);
          const std::int64_t rows = most_rows(method, grid, c.max_tokens(), c.choices, h + 1),
                             items = most_items(method, grid, c.max_tokens(), c.choices, h);
          for (const RoutedHop& one : plan.hops[hop]) {
            REQUIRE(static_cast<std::int64_t>(one.received.size()) <= rows);
            REQUIRE(static_cast<std::int64_t>(one.src.size()) <= items);
          }
        }
      }
    }
  }
}

TEST_CASE(
    "passes: no more rows or choices at a rank than its buffers hold, and no more passes than "
    "needed") {
  HopTable table;
  table.ranks = 2;
  table.rows = {{3, 50, 7, 11}};  // to rank 0: 3 + 7, to rank 1: 50 + 11
  table.copies = {12, 70};
  CHECK(passes_for(table, 61, 1000, 4, 1) == 1);
  CHECK(passes_for(table, 61, 1000, 4, 3) == 3);
  CHECK(passes_for(table, 60, 1000, 4, 1) == 2);
  CHECK(passes_for(table, 61, 69, 4, 1) == 4);  // 17 rows of 4 choices at most
  CHECK(passes_for(table, 2, 1000, 4, 1) == 31);
  PlanHop hop;  // of rank 0
  hop.sent_to = {10, 61};
  hop.received = 10;
  hop.send_rows = {3, 50};
  // Rank 1 begins with its own rows.
  hop.sends = {{.peer = 0, .rows = 3, .earlier = 0, .first = 0, .home = 100},
               {.peer = 1, .rows = 50, .earlier = 11, .first = 3, .home = 103}};
  hop.receives = {{.peer = 0, .rows = 3, .earlier = 0}, {.peer = 1, .rows = 7, .earlier = 3}};
  std::vector<std::int64_t> sent(2, 0), starts{0, 3};
  std::vector<std::vector<std::int64_t>> came;
  for (int pass = 0; pass < 4; ++pass) {
    const Transfer p = pass_of(hop, pass, 4);
    for (const RowRun& run : p.sends) {
      const auto to = static_cast<std::size_t>(run.peer);
      CHECK(run.first == starts[to] + sent[to]);
      CHECK(run.home == 100 + run.first);
      sent[to] += run.rows;
    }
    std::vector<std::int64_t> now(2, 0);
    std::int64_t landed = 0;
    for (const RowRun& run : p.receives) {
      CHECK(run.first == landed);
      landed += now[static_cast<std::size_t>(run.peer)] = run.rows;
    }
    CHECK(p.received() == landed);
    came.push_back(now);
    const Transfer back = p.reversed();
    REQUIRE(back.receives.size() == p.sends.size());
    CHECK(back.sends.size() == p.receives.size());
    for (std::size_t i = 0; i < p.sends.size(); ++i)
      CHECK(back.receives[i].first == p.sends[i].home);
  }
  // The next rows in their order, first those of this rank.
  CHECK(came == std::vector<std::vector<std::int64_t>>{{2, 0}, {1, 2}, {0, 2}, {0, 3}});
  CHECK(sent == hop.send_rows);
}

TEST_CASE("expected rows are those of even routing") {
  for (const NodeGrid& grid :
       {NodeGrid{1, 4}, NodeGrid{4, 2}, NodeGrid{2, 4}, NodeGrid{3, 3}, NodeGrid{6, 2}}) {
    ExchangeCase c;
    c.grid = grid;
    c.choices = 4;
    c.experts_per_rank = 4;
    c.tokens.assign(static_cast<std::size_t>(grid.ranks()), 600);
    c.seed = 5;
    const auto choices = drawn(c);
    for (const ExchangeMethod method : kExchangeMethods) {
      INFO(name(method) << ", " << c.text());
      const RoutedPlan plan = route_tokens(method, grid, c.experts_per_rank, choices);
      Traffic sum;
      for (int r = 0; r < grid.ranks(); ++r)
        sum += plan.sent_by(r, grid, 1);
      const ExpectedRows want = expected_rows(method, grid, c.experts(), c.choices);
      for (const Link link : kLinks) {
        const double rows =
            static_cast<double>(sum.rows[static_cast<std::size_t>(link)]) / (600.0 * grid.ranks());
        CHECK(rows == Approx(want.of(link)).epsilon(0.03).margin(1e-9));
      }
    }
  }
  // Published figures: 896 experts, top 16.
  CHECK(expected_groups(64, 896, 16) == Approx(14.36).epsilon(1e-3));
  CHECK(expected_groups(8, 896, 16) == Approx(7.07).epsilon(1e-3));
  CHECK(expected_rows(ExchangeMethod::flat, {8, 8}, 896, 16).network == Approx(12.6).epsilon(5e-3));
  CHECK(expected_rows(ExchangeMethod::inter_first, {8, 8}, 896, 16).network ==
        Approx(6.19).epsilon(1e-3));
  CHECK(expected_rows(ExchangeMethod::pair, {4, 2}, 64, 16).network == Approx(12.0));
}

TEST_CASE("the method that is chosen follows the speeds of the links") {
  const auto chosen = [](NodeGrid grid, std::int64_t k, const LinkSpeeds& speeds) {
    return choose_method(grid, 896, k, 4096, 7168, speeds).method;
  };
  const LinkSpeeds slow_network{.node = 300e9, .network = 25e9};
  const LinkSpeeds even{.node = 25e9, .network = 25e9};
  CHECK(chosen({1, 2}, 16, slow_network) == ExchangeMethod::dense);
  CHECK(chosen({1, 8}, 4, slow_network) == ExchangeMethod::flat);
  CHECK(chosen({8, 8}, 16, slow_network) == ExchangeMethod::inter_first);
  CHECK(chosen({4, 2}, 4, even) == ExchangeMethod::flat);
  CHECK(chosen({8, 1}, 16, slow_network) != ExchangeMethod::inter_first);
  const auto choice = choose_method({8, 8}, 896, 16, 4096, 7168, slow_network);
  INFO(choice.reason);
  CHECK(choice.reason.find(
            "inter_first for 8 nodes of 8: 6.19 rows a token between nodes at 25 GB/s") == 0);
  CHECK(choice.reason.find("flat ") != std::string::npos);
}

TEST_CASE("nodes are runs of equal hosts, or posed") {
  const auto found = [](const std::vector<std::string>& hosts) { return grid_of_hosts(hosts); };
  CHECK(found({"a", "a", "b", "b"}).grid == NodeGrid{2, 2});
  CHECK(found({"a", "a", "b", "b"}).reason == "2 hosts");
  CHECK(found({"a"}).grid == NodeGrid{1, 1});
  CHECK(found({"a", "a", "a"}).grid == NodeGrid{1, 3});
  CHECK(found({"a", "b", "c"}).grid == NodeGrid{3, 1});
  CHECK(found({"a", "a", "b"}).grid == NodeGrid{3, 1});
  CHECK(found({"a", "a", "b"}).reason ==
        "b has 1 ranks, the first node 2: every rank is a node of its own");
  CHECK(found({"a", "b", "a", "b"}).grid == NodeGrid{4, 1});
  CHECK(found({"a", "b", "a", "b"}).reason ==
        "ranks of a do not follow each other: every rank is a node of its own");
  CHECK(find_node_grid(nullptr, 0, "a").grid == NodeGrid{1, 1});
  CHECK_THROWS_WITH(find_node_grid(nullptr, 2, "a"), "1 ranks are not nodes of 2; possible: 1");
  run_local_ranks(4, [](Communicator& comm) {
    const std::string host = comm.rank() < 2 ? "a" : "b";
    if (find_node_grid(&comm, 0, host).grid != NodeGrid{2, 2} ||
        find_node_grid(&comm, 4, host).grid != NodeGrid{1, 4})
      throw std::runtime_error("another grid");
  });
}

TEST_CASE("methods by name") {
  for (const ExchangeMethod m : kExchangeMethods)
    CHECK(exchange_method_from_name(name(m)) == m);
  CHECK_THROWS_WITH(exchange_method_from_name("fast"),
                    "no exchange method 'fast'; there are pair, flat, inter_first, intra_first, "
                    "intra_first_3, dense, hdense");
}

}  // namespace moesaic::test
