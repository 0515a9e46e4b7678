#include "apps/selftest/selftest.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/launch.h"
#include "apps/selftest/comparison.h"
#include "apps/selftest/layouts.h"
#include "comm/launch_check.h"
#include "core/base/error.h"
#include "core/config/load.h"

namespace moesaic::apps::selftest {
namespace {

constexpr int kThreadsAlone = 4;  // without a launcher and --ranks

config::Config load(const LayoutsOptions& options) {
  // What the file says is about training; another precision must be asked for.
  std::vector<std::string> overrides = options.overrides;
  for (const std::string& o : options.overrides) {
    if (o.starts_with("run.device=") && o != "run.device=cpu")
      throw UsageError(o + ": selftest layouts computes on the CPU; leave the key out");
  }
  if (std::none_of(overrides.begin(), overrides.end(), [](const std::string& o) {
        return o.starts_with("run.precision=");
      }))
    overrides.emplace_back("run.precision=f64");
  overrides.emplace_back("run.device=cpu");
  return config::load_config(options.config, overrides).config;
}

std::vector<Layout> choose(const LayoutsOptions& options, const config::Config& config, int ranks) {
  std::vector<Layout> layouts =
      options.layouts.empty() ? all_layouts(config, ranks) : parse_layouts(options.layouts);
  for (const Layout& layout : layouts) {
    if (layout.ranks() > ranks)
      throw UsageError(
          fmt::format("{} needs {} ranks, and there are {}: start them with --ranks {}",
                      layout.name(),
                      layout.ranks(),
                      ranks,
                      layout.ranks()));
    if (const std::string why = problem(config, layout); !why.empty())
      throw UsageError(fmt::format("{}: {}", layout.name(), why));
  }
  if (layouts.empty())
    throw UsageError(
        ranks == 1 ? "one rank has one layout; give --ranks 4, or start it with mpirun -np 4"
                   : fmt::format("the configuration has no layout on up to {} ranks but one rank; "
                                 "is train.global_batch_size a multiple of 2?",
                                 ranks));
  if (options.sample > 0)
    layouts = sample(layouts, static_cast<std::size_t>(options.sample), options.seed);
  return layouts;
}

struct Row {
  Layout layout;
  Difference difference;
  std::int64_t choices = 0, differing = 0, moved = 0;
  double seconds = 0;
  bool agrees = false;
};

/// Prints rows as they come, and what they came to.
class Table {
 public:
  Table(const LayoutsOptions& options,
        DType compute,
        const DifferenceBounds& bounds,
        std::ostream& out)
      : options_(options), compute_(compute), bounds_(bounds), out_(out) {}

  void begin(std::size_t layouts) {
    if (options_.json) return;
    out_ << fmt::format(
        "{} steps in {}, {} layouts against one rank; bounds: {:.1e} for the first step, {:.1e} "
        "for "
        "the losses and norms that follow, {:.1e} for the last weights\n",
        options_.steps,
        moesaic::name(compute_),
        layouts,
        bounds_.first,
        bounds_.later,
        bounds_.weights);
    if (replays())
      out_ << "every layout takes the choices of one rank; differ: so many of its own would have "
              "been others\n";
    out_ << fmt::format("{:<28}{:>6}{:>10}{:>10}{:>10}{:>10}{:>10}",
                        "layout",
                        "ranks",
                        "loss",
                        "norm",
                        "gradient",
                        "later",
                        "weights");
    if (replays()) out_ << fmt::format("{:>16}", "differ");
    out_ << fmt::format("{:>8}\n", "s");
  }
  void add(const Row& row) {
    rows_.push_back(row);
    failed_ += row.agrees ? 0 : 1;
    if (options_.json) return;
    const Difference& d = row.difference;
    out_ << fmt::format("{:<28}{:>6}{:>10.1e}{:>10.1e}{:>10.1e}{:>10.1e}{:>10.1e}",
                        row.layout.name(),
                        row.layout.ranks(),
                        d.loss,
                        d.grad_norm,
                        d.gradient,
                        d.later,
                        d.weights);
    if (replays()) out_ << fmt::format("{:>16}", fmt::format("{}/{}", row.differing, row.choices));
    out_ << fmt::format("{:>8.1f}{}{}\n",
                        row.seconds,
                        row.moved > 0 ? fmt::format("  {} experts moved", row.moved) : "",
                        row.agrees ? ""
                                   : fmt::format("  DIFFERS: gradient of {}; later {}; weights {}",
                                                 d.gradient_name,
                                                 d.later_name,
                                                 d.weights_name))
         << std::flush;
  }
  int finish() {
    if (options_.json) {
      nlohmann::ordered_json all = nlohmann::ordered_json::array();
      for (const Row& r : rows_) {
        all.push_back({{"layout", r.layout.name()},
                       {"ranks", r.layout.ranks()},
                       {"loss", r.difference.loss},
                       {"grad_norm", r.difference.grad_norm},
                       {"gradient", r.difference.gradient},
                       {"gradient_name", r.difference.gradient_name},
                       {"later", r.difference.later},
                       {"later_name", r.difference.later_name},
                       {"weights", r.difference.weights},
                       {"weights_name", r.difference.weights_name},
                       {"choices_replayed", r.choices},
                       {"choices_differing", r.differing},
                       {"experts_moved", r.moved},
                       {"seconds", r.seconds},
                       {"agrees", r.agrees}});
      }
      out_ << all.dump(1) << "\n";
    } else {
      out_ << fmt::format(
          "{} of {} layouts agree with one rank\n", rows_.size() - failed_, rows_.size());
    }
    return failed_ == 0 ? 0 : static_cast<int>(ExitCode::internal);
  }

