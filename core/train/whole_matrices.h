#pragma once
#include "core/nn/parameter_store.h"
#include "kernels/backend.h"
#include "memory/buffer.h"
#include "parallel/mesh.h"

namespace moesaic {

/// Matrices that a layout splits by rows or columns (Axis::tp, Axis::etp), put together for what needs the whole of one:
/// Muon's orthogonalisation. All ranks of the axis do the same with the whole and keep their block of it.
class WholeMatrices {
 public:
  /// Tensors of one matrix that exist at a time.
  static constexpr int kTensors = 5;

  /// Memory for the largest matrix for which is_split() and `wanted` hold.
  template <class Wanted>
  WholeMatrices(const ParameterStore& params, Wanted&& wanted) : params_(params) {
    for (std::size_t i = 0; i < params.params().size(); ++i) {
      const ParamId id{static_cast<std::int32_t>(i)};
      if (is_split(id) && wanted(id)) reserve(params.spec(id).shape.numel());
    }
    allocate();
  }
  /// Whether this rank holds part of the members.
  bool is_split(ParamId id) const { return !params_.holds_whole_members(id); }
  std::size_t bytes() const noexcept { return memory_.bytes(); }

  /// The whole of a tensor of which `own` [block] is this rank's part, in slot `slot` until the next call for it; empty
  /// for an empty one. `mesh`: null to measure, where nothing is sent. All ranks of the axis call.
  TensorView gather(Backend& backend, const Mesh* mesh, ParamId id, ConstTensorView own, int slot);
  /// own = this rank's part of `whole`.
  void keep_own(Backend& backend, ParamId id, TensorView own, ConstTensorView whole) const;

 private:
  struct Cut {
    Axis axis = Axis::tp;
    int dim = 0;  // 0: rows, 1: columns
  };
  Cut cut(ParamId id) const;
  void reserve(std::int64_t elements);
  void allocate();

  const ParameterStore& params_;
  std::int64_t most_ = 0;
  Buffer memory_;  // [kTensors + 1][most_], 8 bytes an element
};

}  // namespace moesaic
