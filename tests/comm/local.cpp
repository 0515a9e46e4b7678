#include "comm/communicator.h"
#include "tests/comm/conformance.h"
#include "tests/comm/delayed.h"
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

TEST_CASE("ranks that come late pass the conformance suite") {
  for (const auto& c : conformance_cases()) {
    INFO(c.name);
    REQUIRE_NOTHROW(run_local_ranks(3, [&](Communicator& comm) {
      Delayed delayed(comm, 1);
      c.body(delayed, kCpu);
    }));
  }
}

// 4.5 GiB of memory; `test_comm "[.large]"`.
TEST_CASE("messages beyond 2 GiB between local ranks", "[.large]") {
  for (const auto& c : large_cases()) {
    INFO(c.name);
    REQUIRE_NOTHROW(run_local_ranks(2, [&](Communicator& comm) { c.body(comm, kCpu); }));
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

}  // namespace
}  // namespace moesaic::test
