#include "core/train/whole_matrices.h"

#include <algorithm>
#include <vector>

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

WholeMatrices::Whole WholeMatrices::whole(const Blocks& blocks) const {
  Whole all;
  for (std::size_t t = 0; t < all.size(); ++t) {
    const TensorView& own = blocks.tensors[t].own;
    if (!own.empty())
      all[t] = memory_.view(
          params_.spec(blocks.id).shape, own.dtype(), t * static_cast<std::size_t>(most_) * 8);
  }
  return all;
}

TensorView WholeMatrices::by_rank(const Turn& turn, std::size_t t, const Whole& whole) const {
  const Blocks& mine = turn.matrices[static_cast<std::size_t>(turn.here)];
  const Shape& block = mine.tensors[t].own.shape();
  const Shape shape{turn.ranks, block[0], block[1]};
  if (cut(mine.id).dim == 0) return whole[t].reshaped(shape);
  return memory_.view(shape,
                      whole[t].dtype(),
                      static_cast<std::size_t>(kTensors) * static_cast<std::size_t>(most_) * 8);
}

void WholeMatrices::collect(const Turn& turn, std::size_t t, const Whole& whole) const {
  Stream& stream = stream_of(turn.backend);
  std::vector<OutgoingMessage> sends;
  std::vector<IncomingMessage> receives;
  for (std::size_t i = 0; i < turn.matrices.size(); ++i) {
    const TensorView& own = turn.matrices[i].tensors[t].own;
    if (static_cast<std::int64_t>(i) != turn.here && !own.empty())
      sends.push_back({own, static_cast<int>(i)});
  }
  const bool works = turn.works() && !whole[t].empty();
  const TensorView parts = works ? by_rank(turn, t, whole) : TensorView();
  for (std::int64_t r = 0; works && r < turn.ranks; ++r) {
    const Block& mine = turn.matrices[static_cast<std::size_t>(turn.here)].tensors[t];
    const TensorView part = parts.rows(r, r + 1).reshaped(mine.own.shape());
    if (r == turn.here) {
      copy_tensor(part, mine.own, stream);
    } else {
      receives.push_back({part, static_cast<int>(r)});
    }
  }
  if (!sends.empty() || !receives.empty()) turn.comm->exchange(sends, receives, stream);
  if (!works || parts.data() == whole[t].data()) return;
  const std::int64_t rows = whole[t].dim(0), width = parts.dim(2);
  for (std::int64_t r = 0; r < turn.ranks; ++r) {
    run(turn.backend,
        CopyHeadColumns{.y = {movable(whole[t], {rows, 1, whole[t].dim(1)}), r * width},
                        .x = {movable(ConstTensorView(parts.rows(r, r + 1)), {rows, 1, width}), 0},
                        .n = width});
  }
}

void WholeMatrices::hand_back(const Turn& turn, std::size_t t, const Whole& whole) const {
  Stream& stream = stream_of(turn.backend);
  std::vector<OutgoingMessage> sends;
  std::vector<IncomingMessage> receives;
  if (turn.works() && !whole[t].empty()) {
    const Block& mine = turn.matrices[static_cast<std::size_t>(turn.here)].tensors[t];
    const TensorView parts = by_rank(turn, t, whole);
    const std::int64_t rows = whole[t].dim(0), width = parts.dim(2);
    for (std::int64_t r = 0; !mine.is_read_only && r < turn.ranks; ++r) {
      const TensorView part = parts.rows(r, r + 1).reshaped(mine.own.shape());
      if (parts.data() != whole[t].data()) {
        run(turn.backend,
            CopyHeadColumns{
                .y = {movable(part, {rows, 1, width}), 0},
                .x = {movable(ConstTensorView(whole[t]), {rows, 1, whole[t].dim(1)}), r * width},
                .n = width});
      }
      if (r == turn.here) {
        copy_tensor(mine.own, part, stream);
      } else {
        sends.push_back({part, static_cast<int>(r)});
      }
    }
  }
  for (std::size_t i = 0; i < turn.matrices.size(); ++i) {
    const Block& block = turn.matrices[i].tensors[t];
    if (static_cast<std::int64_t>(i) != turn.here && !block.own.empty() && !block.is_read_only)
      receives.push_back({block.own, static_cast<int>(i)});
  }
  if (!sends.empty() || !receives.empty()) turn.comm->exchange(sends, receives, stream);
}

void WholeMatrices::work(Backend& backend,
                         const Mesh* mesh,
                         std::span<const Blocks> matrices,
                         const std::function<void(std::size_t, const Whole&)>& work) {
  if (matrices.empty()) return;
  const Axis along = axis(matrices.front().id);
  const Turn turn{backend,
                  mesh != nullptr ? mesh->group(along).comm() : nullptr,
                  matrices,
                  params_.position().extent(along),
                  params_.position().coordinate(along)};
  MOESAIC_CHECK(static_cast<std::int64_t>(matrices.size()) <= turn.ranks,
                "more matrices than ranks to work on them");
  for (const Blocks& blocks : matrices)
    MOESAIC_CHECK(axis(blocks.id) == along, "matrices split over different axes");
  if (turn.comm == nullptr) {
    for (std::size_t i = 0; i < matrices.size(); ++i)
      work(i, whole(matrices[i]));
    return;
  }
  const Whole mine = turn.works() ? whole(matrices[static_cast<std::size_t>(turn.here)]) : Whole();
  for (std::size_t t = 0; t < mine.size(); ++t)
    collect(turn, t, mine);
  if (turn.works()) work(static_cast<std::size_t>(turn.here), mine);
  for (std::size_t t = 0; t < mine.size(); ++t)
    hand_back(turn, t, mine);
}

}  // namespace moesaic
