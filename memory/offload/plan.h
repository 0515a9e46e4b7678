#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moesaic::offload {

/// What a visit, a stretch of a stream's work, does with a tensor.
struct Use {
  int tensor = 0;
  bool writes = false;  ///< all of it, which begins a new life; else the visit reads it
};
using Visit = std::vector<Use>;

struct Options {
  /// A copy back begins so many visits before it is needed, and a copy out has as many to end in.
  int lead = 2;
  /// A tensor that is needed again within so many visits stays where it is. At least 2 * lead.
  int stay = 6;
};

/// Where tensors lie while known visits pass over and over: each has one place in device memory, which it shares with
/// others that are never there at the same time, and, if it leaves in between, a home in host memory. So views of a tensor
/// are good for all visits.
struct Plan {
  struct Tensor {
    std::size_t bytes = 0;
    int place = 0;
    std::int64_t home = -1;  ///< offset in host memory; -1: never leaves
  };
  struct Step {
    std::vector<int> loads;   ///< copies back that begin before the visit
    std::vector<int> awaits;  ///< loaded before, first needed by the visit
    std::vector<int> writes;  ///< begin to live here
    std::vector<int> stores;  ///< copies out that begin after the visit
    std::vector<int> leaves;  ///< their places are others' from here on
  };
  std::vector<Tensor> tensors;
  std::vector<std::size_t> places;  ///< bytes of each
  std::vector<Step> visits;
  std::size_t device_bytes = 0, host_bytes = 0;
  std::size_t bytes_out = 0, bytes_in = 0;  ///< copied in one round of the visits
};

/// A function of its arguments. `sizes`: bytes of each tensor. Every life begins with a visit that writes, and ends with the
/// last visit before the next such, or of the round.
Plan make_plan(std::span<const std::size_t> sizes,
               const std::vector<Visit>& visits,
               const Options& options = {});

}  // namespace moesaic::offload
