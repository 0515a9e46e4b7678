#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/config/check.h"

// What the rules of several topics share. Included by source files of core/config only.
namespace moesaic::config {

constexpr std::int64_t kMostToSearch = 1 << 20;  // for a number that would fit

/// The divisors of n next to x: "4, 8".
std::string near_divisors(std::int64_t n, std::int64_t x);

/// A list of rules, which adds the broken ones to `findings`.
class Checker {
 public:
  Checker(const Config& config, std::vector<Finding>& findings)
      : config_(config), model_(config.model), findings_(findings) {}

 protected:
  void add(std::vector<std::string> keys, std::string message) {
    findings_.push_back({std::move(keys), std::move(message)});
  }
  std::int64_t full_attention_layers() const;
  bool has_mtp() const { return model_.mtp.num_nextn_predict_layers > 0; }
  /// Not when every phase has a length of its own.
  bool uses_data_length() const;

  const Config& config_;
  const ModelConfig& model_;

 private:
  std::vector<Finding>& findings_;
};

}  // namespace moesaic::config