 private:
  bool replays() const { return compute_ != DType::f64; }

  const LayoutsOptions& options_;
  DType compute_;
  DifferenceBounds bounds_;
  std::ostream& out_;
  std::vector<Row> rows_;
  std::size_t failed_ = 0;
};

// Threads to take as ranks; 0: the ranks of the launcher, each process of which would do all the work of threads again.
int threads_for(const LayoutsOptions& options) {
  const Launch launch =
      read_launch([](const char* name) -> const char* { return std::getenv(name); });
  const bool alone = launch.by == Launch::By::nobody || launch.by == Launch::By::allocation;
  if (options.ranks == 0) return alone ? kThreadsAlone : 0;
  if (alone || launch.size == 1) return options.ranks;
  throw UsageError(
      fmt::format("--ranks {} are threads of one process, and a launcher started {} processes "
                  "({}); leave out --ranks, or the launcher",
                  options.ranks,
                  launch.size,
                  launch.found));
}

/// Runs on all ranks; the result is that of the first one. Records and replays are filled in by who runs it.
using RunLayout = std::function<RunResult(const Layout&, const ChoiceUse&)>;

int compare_all(const LayoutsOptions& options,
                const config::Config& config,
                int ranks,
                bool prints,
                const RunLayout& run,
                std::ostream& out) {
  const std::vector<Layout> layouts = choose(options, config, ranks);
  std::ostream nowhere(nullptr);
  const DType compute = compute_type(config);
  const DifferenceBounds bounds = bounds_for(config, compute, options.steps);
  Table table(options, compute, bounds, prints ? out : nowhere);
  table.begin(layouts.size());
  Layout alone;
  alone.mesh.dp = 1;
  // Rounding must not send a token elsewhere; in f64 it does not.
  ChoiceRecord record;
  const bool replays = compute != DType::f64;
  const RunResult one = run(alone, {replays ? &record : nullptr, nullptr});
  const ChoiceUse use{nullptr, replays ? &record : nullptr};
  for (const Layout& layout : layouts) {
    const auto start = std::chrono::steady_clock::now();
    const RunResult result = run(layout, use);
    Row row;
    row.layout = layout;
    row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (prints) {
      row.difference = compare(result, one);
      row.choices = result.choices;
      row.differing = result.differing;
      row.moved = result.moved;
      row.agrees = row.difference.within(bounds);
    } else {
      row.agrees = true;  // the first rank judges
    }
    table.add(row);
  }
  return table.finish();
}

}  // namespace

int run_layouts(const LayoutsOptions& options, std::ostream& out) {
  config::Config config;
  int threads = 0;
  const int problem = run_before_mpi([&] {
    threads = threads_for(options);
    config = load(options);
  });
  if (problem != 0) return problem;
  if (threads > 0) {
    const RunLayout run = [&](const Layout& layout, const ChoiceUse& choices) {
      RunResult first;
      const config::Config laid = in_layout(config, layout);
      run_local_ranks(layout.ranks(), [&](Communicator& world) {
        RunResult result = run_steps(laid, world, options.steps, choices);
        if (world.rank() == 0) first = std::move(result);
      });
      return first;
    };
    return compare_all(options, config, threads, true, run, out);
  }
  return run_ranks({}, [&](const RankPlace& place) {
    Communicator& world = place.world;
    const RunLayout run = [&](const Layout& layout, const ChoiceUse& choices) {
      const bool takes_part = world.rank() < layout.ranks();
      const auto part = world.split(takes_part ? 0 : -1, world.rank());
      RunResult result;
      if (takes_part) result = run_steps(in_layout(config, layout), *part, options.steps, choices);
      world.barrier();
      if (choices.record != nullptr) {  // of the first rank, which was alone
        std::string bytes = choices.record->bytes();
        world.broadcast_host(bytes, 0);
        *choices.record = ChoiceRecord::read(bytes);
      }
      return result;
    };
    const int code = compare_all(options, config, world.size(), world.rank() == 0, run, out);
    return static_cast<int>(world.all_reduce_host(std::int64_t{code}, ReduceOp::max));
  });
}

}  // namespace moesaic::apps::selftest
