#pragma once
// Split masters (core/base/split_float.h) as f32 numbers, a tile at a time on the stack: ops do to them what they do to
// an f32 tensor, with the same code and so with the same bits.
#include <algorithm>
#include <array>
#include <cstdint>

#include "core/base/split_float.h"

namespace moesaic::cpu {

inline constexpr std::int64_t kSplitTile = 1024;

/// Calls f(first element, tile, elements of the tile) for the elements [begin, end).
template <class F>
void for_joined(const bf16* weight,
                const std::uint16_t* remainder,
                std::int64_t begin,
                std::int64_t end,
                F&& f) {
  std::array<float, kSplitTile> tile;
  for (std::int64_t at = begin; at < end; at += kSplitTile) {
    const std::int64_t n = std::min(kSplitTile, end - at);
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i)
      tile[static_cast<std::size_t>(i)] = join_float(weight[at + i], remainder[at + i]);
    f(at, tile.data(), n);
  }
}

/// The same, and what f leaves in a tile is stored.
template <class F>
void update_split(
    bf16* weight, std::uint16_t* remainder, std::int64_t begin, std::int64_t end, F&& f) {
  for_joined(weight, remainder, begin, end, [&](std::int64_t at, float* tile, std::int64_t n) {
    f(at, tile, n);
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i)
      split_float(tile[i], weight[at + i], remainder[at + i]);
  });
}

}  // namespace moesaic::cpu
