#include "parallel/placement.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

namespace moesaic {

LocalBlock local_block(const std::string& tensor,
                       const Shape& global,
                       const Placement& placement,
                       const MeshLayout& layout,
                       int world_rank) {
  LocalBlock block;
  block.extent = global;
  block.offset.rank = global.rank;
  std::set<Axis> used;
  for (const auto& [axis, dim] : placement.splits) {
    MOESAIC_CHECK(0 <= dim && dim < global.rank,
                  fmt::format("{} has no dimension {}", tensor, dim));
    MOESAIC_CHECK(used.insert(axis).second,
                  fmt::format("{} is split twice over {}", tensor, name(axis)));
    const auto d = static_cast<std::size_t>(dim);
    const std::int64_t parts = layout.extent(axis);
    if (block.extent.dim[d] % parts != 0) {
      throw UsageError(
          fmt::format("{} {}: parallel.{} = {} does not divide the {} elements of dimension {}",
                      tensor,
                      to_string(global),
                      name(axis),
                      parts,
                      block.extent.dim[d],
                      dim));
    }
    block.extent.dim[d] /= parts;
    block.offset.dim[d] += layout.coordinate(axis, world_rank) * block.extent.dim[d];
  }
  return block;
}

FlatRange flat_shard(std::int64_t n, int index, int parts) {
  MOESAIC_CHECK(n >= 0 && 0 <= index && index < parts, "no such shard");
  const auto begin = [&](int i) { return n / parts * i + std::min<std::int64_t>(i, n % parts); };
  return {begin(index), begin(index + 1)};
}

}  // namespace moesaic
