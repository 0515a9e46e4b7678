#pragma once
#include <string>

#include "apps/selftest/bounds.h"
#include "apps/selftest/layout_run.h"

namespace moesaic::apps::selftest {

/// How far a run is from the same steps on one rank.
struct Difference {
  double loss = 0;       ///< largest relative difference of a loss of the first step
  double grad_norm = 0;  ///< relative, of the first step
  double gradient = 0;   ///< largest over all gradients of the first step
  std::string gradient_name;
  double later = 0;  ///< largest over losses and norms of the later steps
  std::string later_name;
  double weights = 0;  ///< largest over the weights after the last step
  std::string weights_name;

  bool within(const DifferenceBounds& bounds) const;
};

/// Tensors are compared by the largest difference of an element over the largest element of the tensor, which counts as at
/// least a thousandth of the largest of all tensors. Weights of a run with RunResult::start are compared by the root mean
/// square of the differences over that of what one rank moved the tensor from there, which counts as at least a hundredth
/// of the farthest moved tensor's. Throws InternalError when the runs do not hold the same tensors.
Difference compare(const RunResult& run, const RunResult& one_rank);

}  // namespace moesaic::apps::selftest
