#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "core/nn/parameter_store.h"
#include "kernels/ops/op.h"
#include "parallel/mesh.h"

namespace moesaic {

/// What GradientReduction does, for experts whose weights and gradients are offloaded: adds the gradients of the ranks that
/// hold the same experts, in rank order, member by member, one of every owner at a time, and brings the owners' new weights to the others. All
/// ranks take the same turns in the same order, whichever experts they have used. The bits are those of GradientReduction.
class MemberReduction {
 public:
  /// `mesh`: null to measure, where nothing is sent. Both must outlive this.
  MemberReduction(const ParameterStore& params, const Mesh* mesh);

  /// All gradients are final; those of frozen families are passed over. Where state is sharded each owner has the sums
  /// of its members, and what the others hold of them is undefined.
  void reduce(Backend& backend);
  /// All ranks get all weights from their owners. `all`: those of families that are frozen now as well.
  void gather_weights(Backend& backend, bool all);

 private:
  /// A storage that several ranks hold.
  struct Shared {
    StorageId id;
    Communicator* comm = nullptr;  // null to measure
    int ranks = 1, here = 0;
    Shape member;  // [rows, cols]
  };
  /// One member of every rank that has one left, and where each rank's part of them, laid side by side, begins and ends.
  struct Turn {
    std::vector<std::int64_t> members, bounds;
    std::int64_t own = -1;  // which of `members` is this rank's
  };
  std::vector<Turn> turns(const Shared& shared) const;
  TensorView side_by_side(Backend& backend, const Shared& shared, const Turn& turn, DType dtype);
  void reduce(Backend& backend, const Shared& shared, const Turn& turn);
  void gather(Backend& backend, const Shared& shared, const Turn& turn);
  bool is_trained(const Shared& shared) const;

  const ParameterStore& params_;
  std::vector<Shared> shared_;
};

}  // namespace moesaic
