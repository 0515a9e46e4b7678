#pragma once
// Shares of work and sums over rows; all borders depend on sizes only, never on the number of threads.
#include <algorithm>
#include <cstdint>

#include "kernels/cpu/thread_pool.h"

namespace moesaic::cpu {

/// Rows per unit of work, so that a unit is worth handing to a thread.
inline std::int64_t row_grain(std::int64_t width) {
  return std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(1, width));
}

/// Rows per partial sum of a parameter gradient; part of the bits.
constexpr std::int64_t kSumBlock = 64;
inline std::int64_t sum_blocks(std::int64_t rows) {
  return (rows + kSumBlock - 1) / kSumBlock;
}

/// out[c] += sum over blocks b, in order, of partial[b, c].
template <class A>
void add_block_sums(
    ThreadPool& pool, const A* partial, std::int64_t blocks, std::int64_t width, A* out) {
  pool.parallel_for(width, 256, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      const A* row = partial + b * width;
#pragma omp simd
      for (std::int64_t c = begin; c < end; ++c)
        out[c] += row[c];
    }
  });
}

}  // namespace moesaic::cpu
