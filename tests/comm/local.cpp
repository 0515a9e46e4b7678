#include <map>
#include <string>

#include "comm/communicator.h"
#include "comm/mpi_environment.h"
#include "tests/comm/conformance.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

TEST_CASE("local communicators pass the conformance suite") {
  for (int size = 1; size <= 4; ++size) {
    for (const auto& c : conformance_cases()) {
      INFO(c.name << " on " << size << " ranks");
      REQUIRE_NOTHROW(run_local_ranks(size, [&](Communicator& comm) { c.body(comm, kCpu); }));
    }
  }
}

TEST_CASE("a rank that fails releases the others, and its error comes out") {
  REQUIRE_THROWS_WITH(run_local_ranks(3,
                                      [](Communicator& comm) {
                                        if (comm.rank() == 1) throw UsageError("rank 1 had enough");
                                        comm.barrier();
                                      }),
                      "rank 1 had enough");
}

TEST_CASE("abort ends every rank with one code") {
  int code = 0;
  try {
    run_local_ranks(3, [](Communicator& comm) {
      if (comm.rank() == 2) comm.abort(5, "too many bad steps");
      Stream stream(kCpu, "test");
      double value = 1;
      comm.all_reduce(
          TensorView(reinterpret_cast<std::byte*>(&value), DType::f64, {1}), ReduceOp::sum, stream);
      stream.synchronize();
    });
  } catch (const Error& e) {
    code = static_cast<int>(e.exit_code());
  }
  REQUIRE(code == 5);
}

void launch(std::map<std::string, std::string> environment, int rank, int size) {
  check_launch(rank, size, [&](const char* name) -> const char* {
    const auto it = environment.find(name);
    return it == environment.end() ? nullptr : it->second.c_str();
  });
}

TEST_CASE("a launcher that MPI does not know is refused") {
  REQUIRE_NOTHROW(launch({}, 0, 1));
  REQUIRE_NOTHROW(launch(
      {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "3"}, {"SLURM_NTASKS", "8"}}, 3, 4));
  REQUIRE_NOTHROW(launch({{"SLURM_NTASKS", "2"}, {"PMIX_RANK", "1"}}, 1, 2));
  REQUIRE_THROWS_AS(launch({{"SLURM_NTASKS", "2"}}, 0, 1), UsageError);
  REQUIRE_THROWS_AS(launch({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}}, 0, 1), UsageError);
  REQUIRE_THROWS_AS(launch({{"OMPI_COMM_WORLD_SIZE", "2"}}, 0, 1), UsageError);
  REQUIRE_THROWS_AS(launch({{"PMIX_RANK", "1"}}, 0, 1), UsageError);
}

}  // namespace
}  // namespace moesaic::test
