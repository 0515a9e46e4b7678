#include "kernels/ops/exchange.h"

#include <fmt/format.h>

#include "kernels/checks.h"

namespace moesaic {
namespace {

void check_i32(const ConstTensorView& v, const Shape& shape, const char* what) {
  check_shape(v, shape, what);
  check_dtype(v, DType::i32, what);
}
void check_places(const ConstTensorView& places) {
  MOESAIC_CHECK(places.rank() == 2, "places must be [rows, k]");
  check_dtype(places, DType::i32, "places");
}

}  // namespace

void PlaceGrid::check() const {
  MOESAIC_CHECK(nodes >= 1 && per_node >= 1 && places_per_owner >= 1, "an empty grid of places");
  MOESAIC_CHECK(0 <= owner && owner < owners(),
                fmt::format("no owner {} among {}", owner, owners()));
}

void ExpertPlaces::check() const {
  check_places(places);
  MOESAIC_CHECK(topk.rank() == 2 && topk.dim(1) == places.dim(1) && topk.dim(0) <= places.dim(0),
                "topk must be [tokens, k], with no more tokens than places has rows");
  check_dtype(topk, DType::i32, "topk");
  if (!kept.empty()) {
    check_shape(kept, topk.shape(), "kept");
    check_dtype(kept, DType::u8, "kept");
  }
  MOESAIC_CHECK(experts >= 1, "no experts");
  if (place_of_expert.empty()) return;
  if (place_of_expert.rank() == 1) return check_i32(place_of_expert, {experts}, "place_of_expert");
  MOESAIC_CHECK(place_of_expert.rank() == 2 && place_of_expert.dim(1) >= 1,
                "place_of_expert must be [experts] or [experts, turns]");
  check_i32(place_of_expert, {experts, place_of_expert.dim(1)}, "place_of_expert");
}
OpCost ExpertPlaces::cost() const {
  return {0, total_bytes({places, topk, kept, place_of_expert})};
}

void ExchangeGroups::check() const {
  check_places(places);
  grid.check();
  check_i32(groups, places.shape(), "groups");
  check_i32(index, places.shape(), "index");
  MOESAIC_CHECK(places.dim(1) <= kMaxChoices,
                fmt::format("{} choices, at most {}", places.dim(1), kMaxChoices));
  MOESAIC_CHECK(stride == 0 || (stride >= places.dim(0) && !per_choice),
                "blocks of fewer rows than there are");
}
OpCost ExchangeGroups::cost() const {
  return {0, total_bytes({groups, index, places})};
}

void ExchangeCounts::check() const {
  check_places(places);
  grid.check();
  MOESAIC_CHECK(0 <= hops.size && hops.size <= 3, "an exchange has at most three hops");
  check_i32(counts, {num_path_counts(hops, grid, hops.size) + grid.owners()}, "counts");
}
OpCost ExchangeCounts::cost() const {
  return {0, total_bytes({counts, places})};
}

void ExchangeChoices::check() const {
  check_places(places);
  MOESAIC_CHECK(places_out.rank() == 2 && places_out.dim(1) == places.dim(1),
                "places_out must be [items, k]");
  check_dtype(places_out, DType::i32, "places_out");
  MOESAIC_CHECK(weights.dtype() == DType::f64 || weights.dtype() == DType::f32,
                "weights must be f64 or f32");
  check_shape(weights, places.shape(), "weights");
  check_shape(weights_out, places_out.shape(), "weights_out");
  check_dtype(weights_out, weights.dtype(), "weights_out");
  MOESAIC_CHECK(places_per_owner >= 1, "an owner without places");
  if (src.empty()) {
    MOESAIC_CHECK(to_item.empty() && index.empty(), "to_item and index need src");
    MOESAIC_CHECK(places_out.dim(0) <= places.dim(0), "more items than rows");
    return;
  }
  check_i32(src, {places_out.dim(0)}, "src");
  check_i32(to_item, places.shape(), "to_item");
  check_i32(index, places.shape(), "index");
}
OpCost ExchangeChoices::cost() const {
  return {0, 2 * total_bytes({places_out, weights_out}) + total_bytes({src})};
}

void ByteChecksum::check() const {
  MOESAIC_CHECK(sum.numel() == 1, "a checksum is one element");
  check_dtype(sum, DType::i64, "sum");
}
OpCost ByteChecksum::cost() const {
  return {0, total_bytes({x})};
}

}  // namespace moesaic
