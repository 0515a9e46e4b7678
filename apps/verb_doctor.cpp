#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include "apps/doctor/judge.h"
#include "apps/doctor/read_facts.h"
#include "apps/doctor/report.h"
#include "apps/host_memory.h"
#include "apps/launch.h"
#include "apps/plan_stages.h"
#include "apps/verb.h"
#include "core/config/load.h"
#include "core/model/plan.h"

namespace moesaic::apps {
namespace {

using namespace doctor;

struct DoctorArguments {
  ConfigArguments config;
  bool json = false;
};

struct Wishes {
  std::string folder = ".";
  int threads = 1;
  bool wants_cuda = false;
  std::uint64_t checkpoint = 0;
  std::int64_t keep = 1;
  bool offloads = false;
  std::optional<std::uint64_t> host_budget, file_budget;
  std::string file_path;
  std::optional<config::Config> config;
};

// What the configuration, if there is one, will ask of the machine.
Wishes wishes_of(const ConfigArguments& arguments) {
  Wishes wishes;
  if (arguments.path.empty()) return wishes;
  const config::Config config = config::load_config(arguments.path, arguments.overrides).config;
  wishes.config = config;
  wishes.folder = config.run.dir;
  wishes.threads = static_cast<int>(config.run.threads);
  wishes.wants_cuda = config.run.device == config::DeviceChoice::cuda;
  wishes.keep = config.checkpoint.keep_last;
  wishes.offloads = config.experts.offload != config::ExpertOffload::none;
  const auto budget = [](const std::optional<std::int64_t>& bytes) {
    return bytes ? std::optional(static_cast<std::uint64_t>(*bytes)) : std::nullopt;
  };
  wishes.host_budget = budget(config.memory.host_budget);
  wishes.file_budget = budget(config.memory.file_budget);
  wishes.file_path = config.memory.file_path.value_or("");
  constexpr std::uint64_t kBytesPerParameter = 12;  // weights and two moments in f32
  wishes.checkpoint = kBytesPerParameter * static_cast<std::uint64_t>(make_plan(config).model.all);
  return wishes;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

void append(Findings& to, const Findings& more) {
  to.insert(to.end(), more.begin(), more.end());
}

// The GPUs that each rank sees. All ranks call it.
GpusOfRanks gpus_of_ranks(const CudaFacts& cuda, Communicator& world) {
  std::string mine = host_name();
  for (const GpuFacts& gpu : cuda.gpus)
    mine += "\n" + gpu.uuid;
  GpusOfRanks all;
  for (const std::string& text : world.all_gather_host(mine)) {
    std::istringstream lines(text);
    std::string line;
    std::getline(lines, line);
    all.hosts.push_back(line);
    auto& gpus = all.visible.emplace_back();
    while (std::getline(lines, line))
      gpus.push_back(line);
  }
  return all;
}

// On the device that a run would take here, and with the ranks of this launch where there are several.
std::optional<MemoryPlanFacts> read_memory_plan(config::Config config,
                                                const LaunchFacts& launch,
                                                const CudaFacts& cuda) {
  if (cuda.gpus.empty() && config.run.device == config::DeviceChoice::automatic)
    config.run.device = config::DeviceChoice::cpu;
  const config::ParallelConfig& parallel = config.parallel;
  const std::int64_t rest = parallel.pp * parallel.cp * parallel.tp;
  if (launch.size > 1 && !parallel.dp && launch.size % rest == 0)
    config.parallel.dp = launch.size / rest;
  MemoryLimits limits;
  for (const GpuFacts& gpu : cuda.gpus)
    if (config.run.device != config::DeviceChoice::cpu)
      limits.device_free = std::min(limits.device_free.value_or(gpu.free), gpu.free);
  if (const auto available = available_host_memory())
    limits.host = *available / static_cast<std::uint64_t>(std::max(1, launch.local_size));
  MemoryPlanFacts facts{.on_gpu = config.run.device != config::DeviceChoice::cpu};
  facts.free = facts.on_gpu ? limits.device_free : limits.host;
  if (config.memory.device_budget)
    facts.budget = static_cast<std::uint64_t>(*config.memory.device_budget);
  try {
    const std::vector<MemoryPlan> stages = plan_stages(config, limits);
    if (stages.empty()) return std::nullopt;
    for (const MemoryPlan& plan : stages) {
      facts.ranks = plan.ranks;
      facts.device = std::max<std::uint64_t>(facts.device, plan.total());
      facts.context = plan.runtime;
      facts.host = std::max(facts.host, bytes_of(plan.host));
      facts.file = std::max(facts.file, bytes_of(plan.file));
    }
  } catch (const ResourceError& e) {
    facts.shortage = e.what();
  }
  return facts;
}

// What a process finds; things of the whole machine are looked at by its first rank.
Findings examine(const LaunchFacts& launch, const CudaFacts& cuda, const Wishes& wishes) {
  const ProcessFacts process = read_process(wishes.threads);
  Findings findings = judge_launch(launch, process);
  append(findings, judge_process(process, launch));
  append(findings, judge_cuda(cuda, launch));
  append(findings, judge_limits(process));
  if (launch.local_rank != 0) return findings;
  append(
      findings,
      judge_shared_memory(
          read_shared_memory("/dev/shm"), launch.local_size, static_cast<int>(cuda.gpus.size())));
  DiskFacts disk = read_disk(wishes.folder);
  disk.checkpoint = wishes.checkpoint;
  disk.keep = wishes.keep;
  append(findings, judge_disk(disk));
  if (wishes.config) {
    if (const auto plan = read_memory_plan(*wishes.config, launch, cuda))
      findings.push_back(judge_memory_plan(*plan));
  }
  if (!wishes.offloads) return findings;
  OffloadFacts offload{.on_gpu = !cuda.gpus.empty(),
                       .host_budget = wishes.host_budget,
                       .available = available_host_memory(),
                       .file_budget = wishes.file_budget.value_or(0)};
  if (wishes.file_budget) offload.disk = read_disk(wishes.file_path);
  append(findings, judge_offload(offload, process, launch.local_size));
  return findings;
}

int report(const std::vector<RankFindings>& ranks, bool json) {
  const auto merged = merge(ranks);
  std::cout << (json ? json_of(merged) : text_of(merged)) << std::flush;
  return worst(merged) == Health::fail ? static_cast<int>(ExitCode::usage) : 0;
}

int run_doctor(const DoctorArguments& arguments) {
  Wishes wishes;
  const int problem = run_before_mpi([&] { wishes = wishes_of(arguments.config); });
  if (problem != 0) return problem;
  LaunchFacts launch = read_launch_facts();
  if (!launch.problem.empty()) {
    // MPI would end this process, or leave it alone; the rest can be said without.
    const int result = static_cast<int>(ExitCode::usage);
    if (launcher_rank() != 0) return result;
    return report({{host_name(), examine(launch, read_cuda(wishes.wants_cuda), wishes)}},
                  arguments.json);
  }
  return run_ranks({}, [&](const RankPlace& place) {
    launch.rank = place.world.rank();
    launch.size = place.world.size();
    launch.local_rank = place.local_rank;
    launch.local_size = place.local_size;
    const CudaFacts cuda = read_cuda(wishes.wants_cuda);
    RankFindings mine{host_name(), examine(launch, cuda, wishes)};
    append(mine.findings, judge_gpus_of_ranks(gpus_of_ranks(cuda, place.world), wishes.wants_cuda));
    if (launch.size > 1)
      append(mine.findings, judge_clock(measure_clock(place.world), launch.rank));
    std::vector<RankFindings> all;
    for (const std::string& text : place.world.all_gather_host(packed(mine)))
      all.push_back(unpacked(text));
    std::int64_t result = 0;
    if (launch.rank == 0) result = report(all, arguments.json);
    return static_cast<int>(place.world.all_reduce_host(result, ReduceOp::max));
  });
}

}  // namespace

void add_doctor(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand(
      "doctor", "Check MPI, GPUs, limits and disk of this machine, or of all ranks under mpirun");
  const auto arguments = std::make_shared<DoctorArguments>();
  verb->add_option("CONFIG",
                   arguments->config.path,
                   "Configuration file (YAML) whose run.dir, run.threads, run.device, "
                   "checkpoints, memory and experts.offload are checked, too");
  verb->add_option("OVERRIDES",
                   arguments->config.overrides,
                   "Settings that replace those of the file: section.key=value")
      ->expected(0, -1);
  verb->add_flag("--json", arguments->json, "Print JSON instead of a table");
  verb->footer(
      "A warning is something that works but will hurt; exit code 2 if anything fails.\n"
      "Example:\n"
      "  moesaic doctor configs/quickstart.yaml\n"
      "  mpirun -np 16 moesaic doctor configs/kimi_linear_48b.yaml\n");
  verb->callback([&action, arguments] { action = [arguments] { return run_doctor(*arguments); }; });
}

}  // namespace moesaic::apps
