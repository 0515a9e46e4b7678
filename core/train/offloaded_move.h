#pragma once
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "core/nn/expert_tiers.h"
#include "core/nn/parameter_store.h"

namespace moesaic {

/// What ExpertMove does, for experts in tiers: weights and state of whole members change over two by two
/// (parallel/place_swaps.h), one member of a rank on its way at a time, so that a cache's fewest slots will do. A member's slot is sent from and
/// received for directly, in pieces. All ranks of a stage take part in every round.
class OffloadedMove {
 public:
  /// `arriving`: memory on the device for a piece, of the same size on all ranks. References must outlive this.
  OffloadedMove(const ParameterStore& params, Communicator& stage, TensorView arriving);

  /// What the members of a storage have here moves from `before` to `after`: places of all members. Returns the bytes that all
  /// ranks of the stage send each other.
  std::int64_t move_weights(StorageId id,
                            std::span<const std::int32_t> before,
                            std::span<const std::int32_t> after,
                            Stream& stream);
  /// The same of masters or remainders, and of what the optimizer keeps, wherever their owners are.
  std::int64_t move_state(StorageId id,
                          std::span<const std::int32_t> before,
                          std::span<const std::int32_t> after,
                          Stream& stream);

 private:
  /// A rank in the stage, and a member there.
  struct Holder {
    int rank = 0;
    std::int64_t member = 0;
  };
  /// What is moved of a storage's members.
  struct Moved {
    StorageId id;
    ExpertTiers::Access access;
    std::vector<std::int64_t> bytes;  ///< of a member's tensors
    bool by_owners = false;  ///< one of the ranks with the same members has it, else all of them
  };
  std::int64_t move(const Moved& moved,
                    std::span<const std::int32_t> before,
                    std::span<const std::int32_t> after,
                    Stream& stream);
  Holder holder(const Moved& moved, std::int32_t place) const;
  void change_over(const Moved& moved, const Holder& one, const Holder& other, Stream& stream);
  void stand_by(const Moved& moved, Stream& stream);
  /// Calls `work(tensor, begin, bytes)` for pieces that `arriving_` holds.
  using OnPiece = std::function<void(std::size_t, std::int64_t, std::int64_t)>;
  void in_pieces(const Moved& moved, const OnPiece& work) const;

  const ParameterStore& params_;
  Communicator& stage_;
  TensorView arriving_;  // u8
};

}  // namespace moesaic
