// The exchange of tokens between ranks against brute force: forward, backward, what arrives and what is counted.
#include <chrono>
#include <thread>

#include "kernels/ops/quant.h"
#include "tests/comm/forwarding.h"
#include "tests/parallel/dispatch_support.h"

namespace moesaic::test {
namespace {

double distance(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return INFINITY;
  double largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double d = std::abs(got[i] - want[i]);
    largest = std::isnan(d) ? INFINITY : std::max(largest, d / (1 + std::abs(want[i])));
  }
  return largest;
}

// x as it arrives in fp8.
void round_to_fp8(const ExchangeCase& c, RankTokens& rank) {
  const std::int64_t n = static_cast<std::int64_t>(rank.x.size()) / c.width;
  const Field x({n, c.width}, DType::f64, rank.x), y({n, c.width}, DType::f64),
      codes({n, c.width}, DType::u8), scales({n, (c.width + 127) / 128}, DType::f64);
  BackendOwner owner({.mode = Stream::Mode::immediate, .scratch_bytes = 4096, .name = "rounding"});
  run(owner.backend(), QuantizeFp8Block{.scales = scales, .codes = codes, .dequant = y, .x = x});
  owner.stream().synchronize();
  rank.x = y.values();
}

// Rows, bytes and order are those of the pure plan; results those of brute force.
void check(const ExchangeCase& c, ExchangeMethod method, DType compute = DType::f64) {
  INFO(name(method) << ", " << name(compute) << ", " << c.text());
  auto tokens = draw_tokens(c);
  const auto choices = choices_of(c, tokens);
  const auto runs = run_exchange(c, method, compute);
  for (RankTokens& rank : tokens) {
    if (c.format == RowFormat::fp8) round_to_fp8(c, rank);
  }
  // Dense methods move as many rows from every rank.
  auto padded = choices;
  for (TokenChoices& rank : padded) {
    if (is_dense(method))
      rank.places.resize(static_cast<std::size_t>(c.max_tokens() * c.choices), -1);
  }
  const RoutedPlan plan = route_tokens(method, c.grid, c.experts_per_rank + c.replicas, padded);
  const double limit = compute == DType::f64 ? 1e-13 : compute == DType::f32 ? 1e-5 : 0.06;
  for (std::size_t r = 0; r < runs.size(); ++r) {
    INFO("rank " << r);
    const RankRun& run = runs[r];
    const LayerResult want = brute_force(c, tokens[r], choices[r]);
    CHECK(distance(run.result.out, want.out) < limit);
    CHECK(distance(run.result.dx, want.dx) < limit);
    CHECK(distance(run.result.dweights, want.dweights) < limit);
    CHECK(run.passes >= std::max(c.passes, c.chunks));
    CHECK(run.statistics.further_passes == run.passes - c.chunks);
    CHECK(run.traffic == plan.sent_by(static_cast<int>(r), c.grid, 1));
    std::vector<std::int64_t> expert_rows;
    if (c.count_experts && !is_dense(method)) {
      expert_rows.assign(static_cast<std::size_t>(c.experts_per_rank), 0);
      for (const TokenChoices& rank : choices) {
        for (const std::int32_t place : rank.places) {
          if (place >= 0 && place / c.experts_per_rank == static_cast<int>(r))
            ++expert_rows[static_cast<std::size_t>(place % c.experts_per_rank)];
        }
      }
    }
    CHECK(run.expert_rows == expert_rows);
    // In any number of passes.
    const auto& rows = plan.hops.back()[r].received;
    REQUIRE(run.places.size() == rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (std::size_t j = 0; j < rows[i].places.size(); ++j) {
        const std::int32_t place = rows[i].places[j];
        REQUIRE(run.places[i][j] == (place < 0 ? -1 : place % (c.experts_per_rank + c.replicas)));
      }
      const RankTokens& source = tokens[static_cast<std::size_t>(rows[i].source)];
      const auto at = static_cast<std::size_t>(rows[i].token * c.width);
      if (compute == DType::f64 && at < source.x.size())
        REQUIRE(run.first_column[i] == source.x[at]);
    }
  }
}

void check_all(const ExchangeCase& c) {
  for (const ExchangeMethod method : kExchangeMethods)
    check(c, method);
}

ExchangeCase even_case(NodeGrid grid, std::int64_t tokens, std::int64_t choices) {
  ExchangeCase c;
  c.grid = grid;
  c.choices = choices;
  c.tokens.assign(static_cast<std::size_t>(grid.ranks()), tokens);
  return c;
}

}  // namespace

