#pragma once
// Index scores of 64 x 64 tiles of (query, key) pairs, shared by selection and loss.
#include "kernels/cuda/query_keys.cuh"
#include "kernels/cuda/tile_dots.cuh"

namespace moesaic::cuda {

/// The indexer's inputs. A pair's score is sum_j factor w_j relu(<q_j, k>), heads in order, in A.
template <class A, class T>
struct IndexerInputs {
  const T* qi = nullptr;
  const T* ki = nullptr;
  const void* w = nullptr;  ///< of A, or of T
  bool wide_w = true;
  int heads = 0, dim = 0;
  A factor = 0;

  __device__ __forceinline__ A query(std::int64_t t, int head, int c) const {
    return widen<A>(qi[(t * heads + head) * dim + c]);
  }
  __device__ __forceinline__ A key(std::int64_t s, int c) const {
    return widen<A>(ki[s * dim + c]);
  }
  __device__ __forceinline__ A weight(std::int64_t t, int head) const {
    const std::int64_t i = t * heads + head;
    return factor * (wide_w ? static_cast<const A*>(w)[i] : widen<A>(static_cast<const T*>(w)[i]));
  }
};

/// IndexerInputs of an op that has qi, ki and w.
template <class A, class T, class Op>
IndexerInputs<A, device_t<T>> indexer_inputs(const Op& op) {
  const auto heads = op.qi.dim(1), dim = op.qi.dim(2);
  return {reinterpret_cast<const device_t<T>*>(op.qi.template as<T>()),
          reinterpret_cast<const device_t<T>*>(op.ki.template as<T>()),
          op.w.data(),
          op.w.dtype() == dtype_of<A>,
          static_cast<int>(heads),
          static_cast<int>(dim),
          static_cast<A>(1.0 / std::sqrt(static_cast<double>(heads) * static_cast<double>(dim)))};
}

/// relu that keeps NaN.
template <class A>
__device__ __forceinline__ A relu(A x) {
  return x < A(0) ? A(0) : x;
}

/// dots[i][j] = <q_head(row + tile_row(i)), k(key + tile_column(j))>; rows from row_end and keys from key_end on count as 0.
template <class A, class T>
__device__ void index_dots(A (&dots)[kTilePer][kTilePer],
                           const IndexerInputs<A, T>& in,
                           int head,
                           std::int64_t row,
                           std::int64_t row_end,
                           std::int64_t key,
                           std::int64_t key_end,
                           TileMemory<A>& memory) {
#pragma unroll
  for (int i = 0; i < kTilePer; ++i)
#pragma unroll
    for (int j = 0; j < kTilePer; ++j)
      dots[i][j] = 0;
  tile_dots(
      dots,
      in.dim,
      [&](int r, int c) { return row + r < row_end ? in.query(row + r, head, c) : A(0); },
      [&](int s, int c) { return key + s < key_end ? in.key(key + s, c) : A(0); },
      memory);
}

/// sums[i][j] = the scores of the same pairs.
template <class A, class T>
__device__ void index_scores(A (&sums)[kTilePer][kTilePer],
                             const IndexerInputs<A, T>& in,
                             std::int64_t row,
                             std::int64_t row_end,
                             std::int64_t key,
                             std::int64_t key_end,
                             TileMemory<A>& memory) {
#pragma unroll
  for (int i = 0; i < kTilePer; ++i)
#pragma unroll
    for (int j = 0; j < kTilePer; ++j)
      sums[i][j] = 0;
  for (int head = 0; head < in.heads; ++head) {
    A dots[kTilePer][kTilePer];
    index_dots(dots, in, head, row, row_end, key, key_end, memory);
#pragma unroll
    for (int i = 0; i < kTilePer; ++i) {
      const std::int64_t t = row + tile_row(i);
      const A weight = t < row_end ? in.weight(t, head) : A(0);
#pragma unroll
      for (int j = 0; j < kTilePer; ++j)
        sums[i][j] += weight * relu(dots[i][j]);
    }
  }
}

/// Queries that are worked on at a time, so that a [rows, keys] matrix of `bytes_per_pair` stays near `budget` bytes.
inline std::int64_t rows_at_a_time(std::int64_t queries,
                                   std::int64_t keys,
                                   std::int64_t bytes_per_pair,
                                   std::int64_t budget) {
  const std::int64_t fits = budget / std::max<std::int64_t>(1, keys * bytes_per_pair);
  return std::min(queries, std::max<std::int64_t>(1, fits / kTile) * kTile);
}

}  // namespace moesaic::cuda
