#include "comm/launch_check.h"

#include <map>
#include <string>

#include "core/base/error.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

using Environment = std::map<std::string, std::string>;

EnvironmentLookup lookup(const Environment& environment) {
  return [&environment](const char* name) -> const char* {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  };
}

/// What is printed before MPI starts, or after it has; empty: the launch is right.
std::string refusal(const Environment& environment, int mpi_rank = 0, int mpi_size = 1) {
  try {
    check_launch_before_mpi(lookup(environment));
    check_launch(mpi_rank, mpi_size, lookup(environment));
    return "";
  } catch (const UsageError& error) {
    return error.what();
  }
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// As Slurm 22.05 and Open MPI 4.1 leave them.
const Environment kAllocationOf2 = {
    {"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "2"}, {"SLURM_PROCID", "0"}};
const Environment kStepOf2 = {{"SLURM_JOB_ID", "7"},
                              {"SLURM_NTASKS", "2"},
                              {"SLURM_PROCID", "1"},
                              {"SLURM_STEP_ID", "0"},
                              {"SLURM_STEP_NUM_TASKS", "2"}};

Environment with(Environment environment, const Environment& more) {
  for (const auto& [name, value] : more)
    environment[name] = value;
  return environment;
}

TEST_CASE("launch: who started this process") {
  const auto by = [](const Environment& e) { return read_launch(lookup(e)).by; };
  REQUIRE(by({}) == Launch::By::nobody);
  REQUIRE(by(kAllocationOf2) == Launch::By::allocation);
  REQUIRE(by(kStepOf2) == Launch::By::srun);
  REQUIRE(by(with(kStepOf2, {{"OMPI_COMM_WORLD_SIZE", "4"}})) == Launch::By::open_mpi);
  REQUIRE(by(with(kAllocationOf2, {{"PMI_SIZE", "4"}})) == Launch::By::pmi);
  REQUIRE(by({{"WORLD_SIZE", "4"}}) == Launch::By::nobody);
  REQUIRE(by({{"WORLD_SIZE", "4"}, {"TORCHELASTIC_RUN_ID", "x"}}) == Launch::By::torchrun);
  REQUIRE(by({{"SLURM_NTASKS", "many"}}) == Launch::By::nobody);
  REQUIRE(read_launch(lookup(kStepOf2)).size == 2);
  REQUIRE_FALSE(read_launch(lookup(kStepOf2)).joins);
}

TEST_CASE("launch: right ones are let through") {
  CHECK(refusal({}).empty());
  CHECK(refusal({{"SLURM_NTASKS", "1"}, {"SLURM_JOB_ID", "7"}}).empty());
  CHECK(refusal({{"WORLD_SIZE", "4"}, {"RANK", "0"}}).empty());
  // mpirun in a batch script or in the shell of salloc, with another number than the allocation's
  CHECK(
      refusal(with(kAllocationOf2, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "3"}}),
              3,
              4)
          .empty());
  CHECK(
      refusal(with(kAllocationOf2, {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}))
          .empty());
  // mpirun whose daemon on another node was started by srun: one task per node there
  CHECK(
      refusal(
          with(kStepOf2,
               {{"OMPI_COMM_WORLD_SIZE", "16"}, {"OMPI_COMM_WORLD_RANK", "9"}, {"PMIX_RANK", "9"}}),
          9,
          16)
          .empty());
  CHECK(refusal(with(kStepOf2, {{"PMIX_RANK", "1"}}), 1, 2).empty());
  // A component of a heterogeneous job: MPI sees them all.
  CHECK(refusal(with(kStepOf2, {{"PMIX_RANK", "1"}}), 1, 6).empty());
  // The shell of salloc as an interactive step of one task, in an allocation for two
  CHECK(refusal(
            with(kAllocationOf2, {{"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}}))
            .empty());
}

TEST_CASE("launch: processes that would each train alone are refused before MPI starts") {
  const auto early = [](const Environment& environment) {
    try {
      check_launch_before_mpi(lookup(environment));
      return std::string();
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
  };
  const std::string step = early(kStepOf2);
  CHECK(contains(step, "srun started this process as one of 2, without PMIx"));
  CHECK(contains(step, "SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1, SLURM_STEP_ID=0"));
  CHECK(contains(step, "2 processes would each train alone"));
  CHECK(contains(step, "srun --mpi=pmix -n 2 moesaic train"));
  const std::string allocation = early(kAllocationOf2);
  CHECK(contains(allocation, "inside a Slurm allocation for 2 tasks"));
  CHECK(contains(allocation, "SLURM_JOB_ID=7, SLURM_NTASKS=2"));
  CHECK(contains(allocation, "mpirun -np 1 moesaic train"));
  CHECK(contains(early({{"WORLD_SIZE", "4"}, {"RANK", "0"}, {"TORCHELASTIC_RUN_ID", "x"}}),
                 "torchrun"));
  // Here MPI may find the others; it is asked first.
  CHECK(early(with(kStepOf2, {{"PMIX_RANK", "1"}})).empty());
  CHECK(early({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}}).empty());
  CHECK(early({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}}).empty());
}

TEST_CASE("launch: a launcher that MPI did not understand is refused after MPI has started") {
  CHECK(contains(refusal({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}}), "MPICH or Intel MPI"));
  CHECK(contains(refusal({{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "1"}}),
                 "not the mpirun of the MPI library"));
  CHECK(contains(refusal(with(kStepOf2, {{"PMIX_RANK", "0"}})), "MPI sees rank 0 of 1"));
  CHECK(contains(refusal({{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}}, 0, 2),
                 "MPI sees rank 0 of 2"));
  CHECK(contains(refusal({{"PMIX_RANK", "1"}}), "contradict"));
  CHECK(contains(refusal(with(kStepOf2, {{"PMIX_RANK", "1"}}), 0, 2), "PMIX_RANK=1"));
}

}  // namespace
}  // namespace moesaic::test