TEST_CASE("exchange: every method, grids of up to eight ranks") {
  for (const NodeGrid& grid : {NodeGrid{1, 1},
                               NodeGrid{1, 2},
                               NodeGrid{2, 1},
                               NodeGrid{3, 1},
                               NodeGrid{2, 2},
                               NodeGrid{1, 4},
                               NodeGrid{3, 2},
                               NodeGrid{2, 3},
                               NodeGrid{4, 2},
                               NodeGrid{2, 4}})
    check_all(even_case(grid, 6, 3));
}

TEST_CASE("exchange: ranks with other numbers of tokens, some with none") {
  ExchangeCase c = even_case({2, 2}, 0, 2);
  c.tokens = {5, 0, 9, 1};
  check_all(c);
  c.tokens = {0, 0, 0, 7};
  check_all(c);
  c.tokens = {0, 0, 0, 0};
  check_all(c);
  ExchangeCase wide = even_case({3, 2}, 0, 4);
  wide.tokens = {0, 3, 8, 0, 1, 2};
  check_all(wide);
}

TEST_CASE("exchange: tokens of experts with copies inside their node, every method") {
  for (const NodeGrid& grid : {NodeGrid{1, 2}, NodeGrid{2, 2}, NodeGrid{1, 4}, NodeGrid{2, 3}}) {
    for (const std::int32_t replicas : {1, 2}) {
      ExchangeCase c = even_case(grid, 40, 3);
      c.experts_per_rank = 3;
      c.replicas = replicas;
      c.permuted = replicas == 2;
      c.spread = Spread::skewed;
      c.drop = 0.1;
      REQUIRE(copies_of(c).num_copies() > 0);
      check_all(c);
      // Small buffers, chunks, ranks with other numbers of tokens.
      c.tokens[0] = 7;
      c.buffer_factor = 0.4;
      c.chunks = 2;
      check_all(c);
    }
  }
  // Nodes of one rank have nowhere to put a copy: empty slots.
  ExchangeCase alone = even_case({3, 1}, 9, 2);
  alone.replicas = 2;
  CHECK(copies_of(alone).num_copies() == 0);
  check_all(alone);
}

TEST_CASE("exchange: skewed, to one expert, to one rank, to its own rank") {
  for (const Spread spread :
       {Spread::skewed, Spread::one_expert, Spread::own_rank, Spread::last_rank}) {
    ExchangeCase c = even_case({2, 2}, 8, 2);
    c.spread = spread;
    c.experts_per_rank = 3;
    check_all(c);
  }
}

TEST_CASE("exchange: dropped choices, the same expert twice, experts at other places") {
  ExchangeCase c = even_case({2, 2}, 8, 4);
  c.experts_per_rank = 3;
  c.drop = 0.5;
  check_all(c);
  c.drop = 1;
  check_all(c);
  c.drop = 0;
  c.different = false;
  c.spread = Spread::skewed;
  check_all(c);
  c.permuted = true;
  c.drop = 0.2;
  check_all(c);
}

TEST_CASE("exchange: a plan knows the rows of every expert, if it is asked to") {
  for (const NodeGrid& grid : {NodeGrid{1, 1}, NodeGrid{1, 3}, NodeGrid{2, 2}, NodeGrid{3, 2}}) {
    ExchangeCase c = even_case(grid, 7, 3);
    c.experts_per_rank = 3;
    c.count_experts = true;
    c.drop = 0.3;
    c.permuted = true;
    check_all(c);
    c.tokens.front() = 0;
    c.verify = true;
    c.spread = Spread::skewed;
    check_all(c);
    c.verify = false;
    c.chunks = 2;
    c.buffer_factor = 0.4;
    check(c, ExchangeMethod::flat);
    check(c, ExchangeMethod::intra_first);
  }
}

TEST_CASE("exchange: one choice up to sixteen, one expert a rank") {
  for (const std::int64_t k : {1, 2, 7, 16}) {
    ExchangeCase c = even_case({2, 2}, 4, k);
    c.experts_per_rank = 8;
    check_all(c);
  }
  ExchangeCase single = even_case({2, 3}, 5, 3);
  single.experts_per_rank = 1;
  check_all(single);
}

