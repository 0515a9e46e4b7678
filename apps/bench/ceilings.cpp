#include "apps/bench/ceilings.h"

#include <algorithm>
#include <cmath>

#include "apps/bench/timing.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/initial_values.h"

namespace moesaic::bench {
namespace {

constexpr std::size_t kScratchBytes = std::size_t{128} << 20;
constexpr double kLeastSeconds = 2e-4;  // of a sample
constexpr int kMostCalls = 200;

}  // namespace

double device_seconds(BackendOwner& owner, const std::function<void(Backend&)>& call, int samples) {
  Stream& stream = owner.stream();
  const Device device = stream.device();
  const auto time = [&](int calls) {
    Timestamp from(device), to(device);
    stream.record(from);
    for (int i = 0; i < calls; ++i)
      call(owner.backend());
    stream.record(to);
    return seconds_between(from, to) / calls;
  };
  call(owner.backend());  // loads kernels, chooses algorithms
  const double first = std::max(time(1), 1e-7);
  const int calls = std::clamp(static_cast<int>(std::ceil(kLeastSeconds / first)), 1, kMostCalls);
  std::vector<double> times;
  for (int i = 0; i < samples; ++i)
    times.push_back(time(calls));
  return median(times);
}

Ceilings measure_ceilings(Device device) {
  BackendOwner owner({.device = device, .scratch_bytes = kScratchBytes, .name = "ceilings"});
  Ceilings ceilings;
  {
    constexpr std::int64_t kBytes = std::int64_t{2} << 30;
    const Buffer from(kBytes, device, "ceilings"), to(kBytes, device, "ceilings");
    const TensorView source = from.view({kBytes / 4}, DType::f32),
                     target = to.view({kBytes / 4}, DType::f32);
    run(owner.backend(), InitialValues{.y = source, .key = 1});
    const double seconds = device_seconds(
        owner, [&](Backend& backend) { copy_tensor(target, source, stream_of(backend)); });
    ceilings.bytes_per_second = 2.0 * static_cast<double>(kBytes) / seconds;
  }
  constexpr std::int64_t kSize = 8192;
  constexpr std::size_t kMatrixBytes = std::size_t{2} * kSize * kSize;
  const Buffer memory(3 * kMatrixBytes, device, "ceilings");
  const auto matrix = [&](std::size_t i) {
    return memory.view({kSize, kSize}, DType::bf16, i * kMatrixBytes);
  };
  for (std::size_t i = 0; i < 3; ++i)
    run(owner.backend(), InitialValues{.y = matrix(i), .key = 2 + i});
  const double seconds = device_seconds(owner, [&](Backend& backend) {
    run(backend, linear_forward(matrix(0), matrix(1), matrix(2)));
  });
  ceilings.flops_per_second = 2.0 * kSize * kSize * kSize / seconds;
  return ceilings;
}

double share_of_ceiling(const OpCost& cost, double seconds, const Ceilings& ceilings) {
  return std::max(cost.flops / seconds / ceilings.flops_per_second,
                  cost.bytes / seconds / ceilings.bytes_per_second);
}

}  // namespace moesaic::bench
