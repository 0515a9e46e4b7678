#include "kernels/ops/rope.h"

#include <array>
#include <cmath>

#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

constexpr std::size_t kMaxPairs = 512;

template <class T>
void rotate(ThreadPool& pool, const Rope& op) {
  using A = acc_t<T>;
  const std::int64_t heads = op.x.dim(1), width = op.x.dim(2), pairs = op.rotary_width / 2;
  const std::int64_t step = op.interleaved ? 2 : 1, partner = op.interleaved ? 1 : pairs;
  const auto* positions = op.positions.as<std::int32_t>();
  std::array<double, kMaxPairs> frequency;
  for (std::int64_t j = 0; j < pairs; ++j) {
    frequency[static_cast<std::size_t>(j)] =
        std::pow(op.theta, -2.0 * static_cast<double>(j) / static_cast<double>(op.rotary_width));
  }
  pool.parallel_for(op.x.dim(0),
                    cpu::row_grain(heads * op.rotary_width),
                    [&](std::int64_t begin, std::int64_t end) {
                      std::array<A, kMaxPairs> cosine, sine;
                      for (std::int64_t t = begin; t < end; ++t) {
                        for (std::size_t j = 0; j < static_cast<std::size_t>(pairs); ++j) {
                          const double angle = static_cast<double>(positions[t]) * frequency[j];
                          cosine[j] = static_cast<A>(std::cos(angle));
                          sine[j] = static_cast<A>(op.inverse ? -std::sin(angle) : std::sin(angle));
                        }
                        for (std::int64_t h = 0; h < heads; ++h) {
                          T* x = op.x.as<T>() + (t * heads + h) * width + op.begin;
#pragma omp simd
                          for (std::int64_t j = 0; j < pairs; ++j) {
                            const A a = static_cast<A>(x[j * step]),
                                    b = static_cast<A>(x[j * step + partner]);
                            const auto i = static_cast<std::size_t>(j);
                            x[j * step] = T(a * cosine[i] - b * sine[i]);
                            x[j * step + partner] = T(a * sine[i] + b * cosine[i]);
                          }
                        }
                      }
                    });
}

}  // namespace

void launch(CpuContext& context, const Rope& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.x.dtype(), [&]<class T>(TypeTag<T>) { rotate<T>(pool, op); });
  });
}

}  // namespace moesaic