TEST_CASE("exchange: further passes where the buffers are too small, or were asked for") {
  for (const ExchangeMethod method : kExchangeMethods) {
    ExchangeCase c = even_case({2, 2}, 12, 3);
    c.experts_per_rank = 4;
    c.passes = 3;
    check(c, method);
    if (is_dense(method)) continue;
    c.passes = 1;
    c.buffer_factor = 0.5;
    check(c, method);
    c.spread = Spread::last_rank;  // everything to one rank
    c.buffer_factor = 1.1;
    check(c, method);
    const auto runs = run_exchange(c, method);
    INFO(name(method));
    CHECK(runs[0].passes > 1);
    CHECK(runs[0].statistics.further_passes == runs[0].passes - 1);
    // Rows of forward, its repetition, and of the gradients.
    CHECK(runs[3].passes == runs[0].passes);
  }
}

TEST_CASE("exchange: in chunks, each with its part of the memory") {
  for (const ExchangeMethod method : kExchangeMethods) {
    for (const int chunks : {2, 3, 7}) {
      ExchangeCase c = even_case({2, 2}, 12, 3);
      c.experts_per_rank = 4;
      c.chunks = chunks;
      check(c, method);
      CHECK(run_exchange(c, method)[0].passes == chunks);
      // Ranks that get nothing, or less than a row a chunk, meet the others in every chunk.
      c.spread = Spread::last_rank;
      check(c, method);
      CHECK(run_exchange(c, method)[0].passes == chunks);
      c.spread = Spread::even;
      c.tokens = {1, 0, 9, 2};
      check(c, method);
      if (is_dense(method)) continue;
      for (const double factor : {0.3, 1.1, 100.0}) {
        c.buffer_factor = factor;
        check(c, method);
      }
    }
    const auto bounds = [&](int chunks, double factor) {
      return ExpertExchange(nullptr,
                            {.method = method,
                             .grid = {2, 2},
                             .experts = 16,
                             .choices = 3,
                             .max_tokens = 120,
                             .buffer_factor = factor,
                             .chunks = chunks})
          .bounds();
    };
    const ExchangeBounds whole = bounds(1, 0), parts = bounds(4, 0);
    CHECK(4 * parts.rows == whole.rows);
    CHECK(4 * parts.copies == whole.copies);
    // What crosses back between nodes with every chunk is gathered beside it.
    CHECK(parts.returned_rows - whole.returned_rows ==
          (fans_out(method) ? most_items(method, {2, 2}, 120, 3, hops_of(method).size - 2) : 0));
    if (is_dense(method)) continue;
    const ExchangeBounds small = bounds(1, 1.25), small_parts = bounds(4, 1.25);
    CHECK(small_parts.rows == (small.rows + 3) / 4);
    CHECK(small_parts.copies <= small.copies);
  }
}

TEST_CASE("exchange: fp8 rows are quantised once, whatever way they take") {
  for (const ExchangeMethod method : kExchangeMethods) {
    ExchangeCase c = even_case({2, 2}, 0, 3);
    c.tokens = {7, 0, 9, 3};
    c.experts_per_rank = 4;
    c.width = 131;  // two blocks, one of them ragged
    c.format = RowFormat::fp8;
    check(c, method);
    c.passes = 3;
    check(c, method);
    ExchangeCase three = even_case({3, 2}, 5, 2);
    three.format = RowFormat::fp8;
    check(three, method);
  }
}

TEST_CASE("exchange: fp8 rows take their share of the bytes") {
  for (const ExchangeMethod method : kExchangeMethods) {
    INFO(name(method));
    ExchangeCase c = even_case({2, 2}, 6, 3);
    c.width = 256;
    Traffic there, plain, fp8;
    for (const RankRun& run : run_exchange(c, method)) {
      there += run.traffic;
      plain += run.statistics.rows;
    }
    c.format = RowFormat::fp8;
    for (const RankRun& run : run_exchange(c, method))
      fp8 += run.statistics.rows;
    for (std::size_t link = 0; link < 3;
         ++link)  // of f64 rows: 256 codes and 2 scales for 256 elements
      CHECK(plain.bytes[link] - fp8.bytes[link] == there.rows[link] * (256 * 8 - (256 + 2 * 8)));
  }
}

