// What `moesaic doctor` makes of what it finds. Reading is tested through the command line (tests/cli).
#include <string>

#include <nlohmann/json.hpp>

#include "apps/doctor/judge.h"
#include "apps/doctor/report.h"
#include "tests/support/catch.h"

namespace moesaic::apps::doctor {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20, kGiB = kMiB << 10;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The one that has this name.
Finding named(const Findings& findings, const std::string& what) {
  Finding result{Health::ok, "absent", "", ""};
  int count = 0;
  for (const Finding& f : findings) {
    if (f.what != what) continue;
    result = f;
    ++count;
  }
  INFO(what);
  REQUIRE(count == 1);
  // Whoever is warned is told what to do.
  CHECK((result.health == Health::ok) == result.advice.empty());
  return result;
}

LaunchFacts good_launch() {
  LaunchFacts facts;
  facts.launcher = "mpirun";
  facts.library = "Open MPI v4.1.4, package: Debian OpenMPI";
  facts.library_file = "/usr/lib/libmpi.so.40";
  facts.mpirun = "/usr/bin/mpirun";
  facts.size = 2;
  facts.local_size = 2;
  return facts;
}

TEST_CASE("doctor: host memory and disk for offloaded experts") {
  ProcessFacts process;
  OffloadFacts facts{.available = 20 * kGiB};
  CHECK(named(judge_offload(facts, process, 2), "host memory").found ==
        "20.00 GiB available; memory.host_budget is not set");
  facts.host_budget = 10 * kGiB;
  CHECK(named(judge_offload(facts, process, 2), "host memory").health == Health::ok);
  const Finding few = named(judge_offload(facts, process, 3), "host memory");
  CHECK(few.health == Health::warn);
  CHECK(contains(few.found, "memory.host_budget of 3 rank(s) is 30.00 GiB"));
  // Those of a toy model are not nothing.
  facts.host_budget = 20 << 10;
  CHECK(contains(named(judge_offload(facts, process, 2), "host memory").found, "is 40.00 KiB"));
  facts.host_budget = 10 * kGiB;
  facts.on_gpu = true;
  CHECK(judge_offload(facts, process, 2).size() == 1);
  process.locked_memory = 8 * kMiB;
  CHECK(contains(named(judge_offload(facts, process, 2), "pinned memory").found, "8192 KiB"));
  process.locked_memory.reset();
  facts.file_budget = 100 * kGiB;
  facts.disk = DiskFacts{.folder = "/scratch", .kind = "xfs", .free = 250 * kGiB};
  CHECK(named(judge_offload(facts, process, 2), "file tier").health == Health::ok);
  CHECK(
      contains(named(judge_offload(facts, process, 3), "file tier").advice, "memory.file_budget"));
  facts.disk->is_network = true;
  CHECK(contains(named(judge_offload(facts, process, 2), "file tier").advice, "local disk"));
  facts.disk->is_memory = true;
  CHECK(contains(named(judge_offload(facts, process, 2), "file tier").advice, "this is memory"));
  facts.disk->problem = "Permission denied";
  CHECK(named(judge_offload(facts, process, 2), "file tier").health == Health::fail);
}

TEST_CASE("doctor: the plan of a run's memory") {
  MemoryPlanFacts facts{.ranks = 4, .device = 30 * kGiB, .host = 20 * kGiB};
  const Finding good = judge_memory_plan(facts);
  CHECK(good.health == Health::ok);
  CHECK(good.advice.empty());
  CHECK(good.found == "a rank of 4 needs 30.00 GiB of memory, 20.00 GiB of host memory");
  facts.free = 50 * kGiB;
  CHECK(judge_memory_plan(facts).health == Health::ok);
  --*facts.free;
  CHECK(judge_memory_plan(facts).health == Health::warn);
  CHECK(contains(judge_memory_plan(facts).found, "here it has 50.00 GiB available"));
  facts.on_gpu = true;
  facts.budget = 30 * kGiB;
  facts.context = kGiB;
  facts.free = 29 * kGiB;
  CHECK(judge_memory_plan(facts).health == Health::ok);
  --*facts.free;
  const Finding full = judge_memory_plan(facts);
  CHECK(full.health == Health::fail);
  CHECK(contains(full.found, "30.00 GiB of device memory"));
  CHECK(contains(full.found, "here it has 29.00 GiB of a GPU"));
  --*facts.budget;
  CHECK(contains(judge_memory_plan(facts).found, "memory.device_budget is 30.00 GiB"));
  facts.shortage = "stage 1: not enough";
  CHECK(judge_memory_plan(facts).found == "stage 1: not enough");
  CHECK(judge_memory_plan(facts).health == Health::fail);
  CHECK(contains(judge_memory_plan(facts).advice, "moesaic plan"));
  facts = {.ranks = 1, .device = 3 * kMiB, .host = 500, .budget = 7 << 10};
  CHECK(judge_memory_plan(facts).found ==
        "a rank of 1 needs 3.00 MiB of memory, 500 B of host memory; memory.device_budget is 7.00 "
        "KiB");
}

TEST_CASE("doctor: launch, library, root") {
  const Findings good = judge_launch(good_launch(), {});
  CHECK(named(good, "launch").found == "mpirun; 2 rank(s), 2 on this machine");
  CHECK(named(good, "MPI").found == "Open MPI v4.1.4 (/usr/lib/libmpi.so.40); /usr/bin/mpirun");
  CHECK(good.size() == 2);
  LaunchFacts facts = good_launch();
  facts.problem = "srun started this without PMIx";
  facts.mpirun = "";
  ProcessFacts process;
  process.is_root = true;
  const Findings bad = judge_launch(facts, process);
  CHECK(named(bad, "launch").health == Health::fail);
  CHECK(named(bad, "MPI").health == Health::warn);
  CHECK(contains(named(bad, "root").advice, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"));
  process.mpirun_may_be_root = true;
  CHECK(judge_launch(good_launch(), process).size() == 2);
}

TEST_CASE("doctor: threads need processors") {
  ProcessFacts facts;
  facts.cpus = 1;
  facts.machine_cpus = 16;
  facts.threads = 4;
  facts.openblas_threads = "1";
  const Finding bound = named(judge_process(facts, good_launch()), "processors");
  CHECK(bound.health == Health::warn);  // mpirun binds to one core
  CHECK(contains(bound.advice, "slot:PE=4"));
  facts.cpus = 4;
  CHECK(named(judge_process(facts, good_launch()), "processors").health == Health::ok);
  LaunchFacts crowd = good_launch();
  crowd.local_size = 5;
  CHECK(named(judge_process(facts, crowd), "processors").found ==
        "5 ranks x 4 thread(s) on 16 processors");
  CHECK(named(judge_process(facts, crowd), "processors").health == Health::warn);
  CHECK(named(judge_process(facts, crowd), "OpenBLAS").health == Health::ok);
  facts.openblas_threads = "";
  CHECK(named(judge_process(facts, crowd), "OpenBLAS").health == Health::warn);
}

TEST_CASE("doctor: locked memory matters to RDMA, open files to all") {
  ProcessFacts facts;
  CHECK(named(judge_limits(facts), "locked memory").found == "ulimit -l unlimited");
  facts.locked_memory = 64 * kMiB;
  CHECK(named(judge_limits(facts), "locked memory").health == Health::ok);
  facts.has_infiniband = true;
  CHECK(named(judge_limits(facts), "locked memory").health == Health::warn);
  facts.open_files = 1023;
  CHECK(named(judge_limits(facts), "open files").health == Health::warn);
  facts.open_files = 1024;
  CHECK(named(judge_limits(facts), "open files").health == Health::ok);
}

TEST_CASE("doctor: shared memory of a container") {
  SharedMemoryFacts facts{true, true, 64 * kMiB, 64 * kMiB};
  CHECK(shared_memory_needed(1, 0) == 32 * kMiB);
  CHECK(shared_memory_needed(1, 8) == 640 * kMiB);
  CHECK(judge_shared_memory(facts, 2, 0).front().health == Health::ok);
  CHECK(judge_shared_memory(facts, 8, 0).front().health == Health::warn);
  const Finding gpu = judge_shared_memory(facts, 1, 1).front();
  CHECK(gpu.health == Health::warn);
  CHECK(contains(gpu.advice, "--shm-size"));
  facts = {true, true, 8 * kGiB, 20 * kMiB};  // full of what others left
  CHECK(judge_shared_memory(facts, 2, 0).front().health == Health::warn);
  facts = {true, false, 8 * kGiB, 8 * kGiB};
  CHECK(contains(judge_shared_memory(facts, 2, 0).front().found, "not writable"));
  CHECK(judge_shared_memory(facts, 2, 0).front().health == Health::fail);
  CHECK(judge_shared_memory({}, 2, 0).front().health == Health::fail);
}

TEST_CASE("doctor: the disk of run.dir") {
  DiskFacts facts;
  facts.folder = "/data";
  facts.kind = "ext4";
  facts.free = 100 * kGiB;
  facts.fsync_seconds = 0.004;
  facts.bytes_per_second = 5e8;
  CHECK(judge_disk(facts).size() == 1);
  CHECK(named(judge_disk(facts), "disk").found ==
        "/data on ext4, 100 GiB free, fsync 4.0 ms, 500 MB/s");
  facts.checkpoint = 30 * kGiB;
  facts.keep = 2;
  CHECK(named(judge_disk(facts), "room").health == Health::ok);
  facts.keep = 3;  // the fourth is written before the first is removed
  CHECK(named(judge_disk(facts), "room").health == Health::warn);
  facts.checkpoint = 101 * kGiB;
  CHECK(named(judge_disk(facts), "room").health == Health::fail);
  facts.fsync_seconds = 0.3;
  CHECK(named(judge_disk(facts), "disk").health == Health::warn);
  facts.is_network = true;
  CHECK(contains(named(judge_disk(facts), "disk").advice, "network file system"));
  facts.is_memory = true;
  CHECK(contains(named(judge_disk(facts), "disk").advice, "this is memory"));
  facts.problem = "Permission denied";
  CHECK(named(judge_disk(facts), "disk").health == Health::fail);
  CHECK(judge_disk(facts).size() == 1);
}

TEST_CASE("doctor: GPUs") {
  CudaFacts facts;
  facts.nccl = "none";
  CHECK(named(judge_cuda(facts, {}), "CUDA").health == Health::ok);  // a build for the CPU
  facts.is_asked_for = true;
  CHECK(named(judge_cuda(facts, {}), "CUDA").health == Health::fail);
  facts.is_built = true;
  facts.runtime = 13000;
  facts.problem = "no CUDA driver was found";
  CHECK(named(judge_cuda(facts, {}), "CUDA").found ==
        "driver for CUDA none, built with 13.0, 0 device(s)");
  CHECK(named(judge_cuda(facts, {}), "CUDA").health == Health::fail);
  facts.is_asked_for = false;
  CHECK(named(judge_cuda(facts, {}), "CUDA").health == Health::warn);
  facts.driver = 12040;
  GpuFacts gpu;
  gpu.name = "NVIDIA H200";
  gpu.ecc = true;
  gpu.total = 140 * kGiB;
  gpu.free = 139 * kGiB;
  facts.gpus = {gpu};
  CHECK(named(judge_cuda(facts, {}), "GPU 0").health == Health::ok);
  CHECK(named(judge_cuda(facts, {}), "NCCL").health == Health::ok);  // one rank does without
  CHECK(named(judge_cuda(facts, good_launch()), "NCCL").health == Health::warn);
  facts.gpus.front().ecc = false;
  CHECK(named(judge_cuda(facts, {}), "GPU 0").health == Health::warn);
  facts.gpus.front().free = 100 * kGiB;
  CHECK(contains(named(judge_cuda(facts, {}), "GPU 0").advice, "other processes"));
  facts.gpus.front().problem = "compute capability 8.0";
  CHECK(named(judge_cuda(facts, {}), "GPU 0").health == Health::fail);
}

TEST_CASE("doctor: which rank gets which GPU") {
  const auto line = [](const GpusOfRanks& facts, bool is_asked_for = true) {
    return named(judge_gpus_of_ranks(facts, is_asked_for), "GPU per rank");
  };
  CHECK(judge_gpus_of_ranks({{"m", "m"}, {{}, {}}}, true).empty());
  CHECK(line({{"m", "m", "n"}, {{"a", "b"}, {"a", "b"}, {"c"}}}).health == Health::ok);
  const Finding own = line({{"m", "m"}, {{"a"}, {"b"}}});
  CHECK(own.health == Health::warn);
  CHECK(contains(own.found, "2 rank(s), 2 different GPU(s); each has one"));
  CHECK(contains(own.advice, "--gpus-per-node"));
  const Finding few = line({{"m", "m"}, {{"GPU-7"}, {"GPU-7"}}});
  CHECK(few.health == Health::fail);
  CHECK(contains(few.advice, "rank 1 finds none that no other rank uses (it sees GPU-7)"));
  CHECK(line({{"m", "m"}, {{"a"}, {"a"}}}, false).health == Health::warn);
}

TEST_CASE("doctor: clocks of ranks") {
  CHECK(judge_clock({0.4, 0.001}, 3).front().health == Health::ok);
  CHECK(judge_clock({-2.5, 2.0}, 3).front().health == Health::ok);  // within what was measurable
  const Finding far = judge_clock({-2.5, 0.001}, 3).front();
  CHECK(far.health == Health::warn);
  CHECK(contains(far.found, "rank 3's differs from rank 0's by -2.500 s"));
}

TEST_CASE("doctor: equal findings of machines become one line") {
  const Finding disk{Health::ok, "disk", "ext4", ""}, slow{Health::warn, "disk", "nfs", "move"};
  const Finding gpu{Health::fail, "GPU 0", "broken\nlines", "one\ntwo"};
  const std::vector<RankFindings> ranks{{"a", {gpu, disk}}, {"a", {gpu}}, {"b", {slow, gpu}}};
  const auto merged = merge(ranks);
  REQUIRE(merged.size() == 3);
  CHECK(merged[0].finding.what == "GPU 0");
  CHECK(merged[0].hosts.empty());  // everywhere
  CHECK(merged[1].hosts == std::vector<std::string>{"a"});
  CHECK(merged[2].hosts == std::vector<std::string>{"b"});
  CHECK(worst(merged) == Health::fail);
  const std::string text = text_of(merged);
  CHECK(contains(text, "warn  disk           nfs  [b]\n                     -> move\n"));
  CHECK(contains(text, "-> one\n                     two\n"));
  CHECK(contains(text, "3 checked: 1 failed, 1 warning(s)"));
  const auto json = nlohmann::json::parse(json_of(merged));
  CHECK(json["ok"] == false);
  CHECK(json["findings"][2]["hosts"][0] == "b");
  CHECK(json["findings"][0]["health"] == "fail");
  for (const RankFindings& rank : ranks) {
    const RankFindings again = unpacked(packed(rank));
    CHECK(again.host == rank.host);
    REQUIRE(again.findings.size() == rank.findings.size());
    CHECK(again.findings[0].advice == rank.findings[0].advice);
    CHECK(again.findings[0].health == rank.findings[0].health);
  }
  CHECK_NOTHROW(unpacked(packed({"\xff", {{Health::ok, "disk", "\xfe", ""}}})));
}

}  // namespace
}  // namespace moesaic::apps::doctor
