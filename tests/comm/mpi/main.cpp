// The conformance suite on MPI ranks, started by mpirun.
//   --nccl          on GPUs, one per rank; --share: ranks may share one, as ranks of different machines
//   --delays SEED   every operation after a drawn pause, so that the ranks meet in every order
//   --short         messages are cut into short pieces
//   --large         messages beyond 2 GiB instead of the suite; two ranks
//   --library       the library's own all-reduce instead of the suite
//   --abort CODE    the last rank ends the job while the others wait for it in a barrier
//   --spin FOLDER, --mismatch FOLDER   the last rank computes for ever, or enters another operation than the others, under
//                   watchdogs that meet in FOLDER
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

#include "comm/device_communicator.h"
#include "comm/mpi_environment.h"
#include "comm/watchdog.h"
#include "core/base/activity.h"
#include "memory/buffer.h"
#include "memory/device_hooks.h"
#include "tests/comm/conformance.h"
#include "tests/comm/delayed.h"

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
  bool nccl = false, share = false, large = false, abort_test = false, mismatch = false;
  std::optional<std::uint64_t> delays;
  std::string board;
  int code = 0;
};

// Why the large cases cannot run here; empty when they can.
std::string no_memory(int ranks) {
  std::ifstream file("/proc/meminfo");
  std::string name, unit;
  for (double kib = 0; file >> name >> kib; std::getline(file, unit)) {
    const double needed = 2.5 * ranks;
    if (name == "MemAvailable:" && kib / 1048576 < needed + 1)
      return "this machine has " + std::to_string(kib / 1048576) + " GiB, " +
             std::to_string(needed + 1) + " are needed";
  }
  return "";
}

// The last rank never comes, or does something else: the others' watchdogs end the job.
int hang(Communicator& world, Device device, const Options& options, const Activity& activity) {
  const bool last = world.rank() == world.size() - 1;
  Watchdog watchdog(activity,
                    {.limit_s = 2, .long_limit_s = 3, .rank = world.rank(), .closing = "planned"});
  if (world.rank() == 0) std::filesystem::create_directories(options.board);
  world.barrier();
  watchdog.use_board(options.board, "test", world.rank(), world.size());
  const PeriodScope period("testing", false);
  Stream stream(device, "test");
  const Buffer memory(8000, device, "test");
  const TensorView view = memory.view({1000}, DType::f64);
  zero_tensor(view, stream);
  for (int i = 0; i < 3; ++i)
    world.all_reduce(view, ReduceOp::sum, stream);
  stream.synchronize();
  if (last && options.mismatch) {
    world.barrier();
  } else if (last) {
    for (;;)  // no work that counts
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  world.all_reduce(view, ReduceOp::sum, stream);
  stream.synchronize();
  std::puts("the exchange was passed");
  return 0;
}

void run_cases(Communicator& world, Device device, const Options& options, const char*& current) {
  const auto cases = options.large ? large_cases() : conformance_cases();
  for (const auto& c : cases) {
    if (c.host_only && device != kCpu) continue;
    current = c.name;
    if (options.delays) {
      Delayed delayed(world, *options.delays);
      c.body(delayed, device);
    } else {
      c.body(world, device);
    }
    if (world.rank() != 0) continue;
    std::printf("passed on %d ranks: %s\n", world.size(), c.name);
    std::fflush(stdout);
  }
}

int run(Options options) {
  Activity activity;
  const ActivityOfThread here(&activity);
  options.comm.activity = &activity;
  MpiEnvironment mpi(options.comm);
  Communicator& host = mpi.world();
  Device device = kCpu;
  std::unique_ptr<Communicator> on_device;
  if (options.large && !options.nccl) {
    std::string problem = no_memory(host.size());
    host.broadcast_host(problem, 0);
    if (!problem.empty()) {
      if (host.rank() == 0) std::printf("SKIPPED: %s\n", problem.c_str());
      return 0;
    }
  }
  if (options.nccl) {
    const int devices = cuda::device_count();
    if (devices == 0) throw UsageError("--nccl: no CUDA device");
    device = {Device::Kind::cuda, static_cast<std::int16_t>(mpi.local_rank() % devices)};
    cuda::select_device(device);
    on_device = make_device_communicator(
        host,
        device,
        {.reduction = options.comm.reduction, .share_gpu = options.share, .activity = &activity});
  }
  Communicator& world = on_device ? *on_device : host;
  const char* current = "start";
  try {
    if (mpi.local_rank() != world.rank() || mpi.local_size() != world.size()) {
      throw std::runtime_error("ranks of one machine must have their world ranks as local ranks");
    }
    if (!options.board.empty()) return hang(world, device, options, activity);
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
    run_cases(world, device, options, current);
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
    if (std::strcmp(argv[i], "--delays") == 0 && i + 1 < argc)
      options.delays = std::strtoull(argv[++i], nullptr, 10);
    if ((std::strcmp(argv[i], "--spin") == 0 || std::strcmp(argv[i], "--mismatch") == 0) &&
        i + 1 < argc) {
      options.mismatch = std::strcmp(argv[i], "--mismatch") == 0;
      options.board = argv[++i];
    }
    if (std::strcmp(argv[i], "--large") == 0) options.large = true;
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
