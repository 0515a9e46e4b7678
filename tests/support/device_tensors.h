#pragma once
// Tensors that own their memory, on either device, and the comparison of an op's CUDA result with
// its CPU result.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "memory/device_hooks.h"
#include "tests/support/catch.h"

namespace moesaic::test {

constexpr Device kCuda{Device::Kind::cuda, 0};

/// False, after a line with the reason, where no CUDA device can be used; a failure with
/// MOESAIC_REQUIRE_CUDA=1.
inline bool has_cuda() {
  if (cuda::device_count() > 0) return true;
  const char* required = std::getenv("MOESAIC_REQUIRE_CUDA");
  if (required != nullptr && std::string(required) == "1") {
    FAIL("MOESAIC_REQUIRE_CUDA=1, but there is no CUDA device, or no CUDA backend in this build");
  }
  std::printf("SKIPPED: %s: no CUDA device, or no CUDA backend in this build\n",
              Catch::getResultCapture().getCurrentTestName().c_str());
  return false;
}
/// First line of a test case that needs a device.
#define MOESAIC_NEEDS_CUDA() \
  if (!::moesaic::test::has_cuda()) return

class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(Shape shape, DType dtype, Device device = kCpu, MemoryKind kind = MemoryKind::device)
      : buffer_(
            std::max<std::size_t>(1, byte_size(dtype) * static_cast<std::size_t>(shape.numel())),
            device,
            "test",
            kind),
        view_(buffer_.view(shape, dtype)) {}
  TensorView view() const { return view_; }
  template <class T>
  T* data() const {
    return view_.as<T>();
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

/// Host views only: normal numbers with this spread, a function of `key` and the element's index.
inline void fill_normal(TensorView view,
                        std::uint64_t key,
                        double spread = 1.0,
                        double mean = 0.0) {
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      view.as<T>()[i] = T(mean + spread * standard_normal(key, static_cast<std::uint64_t>(i)));
    }
  });
}

/// |got - want| / |want| over all elements of two host views; infinite when any element is not
/// finite.
inline double relative_error(ConstTensorView got, ConstTensorView want) {
  double difference = 0, norm = 0;
  dispatch_float(want.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < want.numel(); ++i) {
      const double w = static_cast<double>(want.as<T>()[i]),
                   d = static_cast<double>(got.as<T>()[i]) - w;
      difference += d * d;
      norm += w * w;
    }
  });
  if (!std::isfinite(difference) || !std::isfinite(norm)) return INFINITY;
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}
inline bool same_bits(ConstTensorView a, ConstTensorView b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

/// Copies to the host and waits.
inline OwnedTensor download(ConstTensorView device, Stream& stream) {
  OwnedTensor host(device.shape(), device.dtype());
  copy_tensor(host.view(), device, stream);
  stream.synchronize();
  return host;
}

/// One argument of an op on both devices. `initial` is what a test fills; both sides start from it.
struct Twin {
  Twin(Shape shape, DType dtype)
      : initial(shape, dtype), host(shape, dtype), device(shape, dtype, kCuda) {}
  void reset(Stream& stream) const {
    std::memcpy(host.view().data(), initial.view().data(), initial.view().bytes());
    copy_tensor(device.view(), initial.view(), stream);
    stream.synchronize();
  }
  OwnedTensor initial, host, device;
};

struct BothBackends {
  explicit BothBackends(std::size_t cpu_scratch_bytes = std::size_t{64} << 20,
                        std::size_t cuda_scratch_bytes = std::size_t{256} << 20)
      : cpu({.device = kCpu,
             .mode = Stream::Mode::immediate,
             .num_threads = 2,
             .scratch_bytes = cpu_scratch_bytes,
             .name = "cpu"}),
        cuda({.device = kCuda, .scratch_bytes = cuda_scratch_bytes, .name = "cuda"}) {}
  BackendOwner cpu, cuda;
};

struct Output {
  const Twin* twin;
  double tolerance;  ///< of relative_error(); 0 = the bits of the CPU
};

/// Runs make_op(side) on the CPU and twice on the device, from the same initial values of all
/// `twins`; side(twin) is the view of a twin there. Requires every output within its tolerance of
/// the CPU's, and equal bits of the two device runs.
template <class MakeOp>
void require_cuda_matches_cpu(BothBackends& both,
                              const std::vector<const Twin*>& twins,
                              const std::vector<Output>& outputs,
                              const MakeOp& make_op) {
  const auto reset = [&] {
    for (const auto* twin : twins)
      twin->reset(both.cuda.stream());
  };
  const auto run_on_device = [&] {
    reset();
    run(both.cuda.backend(), make_op([](const Twin& t) { return t.device.view(); }));
    std::vector<OwnedTensor> results;
    for (const auto& output : outputs)
      results.push_back(download(output.twin->device.view(), both.cuda.stream()));
    return results;
  };
  const auto first = run_on_device(), second = run_on_device();
  reset();
  run(both.cpu.backend(), make_op([](const Twin& t) { return t.host.view(); }));
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    INFO("output " << i << " " << to_string(first[i].view().shape()) << " "
                   << name(first[i].view().dtype()));
    const auto want = outputs[i].twin->host.view();
    if (outputs[i].tolerance == 0) {
      CHECK(same_bits(first[i].view(), want));
    } else {
      CHECK(relative_error(first[i].view(), want) <= outputs[i].tolerance);
    }
    CHECK(same_bits(first[i].view(), second[i].view()));
  }
}

}  // namespace moesaic::test
