#include "apps/selftest/selftest.h"

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
  std::vector<std::string> overrides = options.overrides;
  for (const std::string fixed : {"run.precision=f64", "run.device=cpu"}) {
    const std::string key = fixed.substr(0, fixed.find('=') + 1);
    for (const std::string& o : options.overrides) {
      if (o.starts_with(key) && o != fixed)
        throw UsageError(fmt::format(
            "{}: selftest layouts computes in f64 on the CPU, where layouts differ by rounding "
            "alone; leave the key out",
            o));
    }
    overrides.emplace_back(fixed);
  }
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
  double seconds = 0;
  bool agrees = false;
};

/// Prints rows as they come, and what they came to.
class Table {
 public:
  Table(const LayoutsOptions& options, std::ostream& out) : options_(options), out_(out) {}

  void begin(std::size_t layouts) {
    if (options_.json) return;
    out_ << fmt::format(
        "{} steps in f64, {} layouts against one rank; bounds: {:.0e} for the first step, {:.0e} "
        "for "
        "what follows\n{:<24}{:>6}{:>10}{:>10}{:>10}{:>10}{:>8}\n",
        options_.steps,
        layouts,
        options_.one_step_bound,
        options_.several_steps_bound,
        "layout",
        "ranks",
        "loss",
        "norm",
        "gradient",
        "later",
        "s");
  }
  void add(const Row& row) {
    rows_.push_back(row);
    failed_ += row.agrees ? 0 : 1;
    if (options_.json) return;
    const Difference& d = row.difference;
    out_ << fmt::format("{:<24}{:>6}{:>10.1e}{:>10.1e}{:>10.1e}{:>10.1e}{:>8.1f}{}\n",
                        row.layout.name(),
                        row.layout.ranks(),
                        d.loss,
                        d.grad_norm,
                        d.gradient,
                        d.later,
                        row.seconds,
                        row.agrees ? ""
                                   : fmt::format("  DIFFERS: gradient of {}; later {}",
                                                 d.gradient_name,
                                                 d.later_name))
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
  const LayoutsOptions& options_;
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

using RunLayout = std::function<RunResult(const Layout&)>;

int compare_all(const LayoutsOptions& options,
                const config::Config& config,
                int ranks,
                bool prints,
                const RunLayout& run,
                std::ostream& out) {
  const std::vector<Layout> layouts = choose(options, config, ranks);
  std::ostream nowhere(nullptr);
  Table table(options, prints ? out : nowhere);
  table.begin(layouts.size());
  Layout alone;
  alone.mesh.dp = 1;
  const RunResult one = run(alone);
  for (const Layout& layout : layouts) {
    const auto start = std::chrono::steady_clock::now();
    const RunResult result = run(layout);
    Row row;
    row.layout = layout;
    row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (prints) {
      row.difference = compare(result, one);
      const Difference& d = row.difference;
      row.agrees = d.loss <= options.one_step_bound && d.grad_norm <= options.one_step_bound &&
                   d.gradient <= options.one_step_bound && d.later <= options.several_steps_bound;
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
    const RunLayout run = [&](const Layout& layout) {
      RunResult first;
      const config::Config laid = in_layout(config, layout);
      run_local_ranks(layout.ranks(), [&](Communicator& world) {
        RunResult result = run_steps(laid, world, options.steps);
        if (world.rank() == 0) first = std::move(result);
      });
      return first;
    };
    return compare_all(options, config, threads, true, run, out);
  }
  return run_ranks({}, [&](const RankPlace& place) {
    Communicator& world = place.world;
    const RunLayout run = [&](const Layout& layout) {
      const bool takes_part = world.rank() < layout.ranks();
      const auto part = world.split(takes_part ? 0 : -1, world.rank());
      RunResult result;
      if (takes_part) result = run_steps(in_layout(config, layout), *part, options.steps);
      world.barrier();
      return result;
    };
    const int code = compare_all(options, config, world.size(), world.rank() == 0, run, out);
    return static_cast<int>(world.all_reduce_host(std::int64_t{code}, ReduceOp::max));
  });
}

}  // namespace moesaic::apps::selftest