namespace {
// Passes everything on, and turns over one bit of the first message that comes in its `fault`-th exchange, or (fault -1) of the
// counts of rank 0.
class DamagingCommunicator final : public Forwarding {
 public:
  DamagingCommunicator(Communicator& inner, int fault)
      : Forwarding(inner), left_(std::max(0, fault)), damages_counts_(fault < 0) {}
  void exchange(std::span<const OutgoingMessage> sends,
                std::span<const IncomingMessage> receives,
                Stream& stream) override {
    inner_.exchange(sends, receives, stream);
    if (receives.empty() || --left_ != 0) return;
    stream.enqueue([to = receives.front().data] { to.data()[to.bytes() - 1] ^= std::byte{4}; });
  }
  void all_gather(TensorView out, ConstTensorView in, Stream& stream) override {
    inner_.all_gather(out, in, stream);
    if (!std::exchange(damages_counts_, false)) return;
    stream.enqueue([out] { out.data()[0] ^= std::byte{4}; });
  }

 private:
  int left_;
  bool damages_counts_;
};
}  // namespace

TEST_CASE("exchange: with checksums a damaged message is found, an undamaged one passes") {
  for (const ExchangeMethod method : kExchangeMethods) {
    ExchangeCase c = even_case({2, 2}, 6, 3);
    c.verify = true;
    check(c, method);
    const auto tokens = draw_tokens(c);
    for (const int fault : {-1, 1, 2, 4}) {
      if (fault < 0 && is_dense(method)) continue;
      INFO(name(method) << ", exchange " << fault);
      std::string message = "nothing was found";
      try {
        run_local_ranks(4, [&](Communicator& comm) {
          DamagingCommunicator damaging(comm, comm.rank() == 2 ? fault : 0);
          ExchangeRun run(&damaging, c, method, DType::f64, Stream::Mode::worker);
          run.run(tokens[static_cast<std::size_t>(comm.rank())]);
        });
      } catch (const InternalError& e) {
        message = e.what();
      }
      INFO(message);
      CHECK(message.find("layer 7, ") == 0);
      CHECK(message.find(", hop ") != std::string::npos);
      CHECK(message.find("to rank 2") != std::string::npos);
      CHECK(message.find("arrived damaged") != std::string::npos);
    }
  }
}

TEST_CASE("exchange: passes change no bit, nor does repetition or the mode of the stream") {
  for (const ExchangeMethod method : kExchangeMethods) {
    INFO(name(method));
    ExchangeCase c = even_case({2, 2}, 10, 4);
    c.experts_per_rank = 3;
    for (const DType compute : {DType::f32, DType::bf16}) {
      check(c, method, compute);
      const auto first = run_exchange(c, method, compute);
      const auto again = run_exchange(c, method, compute, Stream::Mode::worker);
      ExchangeCase parts = c;
      parts.passes = 2;
      const auto in_parts = run_exchange(parts, method, compute);
      parts.chunks = 4;
      const auto in_chunks = run_exchange(parts, method, compute);
      for (std::size_t r = 0; r < first.size(); ++r) {
        for (const auto* other : {&again, &in_parts, &in_chunks}) {
          CHECK(first[r].result.out == (*other)[r].result.out);
          CHECK(first[r].result.dx == (*other)[r].result.dx);
          CHECK(first[r].result.dweights == (*other)[r].result.dweights);
        }
      }
    }
  }
}

TEST_CASE("exchange: counted bytes are those of the plan") {
  for (const ExchangeMethod method : kExchangeMethods) {
    INFO(name(method));
    ExchangeCase c = even_case({2, 2}, 10, 4);
    Traffic there, all;
    for (const RankRun& run : run_exchange(c, method)) {
      CHECK(run.statistics.plans == 1);
      CHECK(run.statistics.choices.rows == run.traffic.rows);
      there += run.traffic;
      all += run.statistics.rows;
      const std::int64_t choice_bytes = c.choices * (4 + 8);
      for (std::size_t link = 0; link < 3; ++link)
        CHECK(run.statistics.choices.bytes[link] == run.traffic.rows[link] * choice_bytes);
    }
    // x, dout, out and dx have rows of `width`, dweights of `choices` elements of 8 bytes. Over all ranks as many rows come
    // back by each link as went out.
    for (std::size_t link = 0; link < 3; ++link) {
      CHECK(there.rows[link] > 0);
      CHECK(all.rows[link] == 5 * there.rows[link]);
      CHECK(all.bytes[link] == there.rows[link] * 8 * (4 * c.width + c.choices));
    }
  }
}

