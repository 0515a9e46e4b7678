#pragma once
// In which order a step uses the blocks: layer by layer, forward and backward.
#include <cstdint>
#include <string_view>
#include <vector>

namespace moesaic::tiers {

/// A block is an expert of a layer: layer x experts + expert.
using Block = std::int64_t;

enum class VisitKind : std::uint8_t { forward, backward, update };
std::string_view name(VisitKind kind) noexcept;

/// A layer's experts are used. They are used in ascending order in forward and update, in descending order in backward: a
/// cache then finds at the turn what it used last.
struct Visit {
  std::int32_t layer = 0;
  VisitKind kind = VisitKind::forward;
  std::int32_t micro_batch = 0;  ///< 0 for update
  bool operator==(const Visit&) const = default;
};

enum class VisitOrder : std::uint8_t {
  horizontal,  ///< each micro-batch through all layers, forward and backward, before the next
  vertical,    ///< each layer once for all micro-batches, which count as one
};

enum class Updates : std::uint8_t {
  none,     ///< optimizer states stay on the device
  touched,  ///< of the experts that some token of the step used
  dense,    ///< of all experts
};

/// The visits of one step. Updates come last, from the last layer to the first, so that what the next forward needs first
/// was used last.
std::vector<Visit> step_visits(std::int32_t layers,
                               std::int32_t micro_batches,
                               VisitOrder order,
                               Updates updates);

}  // namespace moesaic::tiers
