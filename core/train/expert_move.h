#pragma once
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/nn/parameter_store.h"
#include "core/train/offloaded_move.h"
#include "core/train/optimizer.h"
#include "parallel/member_moves.h"
#include "parallel/mesh.h"

namespace moesaic {

/// Carries experts to other places: weights, masters or remainders, and optimizer state, bit by bit, on the device or from tier
/// to tier. All ranks of a pipeline stage call it together, between steps; everything is enqueued on the stream of the call.
class ExpertMove {
 public:
  /// Memory on the device for what is on its way: a window of all slots at a time; of offloaded experts, a piece of one.
  static std::size_t memory_bytes(const ParameterStore& params);

  /// `stage`: all ranks of the stage. References must outlive this.
  ExpertMove(ParameterStore& params, const Optimizer& optimizer, Communicator& stage);

  /// Moves what the members of `id` have to `places`, and sets that table. Returns the bytes that all ranks of the stage send
  /// each other.
  std::int64_t move(PlacesId id, std::span<const std::int32_t> places, Stream& stream);

 private:
  std::int64_t move_storage(StorageId id, const MemberMoves& moves, Stream& stream);
  /// What this rank keeps of a tensor with slots: elements from `begin` on; nothing where another rank does.
  struct Kept {
    DType dtype = DType::f32;
    TensorView view;
    std::int64_t begin = 0;
  };
  std::int64_t move_tensor(const Kept& tensor, const MemberMoves& moves, Stream& stream);
  void exchange(const Kept& tensor,
                bool is_shared,
                std::vector<MemberPiece> pieces,
                Stream& stream);

  ParameterStore& params_;
  const Optimizer& optimizer_;
  Communicator& stage_;
  Buffer outgoing_, incoming_;
  std::optional<OffloadedMove> offloaded_;
};

}  // namespace moesaic
