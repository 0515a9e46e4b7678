#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// Per row t the k largest of the first n_t scores, ties to the lower index; NaN counts as
/// -infinity, -0 as +0. Every one of the n_t entries is a candidate, those at -infinity too.
///
///   scores       [rows, n]  f64 | f32; n <= kMaxEntries
///   valid_count  [rows]     i32, n_t, clamped to [0, n]; empty = n in every row
///   indices      [rows, k]  i32; entries past min(k, n_t) are -1
///   counts       [rows]     i32; min(k, n_t); empty = not wanted
///   given        [rows, k]  i32; not empty: a replay. Its entries are copied to `indices` as they
///   are, counts is the
///                           number of entries that are not negative, and scores (may be empty) are
///                           not read
///
/// order: best_first = falling score, equal scores by index; ascending = by index. best_first needs
/// k <= kMaxSorted. Exact and deterministic; all backends give the same indices. Source: SPEC
/// sections 3 (selection) and 4 (router).
struct TopK {
  static constexpr const char* kName = "top_k";
  static constexpr std::int64_t kMaxEntries = std::int64_t{1} << 30;
  static constexpr std::int64_t kMaxSorted = 8192;
  enum class Order { best_first, ascending };
  TensorView indices;
  TensorView counts = {};
  ConstTensorView scores = {};
  ConstTensorView valid_count = {};
  ConstTensorView given = {};
  Order order = Order::best_first;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const TopK& op);
void launch(CudaContext& context, const TopK& op);

}  // namespace moesaic
