#pragma once
#include <cstdint>

#include "core/base/tensor.h"

namespace moesaic {

/// One micro-batch as kernels see it: documents packed behind each other. Device tensors; the host knows the extents.
///
///   tokens    i32 [T]      targets  i32 [T]  token to predict at each position, -100 = none
///   positions i32 [T]      position inside the document
///   cu        i32 [N + 1]  document boundaries, cu[0] = 0, cu[N] = T; empty documents allowed
///   mtp_tokens, mtp_targets i32 [T]  tokens one further and targets two further (empty without MTP)
struct Sequence {
  ConstTensorView tokens;
  ConstTensorView targets;
  ConstTensorView positions;
  ConstTensorView cu;
  ConstTensorView mtp_tokens;
  ConstTensorView mtp_targets;
  std::int64_t num_tokens() const { return tokens.dim(0); }
  std::int64_t num_documents() const { return cu.dim(0) - 1; }
};

}  // namespace moesaic
