#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/model/model.h"
#include "core/nn/choices.h"
#include "memory/buffer.h"

namespace moesaic::bench {

/// Sends the tokens of every mixture to experts that were drawn beforehand, whatever its router says: the speed of a step then
/// is that of a known load. Other choices (sparse attention) stay the model's own. The draws of a layer repeat after
/// kTables micro-batches.
class ForcedRouting : public ChoiceObserver {
 public:
  static constexpr std::int64_t kTables = 4;

  /// Draws for micro-batches of `tokens` tokens; `zipf`: exponent of the experts' popularity, 0 = all alike. Popularity is
  /// another one in every layer.
  ForcedRouting(Model& model, std::int64_t tokens, double zipf, Device device);

  ConstTensorView replace(const Choice& choice, Stream& stream) override;

 private:
  std::map<std::string, Buffer> tables_;  // by layer: i32 [kTables, tokens, k]
  std::int64_t tokens_ = 0;
};

}  // namespace moesaic::bench
