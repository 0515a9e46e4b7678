#pragma once
#include <string>
#include <vector>

#include "core/base/tensor.h"
#include "parallel/mesh.h"

namespace moesaic {

/// How one global tensor is laid over the mesh. Axes that are not named replicate it.
struct Placement {
  struct Split {
    Axis axis;
    int dim;
  };
  /// In order, outermost first: {{Axis::ep, 0}, {Axis::etp, 1}} for expert weights [E, N, K].
  /// Several axes may split one dimension.
  std::vector<Split> splits;
  std::vector<Axis> grad_reduce;      ///< axes over which its gradient is summed
  std::vector<Axis> optimizer_shard;  ///< axes over which its optimizer state is cut (ZeRO-1)
};

/// Offset and extent per dimension of what one rank holds.
struct LocalBlock {
  Shape offset;
  Shape extent;
};

/// The block of `global` that `world_rank` holds: each split cuts its dimension into equal parts,
/// by coordinate. Throws UsageError, naming `tensor`, when an axis does not divide its dimension,
/// and InternalError for a dimension that does not exist or an axis named twice.
LocalBlock local_block(const std::string& tensor,
                       const Shape& global,
                       const Placement& placement,
                       const MeshLayout& layout,
                       int world_rank);

/// Elements [begin, end) of the `n` of a flat tensor, as equal as can be: what member `index` of
/// `parts` owns when optimizer state is sharded. Empty ranges are possible.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
FlatRange flat_shard(std::int64_t n, int index, int parts);

}  // namespace moesaic
