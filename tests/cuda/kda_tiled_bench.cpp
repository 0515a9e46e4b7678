// Times of the KDA tensor-core kernels: `test_cuda "[.bench]"`.
#include <algorithm>
#include <chrono>
#include <functional>

#include "kernels/ops/kda_chunk.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

template <class F>
double median_ms(Stream& stream, const F& body) {
  body();
  stream.synchronize();
  std::vector<double> ms;
  for (int i = 0; i < 30; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    for (int j = 0; j < 4; ++j)
      body();
    stream.synchronize();
    ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
                     .count() /
                 4);
  }
  std::sort(ms.begin(), ms.end());
  return ms[15];
}

void bench(std::int64_t T, std::int64_t H, std::vector<std::int32_t> cu) {
  BackendOwner owner({.device = kCuda, .scratch_bytes = std::size_t{3} << 30, .name = "cuda"});
  const std::int64_t N = static_cast<std::int64_t>(cu.size()) - 1;
  const auto random = [&](Shape shape, DType type, std::uint64_t key, double spread, double mean) {
    const std::int64_t period = std::min<std::int64_t>(shape.numel(), (1 << 20) + 128);
    OwnedTensor host(shape, type), device(shape, type, kCuda);
    dispatch_float(type, [&]<class E>(TypeTag<E>) {
      for (std::int64_t i = 0; i < shape.numel(); ++i)
        host.data<E>()[i] =
            i < period
                ? E(mean + spread * std::tanh(standard_normal(key, static_cast<std::uint64_t>(i))))
                : host.data<E>()[i - period];
    });
    copy_tensor(device.view(), host.view(), owner.stream());
    owner.stream().synchronize();
    return device;
  };
  const auto bf = DType::bf16, f = DType::f32;
  const Shape wide{T, H, 128}, states{N, H, 128, 128};
  const auto q = random(wide, bf, 1, 0.01, 0), k = random(wide, bf, 2, 0.1, 0),
             v = random(wide, bf, 3, 1, 0), d_o = random(wide, bf, 4, 1, 0);
  const auto g = random(wide, f, 5, 0.24, -0.245), beta = random({T, H}, f, 6, 0.4, 0.5);
  const OwnedTensor o(wide, bf, kCuda), dq(wide, bf, kCuda), dk(wide, bf, kCuda),
      dv(wide, bf, kCuda), dg(wide, f, kCuda), dbeta({T, H}, f, kCuda), s(states, f, kCuda);
  const OwnedTensor saved({kda_saved_numel(T, N, H, 128, 128, 64)}, f, kCuda);
  OwnedTensor cu_host({N + 1}, DType::i32), cu_device({N + 1}, DType::i32, kCuda);
  std::copy(cu.begin(), cu.end(), cu_host.data<std::int32_t>());
  copy_tensor(cu_device.view(), cu_host.view(), owner.stream());
  KdaChunkForward forward{.o = o.view(),
                          .s_final = s.view(),
                          .q = q.view(),
                          .k = k.view(),
                          .v = v.view(),
                          .g = g.view(),
                          .beta = beta.view(),
                          .cu_seqlens = cu_device.view()};
  KdaChunkBackward backward{.dq = dq.view(),
                            .dk = dk.view(),
                            .dv = dv.view(),
                            .dg = dg.view(),
                            .dbeta = dbeta.view(),
                            .d_o = d_o.view(),
                            .q = q.view(),
                            .k = k.view(),
                            .v = v.view(),
                            .g = g.view(),
                            .beta = beta.view(),
                            .cu_seqlens = cu_device.view()};
  const auto time_both = [&](const char* what) {
    const double a = median_ms(owner.stream(), [&] { run(owner.backend(), forward); });
    const double b = median_ms(owner.stream(), [&] { run(owner.backend(), backward); });
    std::printf(
        "TIME kda T=%ld H=%ld N=%ld %-8s forward %.3f ms  backward %.3f ms\n", T, H, N, what, a, b);
  };
  time_both("");
  forward.saved = saved.view();
  backward.saved = saved.view();
  time_both("saved");
}

}  // namespace

TEST_CASE("KDA tensor-core kernels: times", "[.bench]") {
  MOESAIC_NEEDS_CUDA();
  bench(8192, 32, {0, 8192});
  bench(8192, 96, {0, 8192});
  bench(8192, 32, {0, 1000, 3000, 3500, 8192});
}

}  // namespace moesaic::test
