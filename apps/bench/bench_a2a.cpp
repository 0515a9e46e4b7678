#include <algorithm>
#include <cmath>
#include <iostream>
#include <numeric>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/assembly.h"
#include "apps/bench/a2a_method.h"
#include "apps/bench/bench.h"
#include "apps/bench/raw_exchange.h"
#include "apps/bench/timing.h"
#include "apps/launch.h"
#include "comm/device_communicator.h"
#include "memory/device_hooks.h"
#include "parallel/dispatch/link_speeds.h"
#include "parallel/dispatch/node_grid.h"
#include "parallel/dispatch/volumes.h"
#include "parallel/expert_replicas.h"

namespace moesaic::bench {
namespace {

/// What is printed of one method: over all ranks, the same on each.
struct A2aResult {
  ExchangeMethod method = ExchangeMethod::flat;
  std::array<std::int64_t, 3> rows{},
      most_rows{};                  ///< of one dispatch, by Link: of all ranks, of the busiest one
  std::int64_t routed_differs = 0;  ///< ranks whose rows are not those of the routing
  std::int64_t most_received = 0;
  int passes = 1;
  std::vector<A2aTimes> times;  ///< of the slowest rank, per round
};

std::size_t index_of(Link link) {
  return static_cast<std::size_t>(link);
}

std::vector<ExchangeMethod> methods_of(const A2aOptions& o) {
  std::vector<ExchangeMethod> methods;
  for (const std::string& text : o.methods)
    methods.push_back(exchange_method_from_name(text));
  if (methods.empty()) methods.assign(kExchangeMethods.begin(), kExchangeMethods.end());
  return methods;
}

void check(const A2aOptions& o) {
  methods_of(o);
  if (o.choices > o.experts)
    throw UsageError(fmt::format(
        "--choices {}: a token chooses among --experts {} different ones", o.choices, o.experts));
  if (o.replicas > 0 && !o.placed)
    throw UsageError(fmt::format(
        "--replicas {}: copies are those of experts that were placed; add --placed", o.replicas));
}

Device device_of(const A2aOptions& o, const apps::RankPlace& place) {
  if (o.device == "cpu") return kCpu;
  return apps::gpu_of_rank(&place.world,
                           o.share_gpu,
                           {.gpu = "--device cuda", .cpu = "--device cpu", .share = "--share-gpu"});
}

double median_of(const std::vector<A2aTimes>& times, double (*part)(const A2aTimes&)) {
  std::vector<double> values;
  for (const A2aTimes& t : times)
    values.push_back(part(t));
  return median(values);
}

class A2aRun {
 public:
  A2aRun(const A2aOptions& options, const apps::RankPlace& place)
      : o_(options), host_(place.world), device_(device_of(options, place)) {
    if (device_ != kCpu)
      on_device_ = make_device_communicator(
          host_, device_, {.share_gpu = o_.share_gpu, .ranks_per_node = o_.ranks_per_node});
    const FoundGrid found = find_node_grid(&host_, o_.ranks_per_node, node_name());
    grid_ = found.grid;
    grid_reason_ = found.reason;
    if (o_.experts % grid_.ranks() != 0)
      throw UsageError(fmt::format(
          "--experts {} cannot be shared out equally among {} ranks", o_.experts, grid_.ranks()));
    routing_ = {.experts = o_.experts,
                .choices = o_.choices,
                .tokens = o_.tokens,
                .zipf = o_.zipf,
                .seed = o_.seed};
  }

  int run() {
    speeds_ = measure_link_speeds(group(), grid_, device_);
    choice_ = choose_method(grid_, o_.experts, o_.choices, o_.tokens, row_bytes(), speeds_);
    measure();
    raw_ = time_raw_exchanges(group(), host_, device_, o_.raw, o_.repeats, o_.seed);
    const bool failed = std::any_of(
        results_.begin(), results_.end(), [](const A2aResult& r) { return r.routed_differs > 0; });
    if (host_.rank() == 0) {
      if (o_.json) {
        std::cout << json().dump(2) << std::endl;
      } else {
        print();
      }
      if (failed)
        std::cerr << "moesaic: the rows of a plan are not those counted from the routing"
                  << std::endl;
    }
    return failed ? static_cast<int>(ExitCode::internal) : 0;
  }

