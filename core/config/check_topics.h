#pragma once
#include <vector>

#include "core/config/check.h"

// The rules between keys, by topic; parts of findings(). Each adds those that are broken.
namespace moesaic::config {

void add_model_findings(const Config& config, std::vector<Finding>& findings);
/// Of `data`, `train` and `optimizer`.
void add_training_findings(const Config& config, std::vector<Finding>& findings);
/// Of `parallel`, `dispatch` and `activations`.
void add_layout_findings(const Config& config, std::vector<Finding>& findings);
/// Of `experts`, `memory` and others.
void add_offload_findings(const Config& config, std::vector<Finding>& findings);

}  // namespace moesaic::config
