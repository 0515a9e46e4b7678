#pragma once
#include <algorithm>
#include <cstdint>

#include "core/base/tensor.h"

namespace moesaic::cpu {

/// Document boundaries as the kernels read them inside the stream.
struct Documents {
  const std::int32_t* cu = nullptr;
  std::int64_t count = 0;

  /// Throws InternalError unless the boundaries start at 0, do not decrease and end at `tokens`.
  Documents(const ConstTensorView& cu_seqlens, std::int64_t tokens)
      : cu(cu_seqlens.as<std::int32_t>()), count(cu_seqlens.dim(0) - 1) {
    MOESAIC_CHECK(cu[0] == 0 && cu[count] == tokens,
                  "cu_seqlens must start at 0 and end at the number of tokens");
    MOESAIC_CHECK(std::is_sorted(cu, cu + count + 1), "cu_seqlens must not decrease");
  }
  std::int64_t begin(std::int64_t n) const { return cu[n]; }
  std::int64_t end(std::int64_t n) const { return cu[n + 1]; }
  /// The document that holds token t.
  std::int64_t of_token(std::int64_t t) const {
    return std::upper_bound(cu, cu + count + 1, static_cast<std::int32_t>(t)) - cu - 1;
  }
};

}  // namespace moesaic::cpu