TEST_CASE("exchange: seeded random cases") {
  Draw draw(2024);
  const std::vector<NodeGrid> grids{
      {1, 2}, {2, 1}, {1, 3}, {2, 2}, {4, 1}, {2, 3}, {3, 2}, {2, 4}, {4, 2}};
  for (int i = 0; i < 210; ++i) {
    ExchangeCase c;
    c.grid = grids[static_cast<std::size_t>(draw.below(static_cast<std::int64_t>(grids.size())))];
    c.experts_per_rank = static_cast<std::int32_t>(1 + draw.below(5));
    c.choices = 1 + draw.below(std::min<std::int64_t>(8, c.experts()));
    c.width = 1 + draw.below(6);
    for (int r = 0; r < c.grid.ranks(); ++r)
      c.tokens.push_back(draw.below(9));
    c.spread = static_cast<Spread>(draw.below(5));
    c.drop = draw() < 0.5 ? 0 : draw();
    c.different = draw() < 0.7;
    c.permuted = c.experts() % 7 != 0 && draw() < 0.3;
    c.seed = 100 + static_cast<std::uint64_t>(i);
    const ExchangeMethod method =
        kExchangeMethods[static_cast<std::size_t>(i) % kExchangeMethods.size()];
    if (!is_dense(method) && draw() < 0.3) c.buffer_factor = 0.3 + 2 * draw();
    if (draw() < 0.3) c.passes = static_cast<int>(1 + draw.below(3));
    if (draw() < 0.2) c.format = RowFormat::fp8;
    if (draw() < 0.3) c.chunks = static_cast<int>(1 + draw.below(5));
    check(c, method);
  }
}

TEST_CASE("exchange: a dry stream asks for the memory that any routing needs") {
  for (const ExchangeMethod method : kExchangeMethods) {
    for (const Spread spread : {Spread::even, Spread::last_rank}) {
      ExchangeCase c = even_case({2, 2}, 8, 4);
      c.spread = spread;
      INFO(name(method) << ", " << c.text());
      run_local_ranks(4, [&](Communicator& comm) {
        ExpertExchange exchange(&comm,
                                {.method = method,
                                 .grid = c.grid,
                                 .experts = c.experts(),
                                 .choices = 4,
                                 .max_tokens = 8,
                                 .weights = DType::f64});
        const auto& bounds = exchange.bounds();
        const auto tokens = draw_tokens(c)[static_cast<std::size_t>(comm.rank())];
        const Field topk({8, 4}, DType::i32, tokens.topk),
            weights({8, 4}, DType::f64, tokens.weights), x({8, c.width}, DType::f64, tokens.x),
            memory({bounds.plan_bytes}, DType::u8), rows({bounds.rows, c.width}, DType::f64),
            topk_rows({bounds.rows, 4}, DType::i32), weights_rows({bounds.rows, 4}, DType::f64),
            count({1}, DType::i32), out({8, c.width}, DType::f64);
        ExchangePlan plan = exchange.make_plan(kCpu);
        const auto step = [&](BackendOwner& owner) {
          Backend& b = owner.backend();
          exchange.begin_plan(
              plan,
              b,
              memory,
              {.topk = topk, .weights = weights, .kept = {}, .place_of_expert = {}});
          exchange.finish_plan(plan, b);
          exchange.dispatch_choices(plan, b, 0, topk_rows, weights_rows, count);
          exchange.dispatch(plan, b, rows, x);
          exchange.combine(plan, b, out, rows);
        };
        BackendOwner dry({.mode = Stream::Mode::dry, .name = "dry"});
        step(dry);
        BackendOwner real({.scratch_bytes = dry.scratch().high_water_bytes(), .name = "real"});
        step(real);
        real.stream().synchronize();
        if (real.scratch().high_water_bytes() > dry.scratch().high_water_bytes())
          throw std::runtime_error("a dry run takes less");
      });
    }
  }
}

