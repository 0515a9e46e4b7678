#include "parallel/placement.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

namespace moesaic {

std::vector<Axis> Placement::gradient_axes() const {
  std::vector<Axis> axes = family == AxisFamily::dense
                               ? std::vector<Axis>{Axis::dp, Axis::cp, Axis::tp}
                               : std::vector<Axis>{Axis::edp, Axis::ep, Axis::etp};
  std::erase_if(axes, [this](Axis axis) {
    return std::any_of(
        splits.begin(), splits.end(), [axis](const Split& s) { return s.axis == axis; });
  });
  return axes;
}

bool speaks_for(const Placement& placement, const MeshPosition& position) {
  const auto axes = placement.gradient_axes();
  return std::all_of(
      axes.begin(), axes.end(), [&](Axis axis) { return position.coordinate(axis) == 0; });
}

LocalBlock local_block(const std::string& tensor,
                       const Shape& global,
                       const Placement& placement,
                       const MeshPosition& position) {
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
    const std::int64_t parts = position.extent(axis);
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
    block.offset.dim[d] += position.coordinate(axis) * block.extent.dim[d];
  }
  return block;
}

FlatRange flat_shard(std::int64_t n, int index, int parts) {
  MOESAIC_CHECK(n >= 0 && 0 <= index && index < parts, "no such shard");
  const auto begin = [&](int i) { return n / parts * i + std::min<std::int64_t>(i, n % parts); };
  return {begin(index), begin(index + 1)};
}

}  // namespace moesaic
