// Chunks of an exchange whose hop between nodes goes with them: what crosses when, its order, its memory.
#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "tests/comm/forwarding.h"
#include "tests/parallel/dispatch_support.h"

namespace moesaic::test {
namespace {

ExchangeCase chunked(NodeGrid grid, std::int64_t tokens, int chunks) {
  ExchangeCase c;
  c.grid = grid;
  c.experts_per_rank = 4;
  c.choices = 3;
  c.chunks = chunks;
  c.tokens.assign(static_cast<std::size_t>(grid.ranks()), tokens);
  return c;
}

std::vector<ExchangeMethod> fanning_methods() {
  return {ExchangeMethod::inter_first, ExchangeMethod::intra_first_3, ExchangeMethod::hdense};
}

// Bytes that each exchange sends to other nodes, and inside this one.
struct Sent {
  std::int64_t network = 0, node = 0;
};
class Recording final : public Forwarding {
 public:
  Recording(Communicator& inner, NodeGrid grid) : Forwarding(inner), grid_(grid) {}
  void exchange(std::span<const OutgoingMessage> sends,
                std::span<const IncomingMessage> receives,
                Stream& stream) override {
    Sent now;
    for (const OutgoingMessage& m : sends) {
      (grid_.link(rank(), m.peer) == Link::network ? now.network : now.node) +=
          static_cast<std::int64_t>(m.data.bytes());
    }
    calls_.push_back(now);
    inner_.exchange(sends, receives, stream);
  }
  std::vector<Sent> take() { return std::exchange(calls_, {}); }

 private:
  NodeGrid grid_;
  std::vector<Sent> calls_;
};

// An exchange of a rank, call by call, with memory of its own.
struct Calls {
  ExchangeCase c;
  RankTokens tokens;
  ExpertExchange exchange;
  std::int64_t n;
  Field topk, weights, x, memory, rows, topk_rows, weights_rows, count, transit, returned, out;
  ExchangePlan plan;

  Calls(Communicator& comm, const ExchangeCase& of, ExchangeMethod method)
      : c(of),
        tokens(draw_tokens(c)[static_cast<std::size_t>(comm.rank())]),
        exchange(&comm,
                 {.method = method,
                  .grid = c.grid,
                  .experts = c.experts(),
                  .choices = c.choices,
                  .max_tokens = c.max_tokens(),
                  .weights = DType::f64,
                  .buffer_factor = c.buffer_factor,
                  .chunks = c.chunks,
                  .verify = c.verify}),
        n(c.tokens[static_cast<std::size_t>(comm.rank())]),
        topk({n, c.choices}, DType::i32, tokens.topk),
        weights({n, c.choices}, DType::f64, tokens.weights),
        x({n, c.width}, DType::f64, tokens.x),
        memory({exchange.bounds().plan_bytes}, DType::u8),
        rows({exchange.bounds().rows, c.width}, DType::f64),
        topk_rows({exchange.bounds().rows, c.choices}, DType::i32),
        weights_rows({exchange.bounds().rows, c.choices}, DType::f64),
        count({1}, DType::i32),
        transit({exchange.transit_bytes(c.width, DType::f64, c.format)}, DType::u8),
        returned({exchange.bounds().returned_rows, c.width}, DType::f64),
        out({n, c.width}, DType::f64),
        plan(exchange.make_plan(kCpu)) {}

  void make_plan(Backend& b) {
    exchange.begin_plan(
        plan, b, memory, {.topk = topk, .weights = weights, .kept = {}, .place_of_expert = {}});
    exchange.finish_plan(plan, b);
    for (int pass = 0; pass < plan.passes(); ++pass)
      exchange.dispatch_choices(plan, b, pass, topk_rows, weights_rows, count);
  }
  void move_all(Backend& b) {
    const EnteredRows from = exchange.enter(plan, b, transit, x, c.format);
    for (int pass = 0; pass < plan.passes(); ++pass) {
      exchange.dispatch(plan, b, pass, rows, from);
      exchange.combine(plan, b, pass, returned, rows);
    }
    exchange.leave(plan, b, out, returned);
  }
};

// Rows that only fill up those of a dense method may be NaN.
bool same(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](double x, double y) {
    return x == y || (std::isnan(x) && std::isnan(y));
  });
}

void require(bool good, const std::string& what) {
  if (!good) throw std::runtime_error(what);  // a check of Catch works in its own thread only
}

}  // namespace

