#include "apps/bench/timing.h"

#include <algorithm>
#include <chrono>
#include <ctime>

#include <fmt/format.h>

#include "core/base/random.h"
#include "kernels/cpu/blas.h"

namespace moesaic::bench {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double processor_seconds_now() {
  timespec t{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double library_sgemm_rate() {
  constexpr std::int64_t kSize = 1024;
  constexpr int kCalls = 9;
  std::vector<float> a(kSize * kSize), b(kSize * kSize), c(kSize * kSize);
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<float>(uniform(1, i) - 0.5);
    b[i] = static_cast<float>(uniform(2, i) - 0.5);
  }
  std::vector<double> times;
  for (int call = 0; call <= kCalls; ++call) {
    const double start = processor_seconds_now();
    cpu::blas_gemm<float>(false,
                          false,
                          kSize,
                          kSize,
                          kSize,
                          1.0F,
                          a.data(),
                          kSize,
                          b.data(),
                          kSize,
                          0.0F,
                          c.data(),
                          kSize);
    if (call > 0) times.push_back(processor_seconds_now() - start);  // the first call warms up
  }
  return 2.0 * kSize * kSize * kSize / median(times);
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} s", seconds);
}

}  // namespace moesaic::bench
