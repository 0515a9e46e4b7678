#pragma once
// What the attention kernels share: sizes, the tensors seen as rows of one head, the choice of the
// path.
#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/tiles.h"
#include "kernels/ops/attention.h"

namespace moesaic::cpu {

struct AttentionSizes {
  std::int64_t queries = 0, keys = 0, heads = 0, dn = 0, dr = 0, dv = 0;
  std::int64_t dqk() const noexcept { return dn + dr; }
  std::int64_t dkv() const noexcept { return dn + dv; }
};
AttentionSizes attention_sizes(const ConstTensorView& q,
                               const ConstTensorView& kvb,
                               std::int64_t dn);

/// The choice of the path (the rule is stated at AttentionPath). k = 0: no selection.
struct PathRule {
  static constexpr std::int64_t kKeysPerSelected = 16;
  AttentionPath path = AttentionPath::automatic;
  std::int64_t k = 0;
  std::int64_t few_queries = 8;
  /// True when a document with so many query rows and keys is walked by single rows.
  bool rows(std::int64_t queries, std::int64_t keys) const noexcept {
    if (path != AttentionPath::automatic) return path == AttentionPath::rows;
    return queries <= few_queries || (k > 0 && k * kKeysPerSelected < keys);
  }
  /// Keys of the longest document that may be walked by tiles, out of so many keys in all.
  std::int64_t longest_dense(std::int64_t keys) const noexcept {
    if (path == AttentionPath::rows) return 0;
    return path == AttentionPath::automatic && k > 0 ? std::min(keys, k * kKeysPerSelected) : keys;
  }
};
inline std::int64_t selection_size(const ConstTensorView& selected) {
  return selected.empty() ? 0 : selected.dim(1);
}

/// The inputs, seen per head.
struct AttentionInputs {
  AttentionSizes size;
  ConstTensorView q, kvb, kr;
  Rows query(std::int64_t head) const {
    return {q, head * size.dqk(), size.heads * size.dqk(), size.dqk()};
  }
  Rows key(std::int64_t head) const {
    return {kvb, head * size.dkv(), size.heads * size.dkv(), size.dn};
  }
  Rows shared_key() const { return {kr, 0, size.dr, size.dr}; }
  Rows value(std::int64_t head) const {
    return {kvb, head * size.dkv() + size.dn, size.heads * size.dkv(), size.dv};
  }

