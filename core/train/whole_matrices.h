#pragma once
#include <array>
#include <functional>
#include <span>

#include "core/nn/parameter_store.h"
#include "kernels/backend.h"
#include "memory/buffer.h"
#include "parallel/mesh.h"

namespace moesaic {

/// Matrices that a layout splits by rows or columns (Axis::tp, Axis::etp), put together for what needs the whole of one:
/// Muon's orthogonalisation. The ranks of the axis share the work: of as many matrices as there are ranks each receives one
/// whole, works on it, and hands the others their blocks of it back.
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
  /// The axis that does it.
  Axis axis(ParamId id) const { return cut(id).axis; }
  std::size_t bytes() const noexcept { return memory_.bytes(); }

  /// This rank's block of one tensor of a matrix; empty: the matrix has no such tensor.
  struct Block {
    TensorView own;
    bool is_read_only = false;  ///< is not handed back
  };
  struct Blocks {
    ParamId id;
    std::array<Block, kTensors> tensors;
  };
  using Whole = std::array<TensorView, kTensors>;
  /// Rank r of the axis works on matrices[r]; there are at most as many as ranks, all split over that axis. `work(i, whole)`
  /// is called on the rank that matrices[i] falls to, and its results replace the blocks of all ranks. All ranks of the axis
  /// call alike. Enqueues. `mesh`: null to measure, where nothing is sent and `work` is called for every matrix.
  void work(Backend& backend,
            const Mesh* mesh,
            std::span<const Blocks> matrices,
            const std::function<void(std::size_t, const Whole&)>& work);

 private:
  struct Cut {
    Axis axis = Axis::tp;
    int dim = 0;  // 0: rows, 1: columns
  };
  /// A turn of the ranks of an axis.
  struct Turn {
    Backend& backend;
    Communicator* comm;
    std::span<const Blocks> matrices;
    std::int64_t ranks, here;
    bool works() const { return here < static_cast<std::int64_t>(matrices.size()); }
  };
  Cut cut(ParamId id) const;
  Whole whole(const Blocks& blocks) const;
  /// Tensor t of the matrix that this rank works on, cut by ranks: [ranks, block]; its rows, or memory beside it.
  TensorView by_rank(const Turn& turn, std::size_t t, const Whole& whole) const;
  void collect(const Turn& turn, std::size_t t, const Whole& whole) const;
  void hand_back(const Turn& turn, std::size_t t, const Whole& whole) const;
  void reserve(std::int64_t elements);
  void allocate();

  const ParameterStore& params_;
  std::int64_t most_ = 0;
  Buffer memory_;  // [kTensors + 1][most_], 8 bytes an element
};

}  // namespace moesaic