 private:
  Communicator& group() { return on_device_ ? *on_device_ : host_; }
  std::int64_t row_bytes() const {
    return o_.width * static_cast<std::int64_t>(byte_size(o_.dtype));
  }
  // Of a row in dispatch.
  std::int64_t sent_bytes() const {
    const std::int64_t scale = o_.dtype == DType::f64 ? 8 : 4;
    return o_.fp8 ? o_.width + (o_.width + 127) / 128 * scale : row_bytes();
  }
  std::int64_t sum(std::int64_t v) { return host_.all_reduce_host(v, ReduceOp::sum); }
  std::int64_t most(std::int64_t v) { return host_.all_reduce_host(v, ReduceOp::max); }
  double slowest(double v) { return host_.all_reduce_host(v, ReduceOp::max); }

  void measure() {
    std::vector<TokenChoices> choices;
    for (int r = 0; r < grid_.ranks(); ++r)
      choices.push_back(draw_choices(routing_, r));
    place(choices);
    const int rank = host_.rank();
    std::vector<std::unique_ptr<A2aMethod>> methods;
    for (const ExchangeMethod m : methods_of(o_)) {
      methods.push_back(std::make_unique<A2aMethod>(
          &group(),
          A2aMethod::Options{.method = m,
                             .grid = grid_,
                             .routing = placed_routing(),
                             .width = o_.width,
                             .dtype = o_.dtype,
                             .format = o_.fp8 ? RowFormat::fp8 : RowFormat::plain,
                             .buffer_factor = o_.buffer_factor,
                             .device = device_,
                             .num_threads = o_.num_threads},
          choices[static_cast<std::size_t>(rank)]));
      methods.back()->run();  // warms up
      A2aResult result{.method = m, .passes = methods.back()->passes()};
      const Traffic rows = methods.back()->rows();
      const Traffic routed = count_rows(m, grid_, placed_routing(), choices, rank);
      result.routed_differs = sum(rows.rows == routed.rows ? 0 : 1);
      for (std::size_t link = 0; link < 3; ++link) {
        result.rows[link] = sum(rows.rows[link]);
        result.most_rows[link] = most(rows.rows[link]);
      }
      result.most_received = most(methods.back()->received());
      results_.push_back(result);
    }
    for (int i = 0; i < o_.repeats; ++i) {
      for (std::size_t m = 0; m < methods.size(); ++m) {
        host_.barrier();
        const A2aTimes own = methods[m]->run();
        results_[m].times.push_back(
            {slowest(own.plan), slowest(own.dispatch), slowest(own.combine)});
      }
    }
  }

  // Places stand for experts here: with slots for copies there are more of them.
  RoutingOptions placed_routing() const {
    RoutingOptions of = routing_;
    if (o_.placed) of.experts += std::int64_t{o_.replicas} * grid_.ranks();
    return of;
  }

  // The load of ranks with experts in order, placed and copied; `choices` become places.
  void place(std::vector<TokenChoices>& choices) {
    std::vector<double> load(static_cast<std::size_t>(o_.experts));
    for (const TokenChoices& of : choices) {
      for (const std::int32_t e : of.places)
        load[static_cast<std::size_t>(e)] += 1;
    }
    const std::vector<double> earlier = earlier_load(routing_, grid_.ranks());
    const PlacesOfExperts in_order = places_in_order(o_.experts),
                          placed = balanced_places(earlier, grid_, in_order);
    const ExpertCopies copies = balanced_copies(earlier, grid_, placed, o_.replicas);
    rank_load_in_order_ = max_over_mean(rank_loads(load, in_order, grid_.ranks()));
    rank_load_placed_ = max_over_mean(rank_loads(load, placed, grid_.ranks()));
    if (!o_.placed) return;
    std::vector<double> copied(static_cast<std::size_t>(grid_.ranks()));
    for (TokenChoices& of : choices) {
      for (std::size_t a = 0; a < of.places.size(); ++a) {
        const std::size_t turn = a / static_cast<std::size_t>(of.choices) % kReplicaTurns;
        of.places[a] =
            copies.place_of_turn.at(static_cast<std::size_t>(of.places[a]) * kReplicaTurns + turn);
        copied[static_cast<std::size_t>(copies.rank_of(of.places[a]))] += 1;
      }
    }
    rank_load_copied_ = max_over_mean(copied);
    copies_ = copies.num_copies();
  }

