#pragma once
#include <string>
#include <variant>

#include "core/base/tensor.h"
#include "memory/buffer.h"
#include "memory/stream.h"

namespace moesaic {

class ThreadPool;

/// Work an op does: multiply-adds count two, bytes count each operand once.
struct OpCost {
  double flops = 0;
  double bytes = 0;
};

/// Sees every op of a backend pass. CPU: both calls come from the thread that runs the stream's tasks, before and after
/// the op's work. CUDA: both come from the host thread that enqueues, before and after the launch; who wants times
/// records Timestamps there.
class OpObserver {
 public:
  virtual ~OpObserver() = default;
  virtual void begin(const char* op) = 0;
  virtual void end(const char* op, const OpCost& cost) = 0;
};

/// Where an op runs: a stream, a scratch arena for temporaries, and the backend's handles.
struct CpuContext {
  Stream& stream;
  Arena& scratch;
  ThreadPool& pool;
  OpObserver* observer =
      nullptr;  ///< not owned; null: nobody looks, and it costs one branch per op
};
/// Which of its kernels an op of the CUDA backend may take. `plain` ones take any size and dtype; the others take the
/// sizes that large models have, faster. `separate`: as automatic, but what several ops can do runs as those. Tests and
/// `bench` compare them.
enum class KernelPath : std::uint8_t { automatic, plain, separate };

/// Told by launch(), on the host, which kernel it chose. `path` is "plain", "tiled", or what the op's file documents.
class PathObserver {
 public:
  virtual ~PathObserver() = default;
  virtual void ran(const char* op, const char* path) = 0;
};

struct CudaContext {
  Stream& stream;
  Arena& scratch;
  void* blas_lt = nullptr;  ///< from create_blas_lt() (kernels/cuda_handles.h)
  int num_sms = 0;
  KernelPath path = KernelPath::automatic;
  PathObserver* paths = nullptr;   ///< not owned; null: nobody asks
  OpObserver* observer = nullptr;  ///< not owned; null: nobody looks
};
using Backend = std::variant<CpuContext, CudaContext>;

inline Stream& stream_of(Backend& backend) {
  return std::visit([](auto& c) -> Stream& { return c.stream; }, backend);
}
inline Arena& scratch_of(Backend& backend) {
  return std::visit([](auto& c) -> Arena& { return c.scratch; }, backend);
}

/// True when the CUDA backend has a launch() for Op. Ops without one are listed before a CUDA run starts.
template <class Op>
concept HasCuda = requires(CudaContext& context, const Op& op) {
  launch(context, op);
};

[[noreturn]] void throw_no_cuda_kernel(const char* op);

/// Enqueues `op` between two calls of the context's observer.
template <class Op>
void launch_observed(CpuContext& context, const Op& op) {
  OpObserver* const observer = context.observer;
  context.stream.enqueue([observer] { observer->begin(Op::kName); });
  launch(context, op);
  context.stream.enqueue([observer, cost = op.cost()] { observer->end(Op::kName, cost); });
}

template <class Op>
void launch_observed(CudaContext& context, const Op& op) {
  context.observer->begin(Op::kName);
  launch(context, op);
  context.observer->end(Op::kName, op.cost());
}

/// Checks `op` and enqueues it where `backend` lives.
///
/// An op is a struct of named arguments: `kName`, tensors, numbers, `check()` (throws InternalError on wrong shapes or
/// dtypes) and `cost()`. A backend implements it by overloading launch(Context&, const Op&); a missing CPU overload
/// does not compile. The rules of every launch():
///   - it enqueues on context.stream and returns; tensor data is touched inside the stream only, so that a dry stream
///     can run the host code of a whole step;
///   - temporaries come from context.scratch, taken on the host before enqueuing, inside an Arena::Mark;
///   - it never allocates, synchronises, or reads a global; sizes that routing decides are read from tensors;
///   - results are overwritten unless the op's comment says that they accumulate (parameter gradients do);
///   - the same arguments give the same bits, whatever the number of threads.
template <class Op>
void run(Backend& backend, const Op& op) {
  op.check();
  if (auto* cpu = std::get_if<CpuContext>(&backend)) {
    if (cpu->observer != nullptr) return launch_observed(*cpu, op);
    launch(*cpu, op);
  } else if constexpr (HasCuda<Op>) {
    auto& cuda = std::get<CudaContext>(backend);
    if (cuda.observer != nullptr) return launch_observed(cuda, op);
    launch(cuda, op);
  } else {
    throw_no_cuda_kernel(Op::kName);
  }
}

}  // namespace moesaic
