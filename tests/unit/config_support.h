#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "core/config/load.h"

namespace config_tests {

using moesaic::config::ConfigError;
using moesaic::config::LoadedConfig;
using moesaic::config::Problem;

/// A small valid configuration, one section per paragraph; tests append to it or override it.
inline const std::string kTiny = R"(model:
  hidden_size: 32
  num_hidden_layers: 2
  vocab_size: 256
  intermediate_size: 64
  num_attention_heads: 2
  kv_lora_rank: 16
  qk_nope_head_dim: 8
  qk_rope_head_dim: 4
  v_head_dim: 8
data: {train: data/t.txt, sequence_length: 64}
train: {steps: 10, global_batch_size: 4}
optimizer: {lr: 1e-3}
)";

/// All problems of a text, none if it loads.
inline std::vector<Problem> problems_of(const std::string& text,
                                        const std::vector<std::string>& overrides = {}) {
  try {
    moesaic::config::load_config_text(text, "t.yaml", overrides);
  } catch (const ConfigError& error) {
    return error.problems();
  }
  return {};
}

/// All problems as one text, a line each.
inline std::string report_of(const std::string& text,
                             const std::vector<std::string>& overrides = {}) {
  std::string report;
  for (const Problem& problem : problems_of(text, overrides))
    report += to_string(problem) + "\n";
  return report;
}

/// What kTiny says after one override, empty if it loads.
inline std::string report_of_override(const std::string& argument) {
  return report_of(kTiny, {argument});
}

inline std::vector<std::string> paths(const std::vector<moesaic::config::DataFileConfig>& entries) {
  std::vector<std::string> all;
  for (const auto& entry : entries)
    all.push_back(entry.path);
  return all;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace config_tests
