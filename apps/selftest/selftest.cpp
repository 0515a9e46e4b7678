#include "apps/selftest/selftest.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <ostream>
#include <set>

#include <fmt/format.h>

#include "apps/assembly.h"
#include "apps/launch.h"
#include "apps/selftest/comparison.h"
#include "apps/selftest/layouts.h"
#include "apps/selftest/table.h"
#include "comm/device_communicator.h"
#include "comm/launch_check.h"
#include "core/base/activity.h"
#include "core/base/error.h"
#include "core/config/load.h"
#include "memory/buffer.h"
#include "memory/device_hooks.h"

namespace moesaic::apps::selftest {
namespace {

constexpr int kThreadsAlone = 4;  // without a launcher and --ranks

bool on_gpus(const config::Config& config) {
  return config.run.device == config::DeviceChoice::cuda;
}

config::Config load(const LayoutsOptions& options) {
  // What the file says is about training; another precision, or a GPU, must be asked for.
  std::vector<std::string> overrides = options.overrides;
  const auto add_unless_given = [&](const std::string& key, const std::string& value) {
    if (std::none_of(overrides.begin(), overrides.end(), [&](const std::string& o) {
          return o.starts_with(key + "=");
        }))
      overrides.push_back(key + "=" + value);
  };
  add_unless_given("run.precision", "f64");
  add_unless_given("run.device", "cpu");
  config::Config config = config::load_config(options.config, overrides).config;
  if (config.run.device == config::DeviceChoice::automatic)
    throw UsageError(
        "run.device=auto: selftest layouts computes on the CPU unless run.device=cuda is among "
        "its arguments; allowed here: cpu, cuda");
  if (config.experts.update == config::ExpertUpdateTime::in_backward)
    throw UsageError(
        "experts.update=in_backward: selftest layouts compares gradients when a step is over, and "
        "those of experts are gone by then; set experts.update=after_step, which gives the same "
        "weights");
  return config;
}

std::vector<Layout> choose(const LayoutsOptions& options, const config::Config& config, int ranks) {
  std::vector<Layout> layouts =
      options.layouts.empty() ? all_layouts(config, ranks) : parse_layouts(options.layouts);
  for (const Layout& layout : layouts) {
    if (layout.ranks() > ranks)
      throw UsageError(fmt::format("{} needs {} ranks, and there are {}: start them with {} {}",
                                   layout.name(),
                                   layout.ranks(),
                                   ranks,
                                   on_gpus(config) ? "mpirun -np" : "--ranks",
                                   layout.ranks()));
    if (const std::string why = problem(config, layout); !why.empty())
      throw UsageError(fmt::format("{}: {}", layout.name(), why));
  }
  if (layouts.empty())
    throw UsageError(
        ranks == 1 && on_gpus(config)
            ? "one rank has one layout; start it with mpirun -np 2, a rank per GPU"
        : ranks == 1
            ? "one rank has one layout; give --ranks 4, or start it with mpirun -np 4"
            : fmt::format("the configuration has no layout on up to {} ranks but one rank; "
                          "is train.global_batch_size a multiple of 2?",
                          ranks));
  if (options.sample > 0)
    layouts = sample(layouts, static_cast<std::size_t>(options.sample), options.seed);
  return layouts;
}

// Threads to take as ranks; 0: the ranks of the launcher, each process of which would do all the work of threads again.
int threads_for(const LayoutsOptions& options, const config::Config& config) {
  const Launch launch =
      read_launch([](const char* name) -> const char* { return std::getenv(name); });
  const bool alone = launch.by == Launch::By::nobody || launch.by == Launch::By::allocation;
  if (on_gpus(config)) {
    if (!alone && options.ranks == 0) return 0;
    throw UsageError(fmt::format(
        "run.device=cuda takes a process per GPU, and {}; start it with mpirun -np {} moesaic "
        "selftest layouts {} … run.device=cuda, without --ranks (comm.share_gpu=true: several on "
        "a GPU)",
        options.ranks > 0 ? fmt::format("--ranks {} are threads of one process", options.ranks)
                          : "this is one process",
        std::max(2, options.ranks),
        options.config));
  }
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

struct Ranks {
  int number = 0;
  bool prints = true;  ///< this one
  std::string where;   ///< what they compute on
};

Layout one_rank() {
  Layout alone;
  alone.mesh.dp = 1;
  return alone;
}

std::size_t bytes_in_use() {
  std::size_t sum = 0;
  for (const MemoryUse& use : memory_in_use())
    sum += use.bytes;
  return sum;
}

int compare_all(const LayoutsOptions& options,
                const config::Config& config,
                const Ranks& ranks,
                const RunLayout& run,
                std::ostream& out) {
  const std::vector<Layout> layouts = choose(options, config, ranks.number);
  std::ostream nowhere(nullptr);
  const DType compute = compute_type(config);
  const DifferenceBounds bounds = bounds_for(config, compute, options.steps);
  Table table({.steps = options.steps,
               .compute = compute,
               .where = ranks.where,
               .bounds = bounds,
               .json = options.json},
              ranks.prints ? out : nowhere);
  table.begin(layouts.size());
  // Rounding must not send a token elsewhere; in f64 it does not.
  ChoiceRecord record;
  const bool replays = compute != DType::f64;
  const RunResult one = run(one_rank(), {replays ? &record : nullptr, nullptr});
  table.one_rank_took(one.kernels);
  const ChoiceUse use{nullptr, replays ? &record : nullptr};
  const std::size_t in_use = bytes_in_use();
  for (const Layout& layout : layouts) {
    const auto start = std::chrono::steady_clock::now();
    const RunResult result = run(layout, use);
    Row row;
    row.layout = layout;
    row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    row.kernels = result.kernels;
    if (ranks.prints) {
      row.difference = compare(result, one);
      row.choices = result.choices;
      row.differing = result.differing;
      row.moved = result.moved;
      row.replicas = result.replicas;
      row.agrees = row.difference.within(bounds);
    } else {
      row.agrees = true;  // the first rank judges
    }
    table.add(row);
    if (const std::size_t left = bytes_in_use(); left != in_use)
      throw InternalError(fmt::format(
          "{} left {} bytes allocated, which were {} before it", layout.name(), left, in_use));
  }
  return table.finish();
}

/// What is being trained, for the watchdog's message. Longer lived than the watchdog.
class Watched {
 public:
  explicit Watched(const config::Config& config) : config_(config) {}
  Activity activity;

  std::unique_ptr<Watchdog> watchdog() const {
    return make_watchdog(config_.comm,
                         activity,
                         "this ends the test with exit code 124 (comm.first_step_s, and "
                         "comm.watchdog_s, which is 0 to wait for ever)");
  }
  /// For a PeriodScope: "training in layout dp=2,ep=2".
  const char* name_of(const Layout& layout) {
    return names_.emplace_back("training in layout " + layout.name()).c_str();
  }

 private:
  const config::Config& config_;
  std::deque<std::string> names_;
};

int compare_on_threads(const LayoutsOptions& options,
                       const config::Config& config,
                       int threads,
                       std::ostream& out) {
  Watched watched(config);
  const ActivityOfThread here(&watched.activity);
  const auto watchdog = watched.watchdog();
  const PeriodScope period("comparing layouts", true);
  const RunLayout run = [&](const Layout& layout, const ChoiceUse& choices) {
    const PeriodScope training(watched.name_of(layout), true);
    RunResult first;
    const config::Config laid = in_layout(config, layout);
    run_local_ranks(layout.ranks(), [&](Communicator& world) {
      RunResult result = run_steps(laid, world, kCpu, options.steps, choices);
      if (world.rank() == 0) first = std::move(result);
    });
    return first;
  };
  return compare_all(options, config, {threads, true, "the CPU"}, run, out);
}

// "2 x NVIDIA H200 over NCCL 2.28.3", "2 x NVIDIA H200 shared by 4 ranks over NCCL 2.28.3, as nodes of 2". All ranks call it.
std::string where_text(const config::Config& config, Communicator& world, Device device) {
  if (device == kCpu) return "the CPU";
  const auto uuids = world.all_gather_host(cuda::device_uuid(device));
  const std::set<std::string> different(uuids.begin(), uuids.end());
  const auto ranks = static_cast<std::size_t>(world.size());
  std::string text = fmt::format("{} x {}", different.size(), cuda::device_name(device));
  if (different.size() < ranks) text += fmt::format(" shared by {} ranks", ranks);
  if (ranks > 1) text += " over NCCL " + device_communicator_version();
  const std::int64_t per_node = config.comm.ranks_per_node.value_or(0);
  if (per_node > 0 && per_node < world.size()) text += fmt::format(", as nodes of {}", per_node);
  return text;
}

// The first ranks of `world` train, as many as the layout has; the others wait for them. Groups of ranks are made, and given
// back, by all ranks in one order.
RunResult run_on_first(Communicator& world,
                       const config::Config& laid,
                       int ranks,
                       Device device,
                       int steps,
                       const ChoiceUse& choices) {
  RunResult result;
  {
    const bool takes_part = world.rank() < ranks;
    // All of them, too: what a group keeps for its exchanges goes with it.
    const auto part = world.split(takes_part ? 0 : -1, world.rank());
    if (takes_part) result = run_steps(laid, *part, device, steps, choices);
  }
  world.barrier();
  if (choices.record != nullptr) {  // of the first rank, which was alone
    std::string bytes = choices.record->bytes();
    world.broadcast_host(bytes, 0);
    *choices.record = ChoiceRecord::read(bytes);
  }
  return result;
}

int compare_on_ranks(const LayoutsOptions& options,
                     const config::Config& config,
                     std::ostream& out) {
  Watched watched(config);
  const ActivityOfThread here(&watched.activity);
  CommOptions comm;
  std::unique_ptr<Watchdog> watchdog;
  if (on_gpus(config)) {
    comm.activity = &watched.activity;
    watchdog = watched.watchdog();
  }
  return run_ranks(comm, [&](const RankPlace& place) {
    const PeriodScope period("comparing layouts", true);
    const Device device = resolve_device(in_layout(config, one_rank()), &place.world);
    std::unique_ptr<Communicator> between_devices;
    if (device != kCpu)
      between_devices = make_device_communicator(place.world, device, device_comm_options(config));
    Communicator& world = between_devices ? *between_devices : place.world;
    const RunLayout run = [&](const Layout& layout, const ChoiceUse& choices) {
      const PeriodScope training(watched.name_of(layout), true);
      return run_on_first(
          world, in_layout(config, layout), layout.ranks(), device, options.steps, choices);
    };
    const int code =
        compare_all(options,
                    config,
                    {world.size(), world.rank() == 0, where_text(config, world, device)},
                    run,
                    out);
    return static_cast<int>(world.all_reduce_host(std::int64_t{code}, ReduceOp::max));
  });
}

}  // namespace

int run_layouts(const LayoutsOptions& options, std::ostream& out) {
  config::Config config;
  int threads = 0;
  const int problem = run_before_mpi([&] {
    config = load(options);
    threads = threads_for(options, config);
  });
  if (problem != 0) return problem;
  return threads > 0 ? compare_on_threads(options, config, threads, out)
                     : compare_on_ranks(options, config, out);
}

}  // namespace moesaic::apps::selftest
