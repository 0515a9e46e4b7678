// The conformance suite on MPI ranks, started by mpirun. `--abort CODE`: the last rank ends the job
// while the others wait for it in a barrier. `--library`: the
// library's own all-reduce instead of the suite. `--short`: messages are cut into short pieces.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "comm/mpi_environment.h"
#include "tests/comm/conformance.h"

namespace moesaic::test {
namespace {

void library_reduction(Communicator& comm) {
  Stream stream(kCpu, "test");
  std::vector<std::int64_t> v(3000);
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<std::int64_t>(i) + comm.rank();
  comm.all_reduce(TensorView(reinterpret_cast<std::byte*>(v.data()), DType::i64, {3000}),
                  ReduceOp::sum,
                  stream);
  stream.synchronize();
  for (std::size_t i = 0; i < v.size(); ++i) {
    const auto wanted =
        static_cast<std::int64_t>(i) * comm.size() + comm.size() * (comm.size() - 1) / 2;
    if (v[i] != wanted) throw std::runtime_error("the library's all-reduce gave a wrong sum");
  }
}

int run(const CommOptions& options, bool abort_test, int code) {
  MpiEnvironment mpi(options);
  Communicator& world = mpi.world();
  const char* current = "start";
  try {
    if (mpi.local_rank() != world.rank() || mpi.local_size() != world.size()) {
      throw std::runtime_error("ranks of one machine must have their world ranks as local ranks");
    }
    if (abort_test) {
      if (world.rank() == world.size() - 1) world.abort(code, "planned");
      world.barrier();
      std::puts("the barrier was passed");
      return 0;
    }
    if (options.reduction == Reduction::library) {
      current = "library reduction";
      library_reduction(world);
      return 0;
    }
    for (const auto& c : conformance_cases()) {
      current = c.name;
      c.body(world);
      if (world.rank() == 0) std::printf("passed on %d ranks: %s\n", world.size(), c.name);
    }
  } catch (const std::exception& e) {
    world.abort(1, std::string(current) + ": " + e.what());
  }
  return 0;
}

}  // namespace
}  // namespace moesaic::test

int main(int argc, char** argv) {
  moesaic::CommOptions options;
  bool abort_test = false;
  int code = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--library") == 0) options.reduction = moesaic::Reduction::library;
    if (std::strcmp(argv[i], "--abort") == 0 && i + 1 < argc) {
      abort_test = true;
      code = std::atoi(argv[++i]);
    }
    if (std::strcmp(argv[i], "--short") == 0) options.max_message_bytes = 1001;
  }
  try {
    return moesaic::test::run(options, abort_test, code);
  } catch (const moesaic::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return static_cast<int>(e.exit_code());
  }
}
