#pragma once
// Building blocks of the tiled attention and indexer kernels. A is the type sums are formed in
// (float or double); operands of any storage type are converted to A while they are copied into a
// tile.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "core/base/tensor.h"
#include "kernels/cpu/blas.h"
#include "kernels/cpu/math.h"

namespace moesaic::cpu {

constexpr std::int64_t kTile =
    64;  // rows and columns of a tile of (query, key) pairs; part of the bits

inline std::int64_t tiles_of(std::int64_t n) noexcept {
  return (n + kTile - 1) / kTile;
}

/// A window on a tensor: rows of `cols` elements, `stride` elements apart, the first one at
/// `offset`.
struct Rows {
  ConstTensorView tensor;
  std::int64_t offset = 0;
  std::int64_t stride = 0;
  std::int64_t cols = 0;
  Rows from(std::int64_t row) const { return {tensor, offset + row * stride, stride, cols}; }
};

/// to[r * ld + c] = factor * from[r, c] for r < rows, zero for rows <= r < padded.
template <class A>
void load_rows(A* to,
               std::int64_t ld,
               const Rows& from,
               std::int64_t rows,
               std::int64_t padded,
               A factor = A(1));
/// The transpose: to[c * kTile + r], r < kTile; rows beyond `rows` are zero.
template <class A>
void load_transposed(A* to, const Rows& from, std::int64_t rows);
/// to[r, c] = factor * from[r * ld + c] in the type of `to`.
template <class A>
void store_rows(TensorView to,
                std::int64_t offset,
                std::int64_t stride,
                std::int64_t rows,
                std::int64_t cols,
                const A* from,
                std::int64_t ld,
                A factor = A(1));

/// Largest of n numbers (-inf for none); NaN is passed over.
template <class A>
inline A largest(const A* x, std::int64_t n) noexcept {
  constexpr int kLanes = 16;
  A lane[kLanes];
  for (auto& v : lane)
    v = -std::numeric_limits<A>::infinity();
  const std::int64_t whole = n / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
#pragma omp simd
    for (int j = 0; j < kLanes; ++j)
      lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
  }
  for (std::int64_t i = whole; i < n; ++i)
    lane[0] = x[i] > lane[0] ? x[i] : lane[0];
  for (int j = 1; j < kLanes; ++j)
    lane[0] = lane[j] > lane[0] ? lane[j] : lane[0];
  return lane[0];
}

/// Equal pieces of one scratch tensor, handed to whichever thread asks. Which piece a task gets has
/// no influence on its results. At most as many tasks as pieces run at once.
class Slots {
 public:
  static constexpr int kMax = 256;
  Slots(std::byte* memory, std::size_t bytes_each, int count)
      : memory_(memory), bytes_(bytes_each), count_(count) {}
  class Lease {
   public:
    explicit Lease(Slots& slots) noexcept : slots_(slots) {
      for (index_ = 0; slots_.busy_[index_].exchange(true, std::memory_order_acquire);)
        index_ = (index_ + 1) % slots_.count_;
    }
    ~Lease() { slots_.busy_[index_].store(false, std::memory_order_release); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    /// The next n elements of the piece.
    template <class A>
    A* take(std::int64_t n) noexcept {
      A* p = reinterpret_cast<A*>(slots_.memory_ +
                                  static_cast<std::size_t>(index_) * slots_.bytes_ + used_);
      used_ += (static_cast<std::size_t>(n) * sizeof(A) + 63) / 64 * 64;
      return p;
    }

   private:
    Slots& slots_;
    int index_ = 0;
    std::size_t used_ = 0;
  };

 private:
  std::byte* memory_;
  std::size_t bytes_;
  int count_;
  std::atomic<bool> busy_[kMax] = {};
};

/// Bytes of a piece from which a task takes these numbers of A.
template <class A>
std::size_t slot_bytes(std::initializer_list<std::int64_t> counts) noexcept {
  std::size_t bytes = 0;
  for (const std::int64_t n : counts)
    bytes += (static_cast<std::size_t>(n) * sizeof(A) + 63) / 64 * 64;
  return bytes;
}

/// Which keys a query sees. Positions are those of the keys; query row i stands at position first +
/// i.
struct Visibility {
  const std::int32_t* cu = nullptr;
  std::int64_t documents = 0;
  std::int64_t first = 0;  ///< Tk - Tq
  std::int64_t keys = 0;   ///< Tk
  const std::int32_t* selected = nullptr;
  std::int64_t k = 0;

  /// The document that holds `position`.
  std::int64_t document_of(std::int64_t position) const noexcept;
  /// Query rows [begin, end) of a document.
  std::int64_t query_begin(std::int64_t document) const noexcept {
    return std::max<std::int64_t>(0, cu[document] - first);
  }
  std::int64_t query_end(std::int64_t document) const noexcept {
    return std::max<std::int64_t>(0, cu[document + 1] - first);
  }
  /// The part [begin, end) of row i's selection that is visible.
  struct Range {
    const std::int32_t* begin;
    const std::int32_t* end;
  };
  Range visible_selection(std::int64_t row) const noexcept;
  /// Words of 64 bits, one per key tile of the row's document: which keys are selected and visible.
  void selection_words(std::int64_t row, std::uint64_t* words) const noexcept;
};
Visibility visibility(ConstTensorView cu_seqlens,
                      std::int64_t queries,
                      std::int64_t keys,
                      ConstTensorView selected);

/// Query rows of one document in blocks of kTile.
struct QueryBlock {
  std::int32_t document;
  std::int32_t row;    ///< first query row
  std::int32_t count;  ///< 1..kTile rows
};
/// Upper bound of list_blocks.
inline std::int64_t max_blocks(std::int64_t queries, std::int64_t documents) noexcept {
  return queries / kTile + documents + 1;
}
/// Fills `blocks` in order and returns their number.
std::int64_t list_blocks(const Visibility& see, QueryBlock* blocks) noexcept;

}  // namespace moesaic::cpu