  double per_token(std::int64_t rows) const {
    return static_cast<double>(rows) / static_cast<double>(o_.tokens * grid_.ranks());
  }

  const A2aResult& fastest() const {
    return *std::min_element(
        results_.begin(), results_.end(), [](const A2aResult& a, const A2aResult& b) {
          return total(a) < total(b);
        });
  }
  static double total(const A2aResult& r) {
    return median_of(r.times, [](const A2aTimes& t) { return t.total(); });
  }

  void print() const {
    std::cout << fmt::format(
        "{} node{} of {} rank{} ({}), {}; {} tokens a rank of {} x {}, top {} of {} experts, zipf "
        "{}\n",
        grid_.nodes,
        grid_.nodes == 1 ? "" : "s",
        grid_.per_node,
        grid_.per_node == 1 ? "" : "s",
        grid_reason_,
        device_ == kCpu ? "cpu" : cuda::device_name(device_),
        o_.tokens,
        o_.width,
        name(o_.dtype),
        o_.choices,
        o_.experts,
        o_.zipf);
    std::cout << fmt::format(
        "choices of the busiest rank / mean: {:.3f} with experts in order, {:.3f} placed by what "
        "earlier tokens chose{}; here they are {}\n",
        rank_load_in_order_,
        rank_load_placed_,
        o_.replicas > 0
            ? fmt::format(
                  ", {:.3f} with {} copies of them inside nodes", rank_load_copied_, copies_)
            : "",
        o_.replicas > 0 ? "placed and copied"
        : o_.placed     ? "placed"
                        : "in order");
    std::cout << fmt::format(
        "rows per token that leave a rank in one dispatch (combine: as many back), counted from "
        "the plan;\n"
        "MB of the busiest rank; milliseconds of the slowest rank, median of {}\n\n",
        o_.repeats);
    std::cout << fmt::format(
        "{:<14}{:>9}{:>10}{:>9}{:>10}{:>12}{:>9}{:>8}{:>10}{:>10}{:>10}{:>7}\n",
        "method",
        "network",
        "expected",
        "node",
        "expected",
        "network MB",
        "node MB",
        "plan",
        "dispatch",
        "combine",
        "total",
        "passes");
    for (const A2aResult& r : results_) {
      const ExpectedRows expected = expected_rows(r.method, grid_, o_.experts, o_.choices);
      const auto wanted = [&](double rows) {
        return o_.zipf == 0 ? fmt::format("{:.3f}", rows) : std::string("-");
      };
      const auto megabytes = [&](Link link) {
        return static_cast<double>(r.most_rows[index_of(link)] * sent_bytes()) / 1e6;
      };
      const auto ms = [&](double (*part)(const A2aTimes&)) {
        return 1e3 * median_of(r.times, part);
      };
      std::cout << fmt::format(
          "{:<14}{:>9.3f}{:>10}{:>9.3f}{:>10}{:>12.3f}{:>9.3f}{:>8.2f}{:>10.2f}{:>10.2f}{:>10.2f}{:"
          ">7}\n",
          name(r.method),
          per_token(r.rows[index_of(Link::network)]),
          wanted(expected.network),
          per_token(r.rows[index_of(Link::node)]),
          wanted(expected.node),
          megabytes(Link::network),
          megabytes(Link::node),
          ms([](const A2aTimes& t) { return t.plan; }),
          ms([](const A2aTimes& t) { return t.dispatch; }),
          ms([](const A2aTimes& t) { return t.combine; }),
          1e3 * total(r),
          r.passes);
    }
    std::cout << fmt::format(
        "\nauto: {}\nfastest here: {}{}; every result and repetition was exact\n",
        choice_.reason,
        name(fastest().method),
        auto_share() > 0 ? fmt::format("; auto takes {:.2f} times as long", auto_share()) : "");
    for (const RawExchange& r : raw_)
      std::cout << fmt::format(
          "bare exchange of {} MiB with every peer: {:.2f} ms, {:.1f} GB/s sent by a rank\n",
          r.bytes >> 20,
          1e3 * r.seconds,
          r.bytes_per_second / 1e9);
  }