  /// The whole key [kn ; kr] of up to kTile rows, transposed: to[c * kTile + r].
  template <class A>
  void load_key_transposed(A* to, std::int64_t head, std::int64_t row, std::int64_t rows) const {
    load_transposed(to, key(head).from(row), rows);
    if (size.dr > 0) load_transposed(to + size.dn * kTile, shared_key().from(row), rows);
  }
  /// The same by rows of dqk, kTile of them.
  template <class A>
  void load_key(A* to, std::int64_t head, std::int64_t row, std::int64_t rows) const {
    load_rows(to, size.dqk(), key(head).from(row), rows, kTile);
    if (size.dr > 0) load_rows(to + size.dn, size.dqk(), shared_key().from(row), rows, kTile);
  }
};

/// Which pairs of a tile are visible: row i sees the columns whose bit is set in word(i).
struct TileMask {
  const std::uint64_t* words = nullptr;  ///< words of row 0 at this key tile; null = causal only
  std::int64_t words_per_row = 0;
  std::int64_t count = 0;   ///< query rows in the tile
  std::int64_t offset = 0;  ///< position of row 0 minus position of column 0
  std::int64_t visible(std::int64_t i) const noexcept {
    return std::clamp<std::int64_t>(offset + i + 1, 0, kTile);
  }
  /// No pair is hidden in rows 0..count.
  bool full() const noexcept { return words == nullptr && visible(0) == kTile; }
  bool none() const noexcept {
    if (words == nullptr) return visible(count - 1) == 0;
    std::uint64_t any = 0;
    for (std::int64_t i = 0; i < count; ++i)
      any |= words[i * words_per_row];
    return any == 0;
  }
  /// Writes `hidden` to the hidden columns of row i.
  template <class A>
  void hide(A* row, std::int64_t i, A hidden) const noexcept {
    if (words != nullptr) {
      const std::uint64_t word = words[i * words_per_row];
      for (std::int64_t c = 0; c < kTile; ++c)
        row[c] = ((word >> c) & 1U) != 0 ? row[c] : hidden;
    } else {
      for (std::int64_t c = visible(i); c < kTile; ++c)
        row[c] = hidden;
    }
  }
};

/// Which keys of its document a query row has selected and sees, one bit each: [Tq, per_row] words,
/// filled for the documents that `rule` walks by tiles.
struct SelectionBits {
  std::uint64_t* words = nullptr;  ///< null = no selection
  std::int64_t per_row = 0;
  /// Scratch for them (none without a selection or without a dense document).
  static TensorView take(Arena& scratch,
                         const PathRule& rule,
                         std::int64_t queries,
                         std::int64_t keys);
  SelectionBits(ThreadPool& pool, TensorView memory, const Visibility& see, const PathRule& rule);
  /// The mask of `count` query rows from `row` on, at key tile `tile` of a document; row 0 stands
  /// at `position` in it.
  TileMask mask(std::int64_t row,
                std::int64_t count,
                std::int64_t position,
                std::int64_t tile) const noexcept {
    return {words == nullptr ? nullptr : words + row * per_row + tile,
            per_row,
            count,
            position - tile * kTile};
  }
};

/// Logits of one query against listed keys: out[i] = <q, [kn(s_i) ; kr(s_i)]>, s_i = list[i] or
/// begin + i when list is null.
template <class A, class T>
void row_dots(A* out,
              const A* q,
              const T* key,
              std::int64_t key_stride,
              std::int64_t dn,
              const T* shared,
              std::int64_t dr,
              const std::int32_t* list,
              std::int64_t begin,
              std::int64_t n) noexcept {
  for (std::int64_t i = 0; i < n; i += 4) {
    std::int64_t s[4];  // past the end the last key is repeated
    for (std::int64_t j = 0; j < 4; ++j)
      s[j] = list != nullptr ? list[std::min(i + j, n - 1)] : begin + std::min(i + j, n - 1);
    A a = 0, b = 0, c = 0, d = 0;
    const auto add = [&](const A* x, const T* rows, std::int64_t stride, std::int64_t width) {
      const T *r0 = rows + s[0] * stride, *r1 = rows + s[1] * stride, *r2 = rows + s[2] * stride,
              *r3 = rows + s[3] * stride;
      A a1 = 0, b1 = 0, c1 = 0, d1 = 0;
#pragma omp simd reduction(+ : a1, b1, c1, d1)
      for (std::int64_t e = 0; e < width; ++e) {
        a1 += x[e] * static_cast<A>(r0[e]);
        b1 += x[e] * static_cast<A>(r1[e]);
        c1 += x[e] * static_cast<A>(r2[e]);
        d1 += x[e] * static_cast<A>(r3[e]);
      }
      a += a1, b += b1, c += c1, d += d1;
    };
    add(q, key, key_stride, dn);
    if (dr > 0) add(q + dn, shared, dr, dr);
    const A sums[4] = {a, b, c, d};
    std::copy_n(sums, std::min<std::int64_t>(4, n - i), out + i);
  }
}

/// sum[c] += sum_i p[i] row(s_i)[c], four rows at a time, rows in order.
template <class A, class T>
void add_rows(A* sum,
              const A* p,
              const T* rows,
              std::int64_t stride,
              std::int64_t cols,
              const std::int32_t* list,
              std::int64_t begin,
              std::int64_t n) noexcept {
  const auto row = [&](std::int64_t i) {
    return rows + (list != nullptr ? list[i] : begin + i) * stride;
  };
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const T *r0 = row(i), *r1 = row(i + 1), *r2 = row(i + 2), *r3 = row(i + 3);
#pragma omp simd
    for (std::int64_t c = 0; c < cols; ++c) {
      sum[c] += (p[i] * static_cast<A>(r0[c]) + p[i + 1] * static_cast<A>(r1[c])) +
                (p[i + 2] * static_cast<A>(r2[c]) + p[i + 3] * static_cast<A>(r3[c]));
    }
  }
  for (; i < n; ++i) {
    const T* r = row(i);
#pragma omp simd
    for (std::int64_t c = 0; c < cols; ++c)
      sum[c] += p[i] * static_cast<A>(r[c]);
  }
}

}  // namespace moesaic::cpu
