#pragma once
#include <vector>

#include "core/nn/parameter_store.h"
#include "kernels/backend.h"

namespace moesaic {

/// What copies of experts (ExpertCopies) and their homes tell each other in every step: weights go from home to the copies
/// once they are updated; gradients of copies go home and are added there, the home's own first, then those of the copies in
/// the order of their ranks, before anything else is done with them. All ranks that share the experts make the same calls.
class ExpertCopier {
 public:
  /// Memory on the device for gradients that arrive.
  static constexpr std::size_t kMostBytes = std::size_t{32} << 20;
  static std::size_t memory_bytes(const ParameterStore& params,
                                  std::size_t most_bytes = kMostBytes);

  /// `group`: along Axis::ep. Both references must outlive this. `most_bytes`: of memory for gradients that arrive.
  ExpertCopier(const ParameterStore& params,
               Communicator& group,
               std::size_t most_bytes = kMostBytes);

  /// Of all copies. Also after these have changed, and after weights were loaded.
  void send_weights(Stream& stream);

  /// A new step: no gradient went home.
  void begin_step();
  /// The gradients of `first` and all storages after it are final on this rank; those of copies go home, once a step.
  void gradients_final_from(StorageId first, Backend& backend);

 private:
  void send_weights(StorageId id, PlacesId places, Stream& stream);
  void return_gradients(StorageId id, PlacesId places, Backend& backend);

  const ParameterStore& params_;
  Communicator& group_;
  std::int32_t returned_from_ = 0;  // storages from here on are done
  Buffer arriving_;
};

}  // namespace moesaic
