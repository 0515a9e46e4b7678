#pragma once
#include <cstdint>
#include <string>

#include "core/base/tensor.h"
#include "memory/stream.h"

namespace moesaic {

/// A choice that a layer made of its own: the best k experts of some tokens, or the best k keys.
struct Choice {
  const std::string& layer;  ///< prefix of the names of its parameters, the same in every layout
  std::int64_t micro_batch = 0;  ///< number in the global batch
  std::int64_t first_token = 0;  ///< of the micro-batch
  bool is_shared = false;        ///< the ranks along Axis::tp make it alike
  ConstTensorView chosen;        ///< [tokens, k] i32
};

/// Sees what layers choose in training, and may put other choices in their place: for comparisons of runs whose rounding
/// differs, where a near tie would send tokens elsewhere. Without one (RunContext::choices) nothing is looked at.
class ChoiceObserver {
 public:
  virtual ~ChoiceObserver() = default;
  /// Called once the choice is enqueued on `stream`; may wait for it. What comes back, [tokens, k] i32 on the device, is
  /// used in its place; empty = keep it. It must stay valid until the next call or the end of the step.
  virtual ConstTensorView replace(const Choice& choice, Stream& stream) = 0;
};

}  // namespace moesaic
