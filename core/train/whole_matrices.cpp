#include "core/train/whole_matrices.h"

#include <algorithm>

#include "kernels/ops/head_linear.h"

namespace moesaic {
namespace {

// The op that moves columns knows no u16; it moves bits.
template <class View>
View movable(View view, Shape shape) {
  const DType dtype = view.dtype() == DType::u16 ? DType::bf16 : view.dtype();
  return View(view.data(), dtype, shape, view.device());
}

}  // namespace

void WholeMatrices::reserve(std::int64_t elements) {
  most_ = std::max(most_, (elements + 31) / 32 * 32);
}

void WholeMatrices::allocate() {
  if (most_ > 0)
    memory_ =
        params_.allocate(static_cast<std::size_t>((kTensors + 1) * most_) * 8, "whole matrices");
}

WholeMatrices::Cut WholeMatrices::cut(ParamId id) const {
  const ParameterSpec& spec = params_.spec(id);
  const int family = spec.members > 0 ? 1 : 0;
  for (const auto& [axis, dim] : spec.placement.splits) {
    if (dim >= family && params_.position().extent(axis) > 1) return {axis, dim - family};
  }
  throw InternalError("'" + spec.name + "' is not split");
}

TensorView WholeMatrices::gather(
    Backend& backend, const Mesh* mesh, ParamId id, ConstTensorView own, int slot) {
  if (own.empty()) return {};
  MOESAIC_CHECK(0 <= slot && slot < kTensors, "no such slot");
  const Shape& shape = params_.spec(id).shape;
  const auto at = [&](int i) { return static_cast<std::size_t>(i * most_) * 8; };
  const TensorView whole = memory_.view(shape, own.dtype(), at(slot));
  const Cut c = cut(id);
  const std::int64_t ranks = params_.position().extent(c.axis), rows = shape[0], width = own.dim(1);
  Stream& stream = stream_of(backend);
  const auto all_gather = [&](TensorView to) {
    if (mesh != nullptr) mesh->group(c.axis).comm()->all_gather(to, own, stream);
  };
  if (c.dim == 0) {
    all_gather(whole);
    return whole;
  }
  const TensorView by_rank = memory_.view({ranks, rows, width}, own.dtype(), at(kTensors));
  all_gather(by_rank);
  for (std::int64_t r = 0; r < ranks; ++r) {
    run(backend,
        CopyHeadColumns{
            .y = {movable(whole, {rows, 1, shape[1]}), r * width},
            .x = {movable(ConstTensorView(by_rank.rows(r, r + 1)), {rows, 1, width}), 0},
            .n = width});
  }
  return whole;
}

void WholeMatrices::keep_own(Backend& backend,
                             ParamId id,
                             TensorView own,
                             ConstTensorView whole) const {
  if (own.empty()) return;
  const Shape& offset = params_.block_of_member(id).offset;
  if (cut(id).dim == 0)
    return copy_tensor(own, whole.rows(offset[0], offset[0] + own.dim(0)), stream_of(backend));
  const std::int64_t rows = own.dim(0), width = own.dim(1);
  run(backend,
      CopyHeadColumns{.y = {movable(own, {rows, 1, width}), 0},
                      .x = {movable(whole, {rows, 1, whole.dim(1)}), offset[1]},
                      .n = width});
}

}  // namespace moesaic
