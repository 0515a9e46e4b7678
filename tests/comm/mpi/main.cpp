// The conformance suite on MPI ranks, started by mpirun. `--nccl`: on GPUs, one per rank; `--share`: ranks may share one. `--abort CODE`: the last rank ends the job
// while the others wait for it in a barrier. `--library`: the
// library's own all-reduce instead of the suite. `--short`: messages are cut into short pieces.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "comm/device_communicator.h"
#include "comm/mpi_environment.h"
#include "memory/buffer.h"
#include "memory/device_hooks.h"
#include "tests/comm/conformance.h"

namespace moesaic::test {
namespace {

void library_reduction(Communicator& comm, Device device) {
  Stream stream(device, "test");
  std::vector<std::int64_t> v(3000);
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<std::int64_t>(i) + comm.rank();
  const TensorView host(reinterpret_cast<std::byte*>(v.data()), DType::i64, {3000});
  const Buffer memory(host.bytes(), device, "test");
  const TensorView there = memory.view({3000}, DType::i64);
  copy_tensor(there, host, stream);
  comm.all_reduce(there, ReduceOp::sum, stream);
  copy_tensor(host, there, stream);
  stream.synchronize();
  for (std::size_t i = 0; i < v.size(); ++i) {
    const auto wanted =
        static_cast<std::int64_t>(i) * comm.size() + comm.size() * (comm.size() - 1) / 2;
    if (v[i] != wanted) throw std::runtime_error("the library's all-reduce gave a wrong sum");
  }
}

struct Options {
  CommOptions comm;
  bool nccl = false, share = false, abort_test = false;
  int code = 0;
};

int run(const Options& options) {
  MpiEnvironment mpi(options.comm);
  Communicator& host = mpi.world();
  Device device = kCpu;
  std::unique_ptr<Communicator> on_device;
  if (options.nccl) {
    const int devices = cuda::device_count();
    if (devices == 0) throw UsageError("--nccl: no CUDA device");
    device = {Device::Kind::cuda, static_cast<std::int16_t>(mpi.local_rank() % devices)};
    cuda::select_device(device);
    on_device = make_device_communicator(
        host, device, {.reduction = options.comm.reduction, .share_gpu = options.share});
  }
  Communicator& world = on_device ? *on_device : host;
  const char* current = "start";
  try {
    if (mpi.local_rank() != world.rank() || mpi.local_size() != world.size()) {
      throw std::runtime_error("ranks of one machine must have their world ranks as local ranks");
    }
    if (options.abort_test) {
      if (world.rank() == world.size() - 1) world.abort(options.code, "planned");
      world.barrier();
      std::puts("the barrier was passed");
      return 0;
    }
    if (options.comm.reduction == Reduction::library) {
      current = "library reduction";
      library_reduction(world, device);
      return 0;
    }
    for (const auto& c : conformance_cases()) {
      if (c.host_only && device != kCpu) continue;
      current = c.name;
      c.body(world, device);
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
  moesaic::test::Options options;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--library") == 0)
      options.comm.reduction = moesaic::Reduction::library;
    if (std::strcmp(argv[i], "--abort") == 0 && i + 1 < argc) {
      options.abort_test = true;
      options.code = std::atoi(argv[++i]);
    }
    if (std::strcmp(argv[i], "--nccl") == 0) options.nccl = true;
    if (std::strcmp(argv[i], "--share") == 0) options.share = true;
    if (std::strcmp(argv[i], "--short") == 0) options.comm.max_message_bytes = 1001;
  }
  try {
    return moesaic::test::run(options);
  } catch (const moesaic::Error& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return static_cast<int>(e.exit_code());
  }
}
