#include "core/config/check_parts.h"

#include <algorithm>

#include <fmt/format.h>

namespace moesaic::config {

std::string near_divisors(std::int64_t n, std::int64_t x) {
  std::int64_t below = std::min(x, n), above = x;
  while (n % below != 0)
    --below;
  while (above <= n && n % above != 0)
    ++above;
  return above <= n ? fmt::format("{}, {}", below, above) : fmt::format("{}", below);
}

std::int64_t Checker::full_attention_layers() const {
  return model_.linear_attn_config
             ? static_cast<std::int64_t>(model_.linear_attn_config->full_attn_layers.size())
             : model_.num_hidden_layers;
}

bool Checker::uses_data_length() const {
  const auto& phases = config_.train.phases;
  return phases.empty() || std::any_of(phases.begin(), phases.end(), [](const PhaseConfig& p) {
           return !p.sequence_length;
         });
}

}  // namespace moesaic::config
