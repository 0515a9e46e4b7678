#include "kernels/cpu/tiles.h"

namespace moesaic::cpu {

template <class A>
void load_rows(
    A* to, std::int64_t ld, const Rows& from, std::int64_t rows, std::int64_t padded, A factor) {
  dispatch_float(from.tensor.dtype(), [&]<class T>(TypeTag<T>) {
    const T* source = from.tensor.as<T>() + from.offset;
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* in = source + r * from.stride;
      A* out = to + r * ld;
#pragma omp simd
      for (std::int64_t c = 0; c < from.cols; ++c)
        out[c] = static_cast<A>(in[c]) * factor;
    }
  });
  for (std::int64_t r = rows; r < padded; ++r)
    std::fill_n(to + r * ld, from.cols, A(0));
}

template <class A>
void load_transposed(A* to, const Rows& from, std::int64_t rows) {
  dispatch_float(from.tensor.dtype(), [&]<class T>(TypeTag<T>) {
    const T* source = from.tensor.as<T>() + from.offset;
    constexpr std::int64_t kSquare = 8;  // keeps both sides in the first-level cache
    for (std::int64_t c0 = 0; c0 < from.cols; c0 += kSquare) {
      const std::int64_t c1 = std::min(from.cols, c0 + kSquare);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = c0; c < c1; ++c)
          to[c * kTile + r] = static_cast<A>(source[r * from.stride + c]);
      }
    }
  });
  for (std::int64_t c = 0; rows < kTile && c < from.cols; ++c)
    std::fill(to + c * kTile + rows, to + (c + 1) * kTile, A(0));
}

template <class A>
void store_rows(TensorView to,
                std::int64_t offset,
                std::int64_t stride,
                std::int64_t rows,
                std::int64_t cols,
                const A* from,
                std::int64_t ld,
                A factor) {
  dispatch_float(to.dtype(), [&]<class T>(TypeTag<T>) {
    T* target = to.as<T>() + offset;
    for (std::int64_t r = 0; r < rows; ++r) {
      const A* in = from + r * ld;
      T* out = target + r * stride;
      for (std::int64_t c = 0; c < cols; ++c)
        out[c] = T(in[c] * factor);
    }
  });
}

template void load_rows(float*, std::int64_t, const Rows&, std::int64_t, std::int64_t, float);
template void load_rows(double*, std::int64_t, const Rows&, std::int64_t, std::int64_t, double);
template void load_transposed(float*, const Rows&, std::int64_t);
template void load_transposed(double*, const Rows&, std::int64_t);
template void store_rows(TensorView,
                         std::int64_t,
                         std::int64_t,
                         std::int64_t,
                         std::int64_t,
                         const float*,
                         std::int64_t,
                         float);
template void store_rows(TensorView,
                         std::int64_t,
                         std::int64_t,
                         std::int64_t,
                         std::int64_t,
                         const double*,
                         std::int64_t,
                         double);

Visibility visibility(ConstTensorView cu_seqlens,
                      std::int64_t queries,
                      std::int64_t keys,
                      ConstTensorView selected) {
  return {.cu = cu_seqlens.as<std::int32_t>(),
          .documents = cu_seqlens.dim(0) - 1,
          .first = keys - queries,
          .keys = keys,
          .selected = selected.empty() ? nullptr : selected.as<std::int32_t>(),
          .k = selected.empty() ? 0 : selected.dim(1)};
}

std::int64_t Visibility::document_of(std::int64_t position) const noexcept {
  // The first border beyond the position ends its document; empty documents before it share a
  // border and are passed over.
  return std::upper_bound(cu, cu + documents + 1, static_cast<std::int32_t>(position)) - cu - 1;
}

Visibility::Range Visibility::visible_selection(std::int64_t row) const noexcept {
  const auto position = static_cast<std::int32_t>(first + row);
  const std::int32_t* list = selected + row * k;
  const std::int64_t n =
      std::partition_point(list, list + k, [](std::int32_t s) { return s >= 0; }) -
      list;  // then padding
  const std::int32_t begin = cu[document_of(position)];
  return {std::lower_bound(list, list + n, begin), std::upper_bound(list, list + n, position)};
}

void Visibility::selection_words(std::int64_t row, std::uint64_t* words) const noexcept {
  const std::int64_t document = document_of(first + row);
  const std::int32_t begin = cu[document];
  std::fill_n(words, tiles_of(cu[document + 1] - begin), 0);
  const Range range = visible_selection(row);
  for (const std::int32_t* s = range.begin; s != range.end; ++s) {
    const auto column = static_cast<std::uint32_t>(*s - begin);
    words[column / kTile] |= std::uint64_t(1) << (column % kTile);
  }
}

std::int64_t list_blocks(const Visibility& see, QueryBlock* blocks) noexcept {
  std::int64_t n = 0;
  for (std::int64_t d = 0; d < see.documents; ++d) {
    const std::int64_t end = see.query_end(d);
    for (std::int64_t row = see.query_begin(d); row < end; row += kTile) {
      blocks[n++] = {static_cast<std::int32_t>(d),
                     static_cast<std::int32_t>(row),
                     static_cast<std::int32_t>(std::min(kTile, end - row))};
    }
  }
  return n;
}

}  // namespace moesaic::cpu
