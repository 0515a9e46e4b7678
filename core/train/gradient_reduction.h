#pragma once
#include <cstdint>

#include "comm/communicator.h"
#include "core/nn/parameter_store.h"

namespace moesaic {

/// Adds the gradients of all ranks in rank order, on a stream of its own beside the backward pass that makes them: what
/// becomes final is reduced in pieces while earlier layers are still at work. The bits do not depend on the pieces.
class GradientReduction {
 public:
  /// `mode`: of the stream. Both references must outlive this.
  GradientReduction(const ParameterStore& params, Communicator& world, Stream::Mode mode);

  /// A new step: no gradient is final.
  void begin();
  /// The gradients of `first` and all storages after it are final once `main` has come to this point.
  void final_from(StorageId first, Stream& main);
  /// All gradients are final once `main` has come to this point; later work of `main` sees the sums.
  void finish(Stream& main);
  /// Waits for the reductions and rethrows what went wrong in them.
  void synchronize() { stream_.synchronize(); }

 private:
  void reduce(std::int64_t begin, Stream& main);

  const ParameterStore& params_;
  Communicator& world_;
  Stream stream_;
  Event ready_, reduced_;
  std::int64_t end_ = 0;  // elements from here on are reduced
};

}  // namespace moesaic