TEST_CASE("exchange: the host waits once for a plan, and never in the dense methods") {
  for (const ExchangeMethod method : kExchangeMethods) {
    INFO(name(method));
    std::uint64_t waits = 0;
    run_local_ranks(2, [&](Communicator& comm) {
      ExpertExchange exchange(&comm,
                              {.method = method,
                               .grid = {2, 1},
                               .experts = 4,
                               .choices = 2,
                               .max_tokens = 3,
                               .weights = DType::f64,
                               .chunks = 3});
      const auto& bounds = exchange.bounds();
      const Field topk({3, 2}, DType::i32, std::vector<int>{0, 1, 2, 3, 1, 2}),
          weights({3, 2}, DType::f64, std::vector<double>(6, 0.5)),
          x({3, 4}, DType::f64, std::vector<double>(12, 1.0)), out({3, 4}, DType::f64),
          rows({bounds.rows, 4}, DType::f64), memory({bounds.plan_bytes}, DType::u8),
          transit({exchange.transit_bytes(4, DType::f64, RowFormat::plain)}, DType::u8),
          returned({bounds.returned_rows, 4}, DType::f64);
      ExchangePlan plan = exchange.make_plan(kCpu);
      BackendOwner owner({.scratch_bytes = 1 << 20, .name = "test"});
      Backend& b = owner.backend();
      comm.barrier();
      if (comm.rank() == 0) waits = host_waits();
      comm.barrier();
      exchange.begin_plan(
          plan, b, memory, {.topk = topk, .weights = weights, .kept = {}, .place_of_expert = {}});
      exchange.finish_plan(plan, b);
      for (int way = 0; way < 2; ++way) {
        const EnteredRows entered = exchange.enter(plan, b, transit, x);
        for (int chunk = 0; chunk < plan.passes(); ++chunk) {
          exchange.dispatch(plan, b, chunk, rows, entered);
          exchange.combine(plan, b, chunk, returned, rows);
        }
        exchange.leave(plan, b, out, returned);
      }
      comm.barrier();
      if (comm.rank() == 0) waits = host_waits() - waits;
      comm.barrier();
      owner.stream().synchronize();
    });
    CHECK(waits == (is_dense(method) ? 0 : 2));  // of both ranks
  }
}

// Only what the experts' stream waits for is exposed: the first chunk, not what comes while they work at it.
TEST_CASE("exchange: a chunk is waited for alone, and that is measured") {
  using std::chrono::milliseconds;
  ExpertExchange exchange(
      nullptr, {.grid = {1, 1}, .experts = 2, .choices = 1, .max_tokens = 2, .chunks = 2});
  BackendOwner main({.name = "main"}), side({.name = "side"});
  ExchangeMeter meter(kCpu);
  exchange.set_side(&side.backend());
  exchange.set_meter(&meter);
  meter.begin();
  const ExchangePlan plan = exchange.make_plan(kCpu, "layer");
  Backend& away = exchange.depart(main.backend());
  REQUIRE(&away == &side.backend());
  const auto take = [](Stream& stream, milliseconds time) {
    stream.enqueue([time] { std::this_thread::sleep_for(time); });
  };
  take(side.stream(), milliseconds(200));
  exchange.note(0);
  take(side.stream(), milliseconds(200));
  exchange.note(1);
  exchange.arrive(plan, ExchangeWay::dispatch, main.backend(), 0);
  take(main.stream(), milliseconds(300));
  exchange.arrive(plan, ExchangeWay::dispatch, main.backend(), 1);
  exchange.arrive(plan, ExchangeWay::dispatch, main.backend(), 1);  // done before
  exchange.arrive(plan, ExchangeWay::combine, main.backend());      // nothing without a number
  main.stream().synchronize();
  side.stream().synchronize();
  const auto uses = meter.end();
  REQUIRE(uses.size() == 1);
  CHECK(uses[0].dispatch.exposed > 0.15);
  CHECK(uses[0].dispatch.exposed < 0.35);
  CHECK(uses[0].combine.exposed == 0);
}

TEST_CASE("exchange: options that differ or do not fit are refused on all ranks") {
  const ExchangeOptions good{
      .method = ExchangeMethod::flat, .grid = {1, 2}, .experts = 4, .choices = 2, .max_tokens = 3};
  const auto construct = [](const std::function<ExchangeOptions(int)>& options) {
    std::string message = "accepted";
    try {
      run_local_ranks(2, [&](Communicator& comm) { ExpertExchange(&comm, options(comm.rank())); });
    } catch (const UsageError& e) {
      message = e.what();
    }
    return message;
  };
  CHECK(construct([&](int) { return good; }) == "accepted");
  CHECK(construct([&](int rank) {
          ExchangeOptions o = good;
          o.max_tokens += rank;
          return o;
        }).find("ranks exchange tokens differently: rank 0 flat, 1 x 2 ranks") == 0);
  CHECK(construct([&](int) {
          ExchangeOptions o = good;
          o.experts = 5;
          return o;
        }) == "5 experts cannot be shared out equally among 2 ranks");
  CHECK(construct([&](int) {
          ExchangeOptions o = good;
          o.grid = {2, 2};
          return o;
        }) == "2 nodes of 2 ranks are not the 2 ranks of the expert group");
}

}  // namespace moesaic::test