TEST_CASE("chunks: rows cross between nodes with the chunks that need them, and back") {
  for (const ExchangeMethod method : fanning_methods()) {
    for (const NodeGrid grid : {NodeGrid{2, 2}, NodeGrid{2, 1}, NodeGrid{4, 2}}) {
      const ExchangeCase c = chunked(grid, 64, 8);
      INFO(name(method) << ", " << c.text());
      std::atomic<std::int64_t> went{0}, came_back{0};
      run_local_ranks(grid.ranks(), [&](Communicator& inner) {
        Recording comm(inner, grid);
        Calls calls(comm, c, method);
        BackendOwner owner({.scratch_bytes = 1 << 22, .name = "test"});
        Backend& b = owner.backend();
        calls.make_plan(b);
        const std::int64_t all = calls.exchange.traffic(calls.plan, c.width * 8)
                                     .bytes[static_cast<std::size_t>(Link::network)];
        require(all > 0, "nothing crosses");
        comm.take();
        const EnteredRows from = calls.exchange.enter(calls.plan, b, calls.transit, calls.x);
        std::int64_t early = 0;
        for (const Sent& sent : comm.take())
          early += sent.network;
        require(early == 0, "rows cross before the first chunk");
        std::vector<std::int64_t> there(8), back(8);
        for (int chunk = 0; chunk < 8; ++chunk) {
          calls.exchange.dispatch(calls.plan, b, chunk, calls.rows, from);
          const auto sent = comm.take();
          require(sent.size() == 2, "a chunk takes two hops");
          require(sent[0].node == 0 && sent[1].network == 0, "not across first, then fanned out");
          there[static_cast<std::size_t>(chunk)] = sent[0].network;
        }
        for (int chunk = 0; chunk < 8; ++chunk) {
          calls.exchange.combine(calls.plan, b, chunk, calls.returned, calls.rows);
          const auto sent = comm.take();
          require(sent.size() == 2, "a chunk comes back in two hops");
          require(sent[0].network == 0 && sent[1].node == 0, "not inside first, then across");
          back[static_cast<std::size_t>(chunk)] = sent[1].network;
        }
        calls.exchange.leave(calls.plan, b, calls.out, calls.returned);
        for (const Sent& sent : comm.take())
          require(sent.network == 0, "rows cross behind the last chunk");
        owner.stream().synchronize();
        const auto sum = [](const std::vector<std::int64_t>& list) {
          return std::accumulate(list.begin(), list.end(), std::int64_t{0});
        };
        require(sum(there) == all, "other bytes went than the plan says");
        went += all;
        came_back += sum(back);
        // A node's own rows are there before; the others spread over the chunks that are left.
        require(there[0] == 0, "the first chunk waits for the network");
        const auto largest = [&](const std::vector<std::int64_t>& list) {
          return static_cast<double>(*std::max_element(list.begin(), list.end()));
        };
        const double most = 0.55 * static_cast<double>(all);
        require(largest(there) <= most, "most rows cross with one chunk");
        require(sum(back) > back.back(), "all rows cross back with the last chunk");
      });
      CHECK(came_back == went);
    }
  }
}

TEST_CASE("chunks: on all grids, in fp8, with checksums, to ranks that get nothing") {
  for (const ExchangeMethod method : fanning_methods()) {
    for (const NodeGrid grid : {NodeGrid{1, 3},
                                NodeGrid{2, 1},
                                NodeGrid{3, 1},
                                NodeGrid{2, 3},
                                NodeGrid{3, 2},
                                NodeGrid{4, 2}}) {
      ExchangeCase c = chunked(grid, 11, 4);
      INFO(name(method) << ", " << c.text());
      const auto same_as_whole = [&] {
        ExchangeCase one = c;
        one.chunks = 1;
        const auto whole = run_exchange(one, method, DType::bf16),
                   parts = run_exchange(c, method, DType::bf16, Stream::Mode::worker);
        for (std::size_t r = 0; r < whole.size(); ++r) {
          CHECK(parts[r].passes == c.chunks);
          CHECK(parts[r].result.out == whole[r].result.out);
          CHECK(parts[r].result.dx == whole[r].result.dx);
          CHECK(parts[r].result.dweights == whole[r].result.dweights);
          // The same rows in the same order: no sum over rows depends on chunks.
          CHECK(parts[r].places == whole[r].places);
          CHECK(same(parts[r].first_column, whole[r].first_column));
        }
      };
      same_as_whole();
      c.format = RowFormat::fp8;
      c.verify = true;
      same_as_whole();
      c.tokens.front() = 0;
      c.tokens.back() = 3;
      c.spread = Spread::last_rank;
      c.chunks = 9;  // more than parts
      same_as_whole();
    }
  }
}

TEST_CASE("chunks: a dry stream asks for the memory that any routing needs") {
  for (const ExchangeMethod method : kExchangeMethods) {
    for (const Spread spread : {Spread::even, Spread::last_rank}) {
      for (const RowFormat format : {RowFormat::plain, RowFormat::fp8}) {
        for (const double factor : {0.0, 0.3, 100.0}) {
          if (factor > 0 && is_dense(method)) continue;
          ExchangeCase c = chunked({2, 2}, 16, 3);
          c.tokens[1] = 5;
          c.spread = spread;
          c.format = format;
          c.buffer_factor = factor;
          INFO(name(method) << ", " << name(format) << ", " << c.text());
          run_local_ranks(4, [&](Communicator& comm) {
            Calls calls(comm, c, method);
            const auto all = [&](BackendOwner& owner) {
              calls.make_plan(owner.backend());
              calls.move_all(owner.backend());
              owner.stream().synchronize();
            };
            BackendOwner dry({.mode = Stream::Mode::dry, .name = "dry"});
            all(dry);
            BackendOwner real({.scratch_bytes = dry.scratch().high_water_bytes(), .name = "real"});
            all(real);
          });
        }
      }
    }
  }
}

}  // namespace moesaic::test
