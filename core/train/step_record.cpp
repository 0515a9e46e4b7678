#include "core/train/step_record.h"

#include <algorithm>
#include <cmath>

namespace moesaic {

ExpertLoad expert_load(std::vector<std::int64_t> tokens) {
  ExpertLoad load;
  double sum = 0, most = 0, information = 0;
  for (const std::int64_t n : tokens) {
    sum += static_cast<double>(n);
    most = std::max(most, static_cast<double>(n));
    load.dead_experts += n == 0 ? 1 : 0;
  }
  const auto experts = static_cast<double>(tokens.size());
  if (sum > 0) {
    load.max_over_mean = most * experts / sum;
    for (const std::int64_t n : tokens) {
      const double share = static_cast<double>(n) / sum;
      if (n > 0) information -= share * std::log(share);
    }
    load.entropy = tokens.size() > 1 ? information / std::log(experts) : 1;
  }
  load.tokens = std::move(tokens);
  return load;
}

}  // namespace moesaic
