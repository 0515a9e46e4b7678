// Rates of the grouped products at the sizes that large models have. Hidden: named on the command line only.
#include <algorithm>
#include <chrono>

#include "tests/cuda/grouped_support.h"

namespace moesaic::test {
namespace {

// Random numbers on the device: power, and with it the clock, depends on the data. One block from the host, repeated.
class RandomBlock {
 public:
  explicit RandomBlock(Stream& stream)
      : host_({kSize}, DType::bf16), device_({kSize}, DType::bf16, kCuda), stream_(stream) {
    fill_normal(host_.view(), 1);
    copy_tensor(device_.view(), host_.view(), stream);
    stream.synchronize();
  }
  void fill(const TensorView& view) const {
    const TensorView flat = view.reshaped({view.numel()});
    for (std::int64_t i = 0; i < view.numel(); i += kSize) {
      const std::int64_t size = std::min(kSize, view.numel() - i);
      copy_tensor(flat.rows(i, i + size), device_.view().rows(0, size), stream_);
    }
  }

 private:
  static constexpr std::int64_t kSize = (std::int64_t{1} << 23) + 8;
  OwnedTensor host_, device_;
  Stream& stream_;
};

struct Timing {
  double seconds, host_seconds;  // per op: until done, and of the call alone
};
// Median of `kSamples`; several ops per sample, so that starting and waiting count little.
template <class Op>
Timing time_op(BackendOwner& owner, const Op& op) {
  using Clock = std::chrono::steady_clock;
  constexpr int kSamples = 31, kOps = 4;
  std::vector<double> total, host;
  for (int sample = -2; sample < kSamples; ++sample) {
    owner.stream().synchronize();
    const auto start = Clock::now();
    for (int i = 0; i < kOps; ++i)
      run(owner.backend(), op);
    const auto enqueued = Clock::now();
    owner.stream().synchronize();
    if (sample < 0) continue;
    total.push_back(std::chrono::duration<double>(Clock::now() - start).count() / kOps);
    host.push_back(std::chrono::duration<double>(enqueued - start).count() / kOps);
  }
  const auto median = [](std::vector<double>& v) {
    std::nth_element(v.begin(), v.begin() + kSamples / 2, v.end());
    return v[kSamples / 2];
  };
  return {median(total), median(host)};
}

void report(const char* op, const Timing& t, double flops, double bytes) {
  std::printf("  %-14s %8.3f ms  %6.1f TFLOP/s  %6.0f GB/s  (host %.1f us)\n",
              op,
              t.seconds * 1e3,
              flops / t.seconds * 1e-12,
              bytes / t.seconds * 1e-9,
              t.host_seconds * 1e6);
}

void bench(BackendOwner& owner,
           const RandomBlock& random,
           std::int64_t experts,
           const std::vector<std::int32_t>& rows_of_expert,
           std::int64_t k,
           std::int64_t n) {
  Routing routing;
  routing.rows = rows_of_expert;
  routing.num_slots = experts;
  for (std::int32_t e = 0; e < experts; ++e)
    routing.slots.push_back(e);
  const std::int64_t rows = routing.rows_bound();
  auto& stream = owner.stream();
  Twin offsets({experts + 1}, DType::i32), slots({experts}, DType::i32);
  fill_ints(offsets.initial.view(), routing.offsets());
  fill_ints(slots.initial.view(), routing.slots);
  offsets.reset(stream);
  slots.reset(stream);
  const TensorView o = offsets.device.view(), s = slots.device.view();
  OwnedTensor x({rows, k}, DType::bf16, kCuda), y({rows, n}, DType::bf16, kCuda);
  random.fill(x.view());
  random.fill(y.view());
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(n * k),
               row_bytes = static_cast<double>(x.view().bytes() + y.view().bytes());
  std::printf("%lld experts, %lld rows, k %lld, n %lld\n",
              static_cast<long long>(experts),
              static_cast<long long>(rows),
              static_cast<long long>(k),
              static_cast<long long>(n));
  {
    OwnedTensor w({experts, n, k}, DType::bf16, kCuda);
    random.fill(w.view());
    const double bytes = row_bytes + static_cast<double>(w.view().bytes());
    report(
        "input gradient",
        time_op(
            owner,
            GroupedLinearBackwardInput{
                .dx = x.view(), .dy = y.view(), .w = w.view(), .offsets = o, .slot_of_expert = s}),
        flops,
        bytes);
    random.fill(x.view());
    report("forward",
           time_op(
               owner,
               GroupedLinearForward{
                   .y = y.view(), .x = x.view(), .w = w.view(), .offsets = o, .slot_of_expert = s}),
           flops,
           bytes);
  }
  random.fill(y.view());
  for (const DType type : {DType::f32, DType::bf16}) {
    OwnedTensor dw({experts, n, k}, type, kCuda);
    zero_tensor(dw.view(), stream);
    report(
        type == DType::f32 ? "dw += in f32" : "dw += in bf16",
        time_op(
            owner,
            GroupedLinearBackwardWeight{
                .dw = dw.view(), .dy = y.view(), .x = x.view(), .offsets = o, .slot_of_expert = s}),
        flops,
        row_bytes + 2.0 * static_cast<double>(dw.view().bytes()));
  }
}

}  // namespace

TEST_CASE("rates of the grouped products", "[.bench][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BackendOwner owner({.device = kCuda, .scratch_bytes = std::size_t{64} << 20, .name = "bench"});
  const RandomBlock random(owner.stream());
  const auto even = [](std::int64_t experts, std::int32_t rows) {
    return std::vector<std::int32_t>(static_cast<std::size_t>(experts), rows);
  };
  bench(owner, random, 64, even(64, 1024), 3584, 6144);
  bench(owner, random, 112, even(112, 1170), 3584, 6144);
  bench(owner, random, 112, even(112, 1170), 3072, 3584);
  bench(owner, random, 448, even(448, 146), 3584, 6144);
  bench(owner, random, 256, even(256, 64), 2048, 2816);
  bench(owner, random, 64, even(64, 1536), 2048, 2816);
  bench(owner, random, 64, even(64, 1536), 1408, 2048);
  // Uneven: between half and one and a half of the mean.
  std::vector<std::int32_t> uneven(112);
  for (std::size_t e = 0; e < uneven.size(); ++e)
    uneven[e] = 585 + static_cast<std::int32_t>(mix64(e) % 1171);
  bench(owner, random, 112, uneven, 3584, 6144);
}

}  // namespace moesaic::test
