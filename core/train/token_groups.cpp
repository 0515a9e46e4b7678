#include "core/train/token_groups.h"

namespace moesaic {
namespace {

std::unique_ptr<TokenSlices> slices(const MeshPosition& position, const Mesh* mesh, Axis axis) {
  if (position.extent(axis) == 1) return nullptr;
  return std::make_unique<TokenSlices>(position.coordinate(axis),
                                       position.extent(axis),
                                       mesh != nullptr ? mesh->group(axis).comm() : nullptr);
}

}  // namespace

TokenGroups::TokenGroups(const MeshPosition& position, const Mesh* mesh)
    : tensor_(slices(position, mesh, Axis::tp)), expert_(slices(position, mesh, Axis::etp)) {}

Bounds TokenGroups::bounds(std::int64_t tokens,
                           std::int64_t sequence,
                           ExpertExchange* exchange) const {
  return {.tokens = tokens,
          .sequence = sequence,
          .exchange = exchange,
          .slices = tensor_.get(),
          .expert_slices = expert_.get()};
}

}  // namespace moesaic
