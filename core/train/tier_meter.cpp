#include "core/train/tier_meter.h"

#include <algorithm>

namespace moesaic {
namespace {

TierTraffic traffic_of(const TierCounters& c) {
  const auto number = [](std::uint64_t n) { return static_cast<std::int64_t>(n); };
  return {.uses = number(c.cache.uses),
          .hits = number(c.cache.hits),
          .bytes_up = number(c.cache.bytes_up),
          .bytes_down = number(c.cache.bytes_down),
          .file_read = number(c.file_bytes_read),
          .file_written = number(c.file_bytes_written),
          .host_waits = number(c.host_waits),
          .host_wait_seconds = c.host_wait_seconds};
}

}  // namespace

TierMeter::TierMeter(const ParameterStore& params, Model& model) : tiers_(params.tiers()) {
  if (tiers_ == nullptr) return;
  const auto layers = model.moe_layers();
  for (const TierGroup& group : tiers_->groups()) {
    for (const StorageId id : group.storages) {
      const std::string& name = params.spec(params.params_of(id).front()).name;
      const auto layer = std::find_if(layers.begin(), layers.end(), [&](const auto& named) {
        return name.starts_with(named.moe->name() + ".");
      });
      MOESAIC_CHECK(layer != layers.end(), "'" + name + "' belongs to no layer");
      storages_.emplace_back(layer->layer, id);
    }
  }
  std::stable_sort(storages_.begin(), storages_.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;
  });
  begin();
}

std::map<std::string, TierTraffic> TierMeter::all_kinds() const {
  std::map<std::string, TierTraffic> kinds;
  if (tiers_ == nullptr) return kinds;
  for (const TierCounters& c : tiers_->counters())
    kinds[c.kind] += traffic_of(c);
  return kinds;
}

std::vector<LayerTierTraffic> TierMeter::all_layers() const {
  std::vector<LayerTierTraffic> layers;
  for (const auto& [layer, id] : storages_) {
    if (layers.empty() || layers.back().layer != layer) layers.push_back({.layer = layer});
    layers.back().traffic += traffic_of(tiers_->counters_of(id));
  }
  return layers;
}

void TierMeter::begin() {
  kinds_before_ = all_kinds();
  layers_before_ = all_layers();
}

std::map<std::string, TierTraffic> TierMeter::kinds() const {
  std::map<std::string, TierTraffic> kinds = all_kinds();
  for (auto& [kind, traffic] : kinds)
    traffic = traffic - kinds_before_.at(kind);
  return kinds;
}

std::vector<LayerTierTraffic> TierMeter::layers() const {
  std::vector<LayerTierTraffic> layers = all_layers();
  for (std::size_t i = 0; i < layers.size(); ++i)
    layers[i].traffic = layers[i].traffic - layers_before_[i].traffic;
  return layers;
}

}  // namespace moesaic
