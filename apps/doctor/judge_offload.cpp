#include <fmt/format.h>

#include "apps/doctor/judge.h"
#include "apps/text_table.h"

namespace moesaic::apps::doctor {
namespace {

constexpr const char* kSeePlan = "moesaic plan with the same arguments shows what takes it";

std::string size(std::uint64_t bytes) {
  return binary(static_cast<std::int64_t>(bytes));
}

// Of all ranks of the machine.
Finding judge_host(const OffloadFacts& facts, int local_ranks) {
  const std::string what = "host memory";
  const std::string available = facts.available ? size(*facts.available) + " available"
                                                : "the system does not say how much is available";
  if (!facts.host_budget)
    return {Health::ok, what, available + "; memory.host_budget is not set", ""};
  const std::uint64_t wanted = *facts.host_budget * static_cast<std::uint64_t>(local_ranks);
  const std::string found = fmt::format(
      "{}; memory.host_budget of {} rank(s) is {}", available, local_ranks, size(wanted));
  if (facts.available && wanted > *facts.available)
    return {Health::warn,
            what,
            found,
            "a run that fills its budget will not get it: lower memory.host_budget, or give the "
            "job or container more memory"};
  return {Health::ok, what, found, ""};
}

Finding judge_file(const OffloadFacts& facts, int local_ranks) {
  const std::string what = "file tier";
  const DiskFacts& disk = *facts.disk;
  if (!disk.problem.empty())
    return {Health::fail,
            what,
            fmt::format("{}: {}", disk.folder, disk.problem),
            "memory.file_path must be a folder that this user can write to"};
  const std::uint64_t wanted = facts.file_budget * static_cast<std::uint64_t>(local_ranks);
  const std::string found = fmt::format(
      "{} on {}, {} free; memory.file_budget of {} rank(s) is {}; written at {:.0f} MB/s",
      disk.folder,
      disk.kind,
      size(disk.free),
      local_ranks,
      size(wanted),
      disk.bytes_per_second / 1e6);
  if (disk.is_memory)
    return {
        Health::warn,
        what,
        found,
        "this is memory, of which the file takes as much as it frees: choose a folder on a disk"};
  if (disk.is_network)
    return {Health::warn,
            what,
            found,
            "a network file system: every step waits for it; choose a folder on a local disk"};
  if (wanted > disk.free)
    return {Health::warn,
            what,
            found,
            "the disk has no room for files of that size: lower memory.file_budget, or choose "
            "another memory.file_path"};
  return {Health::ok, what, found, ""};
}

}  // namespace

Findings judge_offload(const OffloadFacts& facts, const ProcessFacts& process, int local_ranks) {
  Findings findings{judge_host(facts, local_ranks)};
  if (facts.disk) findings.push_back(judge_file(facts, local_ranks));
  const std::uint64_t wanted = facts.host_budget.value_or(1);
  if ((facts.on_gpu || facts.disk) && process.locked_memory && *process.locked_memory < wanted)
    findings.push_back(
        {Health::warn,
         "pinned memory",
         fmt::format("ulimit -l {} KiB", *process.locked_memory / 1024),
         "offloaded experts lie in pinned memory, and the file tier keeps its staging "
         "mapped: set memlock to unlimited (limits.conf; Slurm: "
         "PropagateResourceLimitsExcept=MEMLOCK; containers: --ulimit memlock=-1)"});
  return findings;
}

Finding judge_memory_plan(const MemoryPlanFacts& facts) {
  const std::string what = "memory plan";
  if (!facts.shortage.empty()) return {Health::fail, what, facts.shortage, kSeePlan};
  std::string found = fmt::format("a rank of {} needs {} of {}",
                                  facts.ranks,
                                  size(facts.device),
                                  facts.on_gpu ? "device memory" : "memory");
  if (facts.host > 0) found += fmt::format(", {} of host memory", size(facts.host));
  if (facts.file > 0) found += fmt::format(", {} of file", size(facts.file));
  if (facts.budget && facts.device > *facts.budget)
    return {Health::fail,
            what,
            fmt::format("{}; memory.device_budget is {}", found, size(*facts.budget)),
            std::string("the run does not start: raise it; ") + kSeePlan};
  // On a GPU its context is there already; without one, device and host are the same.
  const std::uint64_t wanted =
      facts.on_gpu ? facts.device - facts.context : facts.device + facts.host;
  if (facts.free && wanted > *facts.free)
    return {facts.on_gpu ? Health::fail : Health::warn,
            what,
            fmt::format("{}; here it has {}{}",
                        found,
                        size(*facts.free),
                        facts.on_gpu ? " of a GPU" : " available"),
            std::string("use more ranks and machines, activations.recompute or experts.offload; ") +
                kSeePlan};
  return {Health::ok, what, found, ""};
}

}  // namespace moesaic::apps::doctor
