#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "core/model/model.h"
#include "core/nn/expert_tiers.h"
#include "core/train/step_record.h"

namespace moesaic {

/// What the tiers of a store did since begin(), for the records of a step. Without tiers there is nothing.
class TierMeter {
 public:
  /// Both live as long as this object.
  TierMeter(const ParameterStore& params, Model& model);
  void begin();
  std::map<std::string, TierTraffic> kinds() const;
  std::vector<LayerTierTraffic> layers() const;  ///< in the order of the model

 private:
  std::map<std::string, TierTraffic> all_kinds() const;
  std::vector<LayerTierTraffic> all_layers() const;

  const ExpertTiers* tiers_;
  std::vector<std::pair<std::int64_t, StorageId>> storages_;  ///< with their layers, ascending
  std::map<std::string, TierTraffic> kinds_before_;
  std::vector<LayerTierTraffic> layers_before_;
};

}  // namespace moesaic
