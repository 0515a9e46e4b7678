#include "memory/tiers/visits.h"

#include "core/base/error.h"

namespace moesaic::tiers {

std::string_view name(VisitKind kind) noexcept {
  switch (kind) {
    case VisitKind::forward:
      return "forward";
    case VisitKind::backward:
      return "backward";
    case VisitKind::update:
      return "update";
  }
  return "?";
}

std::vector<Visit> step_visits(std::int32_t layers,
                               std::int32_t micro_batches,
                               VisitOrder order,
                               Updates updates) {
  MOESAIC_CHECK(layers > 0 && micro_batches > 0, "a step has layers and micro-batches");
  std::vector<Visit> visits;
  const std::int32_t rounds = order == VisitOrder::vertical ? 1 : micro_batches;
  for (std::int32_t m = 0; m < rounds; ++m) {
    for (std::int32_t l = 0; l < layers; ++l)
      visits.push_back({l, VisitKind::forward, m});
    for (std::int32_t l = layers; l-- > 0;)
      visits.push_back({l, VisitKind::backward, m});
  }
  if (updates != Updates::none)
    for (std::int32_t l = layers; l-- > 0;)
      visits.push_back({l, VisitKind::update, 0});
  return visits;
}

}  // namespace moesaic::tiers
