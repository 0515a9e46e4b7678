#pragma once
#include <memory>

#include "core/nn/module.h"
#include "core/nn/token_slices.h"
#include "parallel/mesh.h"

namespace moesaic {

/// How the tokens of a micro-batch lie over the ranks of a layout: cut into contiguous pieces along Axis::cp, these along
/// Axis::tp, and brought together for their experts along Axis::etp.
class TokenGroups {
 public:
  /// `mesh`: null to measure memory, where nothing is ever sent.
  TokenGroups(const MeshPosition& position, const Mesh* mesh);
  /// For micro-batches of `tokens` tokens of sequences of at most `sequence`; points into this.
  Bounds bounds(std::int64_t tokens, std::int64_t sequence, ExpertExchange* exchange) const;

 private:
  std::unique_ptr<TokenSlices> tensor_, expert_, context_, batch_;  // null for one rank
};

}  // namespace moesaic
