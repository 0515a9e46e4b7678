#pragma once
#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "core/nn/parameter_store.h"
#include "parallel/mesh.h"

namespace moesaic {

/// Adds the gradients of the ranks that see different tokens, in rank order, on a stream of its own beside the backward
/// pass that makes them: what becomes final is reduced in pieces while earlier layers are still at work. The bits do not
/// depend on the pieces. Where optimizer state is sharded the pieces are the store's buckets, each part of one is
/// summed for its owner alone, and the weights are gathered from the owners once they are updated.
class GradientReduction {
 public:
  /// `mode`: of the stream. Both references must outlive this.
  GradientReduction(const ParameterStore& params, const Mesh& mesh, Stream::Mode mode);

  /// A new step: no gradient is final.
  void begin();
  /// The gradients of `first` and all storages after it are final once `main` has come to this point.
  void final_from(StorageId first, Stream& main);
  /// All gradients are final once `main` has come to this point; later work of `main` sees the sums.
  void finish(Stream& main);
  /// In `main`, after the owners' updates: all ranks of a group get all of its weights.
  void gather_weights(Stream& main);
  /// Waits for the reductions and rethrows what went wrong in them.
  void synchronize() { stream_.synchronize(); }

 private:
  /// Gradients that are summed over the same ranks.
  struct Group {
    std::size_t index = 0;                  // in the store
    Communicator* comm = nullptr;           // null: this rank alone
    std::int64_t end = 0;                   // elements from here on are reduced
    std::vector<std::size_t> buckets = {};  // of the store, when its state is sharded
  };
  bool reduce_buckets(Group& group, std::int64_t begin, Stream& main);
  void reduce(Group& group, std::int64_t begin, Stream& main);

  const ParameterStore& params_;
  Stream stream_;
  Event ready_, reduced_;
  std::vector<Group> groups_;
};

}  // namespace moesaic
