#pragma once
#include <string>

#include "apps/selftest/layout_run.h"

namespace moesaic::apps::selftest {

/// How far a run is from the same steps on one rank.
struct Difference {
  double loss = 0;       ///< largest relative difference of a loss of the first step
  double grad_norm = 0;  ///< relative, of the first step
  double gradient = 0;   ///< largest over all gradients of the first step
  std::string gradient_name;
  double later =
      0;  ///< largest over losses and norms of the later steps and over the final weights
  std::string later_name;
};

/// Tensors are compared by the largest difference of an element over the largest element of the tensor, which counts as at
/// least a thousandth of the largest of all tensors. Throws InternalError when the runs do not hold the same tensors.
Difference compare(const RunResult& run, const RunResult& one_rank);

}  // namespace moesaic::apps::selftest
