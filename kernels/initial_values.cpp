#include "kernels/ops/initial_values.h"

#include "kernels/checks.h"

namespace moesaic {

void InitialValues::check() const {
  const auto floating = [](const ConstTensorView& view) {
    const DType t = view.dtype();
    return t == DType::f64 || t == DType::f32 || t == DType::bf16;
  };
  MOESAIC_CHECK(floating(y), "y must be f64, f32 or bf16");
  if (whole.rank > 0) {
    MOESAIC_CHECK(whole.rank == y.rank() && begin.rank == whole.rank,
                  "whole, begin and y have one rank");
    for (int d = 0; d < whole.rank; ++d)
      MOESAIC_CHECK(begin[d] >= 0 && begin[d] + y.dim(d) <= whole[d], "y lies outside the whole");
  }
  if (!remainder.empty()) check_split_master(copy, y, remainder);
  if (copy.empty()) return;
  MOESAIC_CHECK(floating(copy), "copy must be f64, f32 or bf16");
  check_shape(copy, y.shape(), "copy");
}

InitialValues::Index InitialValues::index() const {
  Index index;
  std::uint64_t stride = 1;
  bool is_open = false;  // the dimension inside is there in whole: this one continues it
  for (int d = whole.rank; d-- > 0;) {
    const auto extent = static_cast<std::uint64_t>(y.dim(d)),
               all = static_cast<std::uint64_t>(whole[d]);
    index.first += static_cast<std::uint64_t>(begin[d]) * stride;
    if (is_open) {
      index.extent[index.rank - 1] *= extent;
    } else {
      index.extent[index.rank] = extent;
      index.stride[index.rank++] = stride;
    }
    is_open = extent == all;
    stride *= all;
  }
  if (index.rank == 0) {
    index.rank = 1;
    index.extent[0] = static_cast<std::uint64_t>(y.numel());
    index.stride[0] = 1;
  }
  return index;
}

OpCost InitialValues::cost() const {
  return {0.0, total_bytes({y, copy, remainder})};
}

}  // namespace moesaic
