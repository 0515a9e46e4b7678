#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/tensor.h"
#include "parallel/mesh.h"

namespace moesaic {

/// Which axes a tensor sees: those of dense layers (dp cp tp) or those of routed experts (edp ep etp).
enum class AxisFamily : std::uint8_t { dense, expert };

/// How one global tensor is laid over the ranks of its pipeline stage. Axes of its family that do not split it replicate
/// it: ranks along them see different tokens, so that its gradient is the sum over them.
struct Placement {
  struct Split {
    Axis axis;
    int dim;
    bool operator==(const Split&) const = default;
  };
  /// In order, outermost first: {{Axis::ep, 0}, {Axis::etp, 1}} for expert weights [E, N, K].
  /// Several axes may split one dimension.
  std::vector<Split> splits = {};
  AxisFamily family = AxisFamily::dense;

  /// The axes over which the gradient is summed, outermost first.
  std::vector<Axis> gradient_axes() const;
  bool operator==(const Placement&) const = default;
};

/// Offset and extent per dimension of what one rank holds.
struct LocalBlock {
  Shape offset;
  Shape extent;
};

/// The block of `global` that the rank at `position` holds: each split cuts its dimension into equal parts,
/// by coordinate. Throws UsageError, naming `tensor`, when an axis does not divide its dimension,
/// and InternalError for a dimension that does not exist or an axis named twice.
LocalBlock local_block(const std::string& tensor,
                       const Shape& global,
                       const Placement& placement,
                       const MeshPosition& position);
/// Whether the rank is the first of those that hold this block: exactly one rank of a stage speaks for each block.
bool speaks_for(const Placement& placement, const MeshPosition& position);

/// Elements [begin, end) of the `n` of a flat tensor, as equal as can be: what member `index` of
/// `parts` owns when optimizer state is sharded. Empty ranges are possible.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
FlatRange flat_shard(std::int64_t n, int index, int parts);

}  // namespace moesaic