  // The time of the method that `auto` chooses over the fastest one's; 0 when it was not among those timed.
  double auto_share() const {
    const auto chosen = std::find_if(results_.begin(), results_.end(), [&](const A2aResult& r) {
      return r.method == choice_.method;
    });
    return chosen == results_.end() ? 0 : total(*chosen) / total(fastest());
  }

  nlohmann::ordered_json rank_loads_json() const {
    nlohmann::ordered_json j{{"in_order", rank_load_in_order_}, {"placed", rank_load_placed_}};
    if (o_.replicas > 0) j["copied"] = rank_load_copied_;
    return j;
  }

  nlohmann::ordered_json json() const {
    nlohmann::ordered_json j{
        {"nodes", grid_.nodes},
        {"ranks_per_node", grid_.per_node},
        {"nodes_from", grid_reason_},
        {"device", to_string(device_)},
        {"tokens", o_.tokens},
        {"width", o_.width},
        {"dtype", name(o_.dtype)},
        {"experts", o_.experts},
        {"choices", o_.choices},
        {"zipf", o_.zipf},
        {"placed", o_.placed},
        {"replicas", o_.replicas},
        {"rank_max_over_mean", rank_loads_json()},
        {"buffer_factor", o_.buffer_factor},
        {"repeats", o_.repeats},
        {"row_bytes", row_bytes()},
        {"dispatched_row_bytes", sent_bytes()},
        {"auto", name(choice_.method)},
        {"auto_reason", choice_.reason},
        {"fastest", name(fastest().method)},
        {"link_bytes_per_second", {{"node", speeds_.node}, {"network", speeds_.network}}}};
    if (auto_share() > 0) j["auto_over_fastest"] = auto_share();
    for (const RawExchange& r : raw_)
      j["raw_exchanges"].push_back({{"bytes_to_each_peer", r.bytes},
                                    {"seconds", r.seconds},
                                    {"bytes_per_second", r.bytes_per_second}});
    for (const A2aResult& r : results_) {
      const ExpectedRows expected = expected_rows(r.method, grid_, o_.experts, o_.choices);
      nlohmann::ordered_json m{{"method", name(r.method)}, {"passes", r.passes}};
      for (const Link link : kLinks) {
        nlohmann::ordered_json one{{"rows", r.rows[index_of(link)]},
                                   {"bytes", r.rows[index_of(link)] * sent_bytes()},
                                   {"most_rows_of_a_rank", r.most_rows[index_of(link)]}};
        if (o_.zipf == 0)
          one["expected_rows"] = expected.of(link) * static_cast<double>(o_.tokens * grid_.ranks());
        m[name(link)] = one;
      }
      m["rows_are_those_of_the_routing"] = r.routed_differs == 0;
      m["most_rows_received"] = r.most_received;
      m["plan_seconds"] = median_of(r.times, [](const A2aTimes& t) { return t.plan; });
      m["dispatch_seconds"] = median_of(r.times, [](const A2aTimes& t) { return t.dispatch; });
      m["combine_seconds"] = median_of(r.times, [](const A2aTimes& t) { return t.combine; });
      m["seconds"] = total(r);
      j["methods"].push_back(m);
    }
    return j;
  }

  const A2aOptions& o_;
  Communicator& host_;
  Device device_;
  std::unique_ptr<Communicator> on_device_;
  NodeGrid grid_;
  std::string grid_reason_;
  RoutingOptions routing_;
  double rank_load_in_order_ = 0, rank_load_placed_ = 0, rank_load_copied_ = 0;  // busiest / mean
  std::int64_t copies_ = 0;
  LinkSpeeds speeds_;
  MethodChoice choice_;
  std::vector<A2aResult> results_;
  std::vector<RawExchange> raw_;
};

}  // namespace

int bench_a2a(const A2aOptions& options) {
  if (const int problem = apps::run_before_mpi([&] { check(options); }); problem != 0)
    return problem;
  return apps::run_ranks(
      {}, [&](const apps::RankPlace& place) { return A2aRun(options, place).run(); });
}

}  // namespace moesaic::bench
