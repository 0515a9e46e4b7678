#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/nn/parameter_store.h"

namespace moesaic {

/// How many rows each expert here gets of a micro-batch, as far as the host knows: experts that do not all fit on the device
/// are fetched by it (MemberVisit::rows). A tape keeps one, from forward to backward.
class ExpertRows {
 public:
  /// Allocates what read() needs, if anybody will ask.
  ExpertRows(const ParameterStore& params, std::int64_t experts);

  /// They are these; none: nobody knows.
  void set(std::span<const std::int64_t> rows);
  /// They follow from `offsets` [experts + 1] i32 on the device, once `stream` has come to this point. Nothing happens where
  /// no one will ask.
  void read(ConstTensorView offsets, Stream& stream);
  /// By expert, never changed; null: nobody knows. After read() the first call waits on the host.
  std::shared_ptr<const std::vector<std::int64_t>> get();

 private:
  std::shared_ptr<const std::vector<std::int64_t>> rows_;
  Buffer memory_;  // of the offsets
  std::optional<Event> arrived_;
  bool is_under_way_ = false;
};

}  // namespace moesaic
