#pragma once
#include <string>

#include "core/config/load.h"
#include "core/model/plan.h"

namespace moesaic::apps {

/// The tables of `moesaic plan`.
std::string plan_text(const config::LoadedConfig& loaded, const ModelPlan& plan);

/// The same as JSON, every count a plain integer, keys in a fixed order.
std::string plan_json(const config::LoadedConfig& loaded, const ModelPlan& plan);

}  // namespace moesaic::apps
