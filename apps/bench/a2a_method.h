#pragma once
#include <memory>
#include <vector>

#include "apps/bench/a2a_routing.h"
#include "kernels/backend.h"
#include "parallel/dispatch/exchange.h"

namespace moesaic::bench {

struct A2aTimes {
  double plan = 0, dispatch = 0, combine = 0;  ///< seconds; dispatch with its choices
  double total() const noexcept { return plan + dispatch + combine; }
};

/// Dispatch and combine of one method as a layer of experts does it, with experts that return their rows: the sums then
/// have exact values (fp8: to 1/64), which are compared. Memory is allocated once.
class A2aMethod {
 public:
  struct Options {
    ExchangeMethod method = ExchangeMethod::flat;
    NodeGrid grid;
    RoutingOptions routing;
    std::int64_t width = 3584;
    DType dtype = DType::bf16;
    RowFormat format = RowFormat::plain;  ///< of dispatch
    double buffer_factor = 1.5;
    Device device = kCpu;
    int num_threads = 1;
  };
  A2aMethod(Communicator* group, const Options& options, const TokenChoices& choices);
  ~A2aMethod();

  /// Once through; the times of this rank. Throws InternalError when a sum is wrong or differs from the run before.
  A2aTimes run();
  int passes() const;
  Traffic rows() const;           ///< of one dispatch, sent by this rank, by the plan
  std::int64_t received() const;  ///< rows for this rank's experts

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::bench
