#include "core/train/token_groups.h"

namespace moesaic {
namespace {

// The last axis counts fastest, as in the mesh.
std::unique_ptr<TokenSlices> slices(const MeshPosition& position,
                                    const Mesh* mesh,
                                    const std::vector<Axis>& axes) {
  int rank = 0, size = 1;
  for (const Axis axis : axes) {
    rank = rank * position.extent(axis) + position.coordinate(axis);
    size *= position.extent(axis);
  }
  if (size == 1) return nullptr;
  return std::make_unique<TokenSlices>(
      rank, size, mesh != nullptr ? mesh->group(axes).comm() : nullptr);
}

}  // namespace

TokenGroups::TokenGroups(const MeshPosition& position, const Mesh* mesh)
    : tensor_(slices(position, mesh, {Axis::tp})),
      expert_(slices(position, mesh, {Axis::etp})),
      context_(slices(position, mesh, {Axis::cp})),
      batch_(slices(position, mesh, {Axis::cp, Axis::tp})) {}

Bounds TokenGroups::bounds(std::int64_t tokens,
                           std::int64_t sequence,
                           ExpertExchange* exchange) const {
  return {.tokens = context_ ? context_->own(tokens) : tokens,
          .sequence = sequence,
          .exchange = exchange,
          .slices = tensor_.get(),
          .expert_slices = expert_.get(),
          .context = context_.get(),
          .batch_slices = batch_.get()};
}

}  // namespace moesaic
