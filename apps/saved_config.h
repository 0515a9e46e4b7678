#pragma once
#include <string>
#include <vector>

#include "apps/config_changes.h"
#include "core/config/load.h"

namespace moesaic::apps {

/// What differs from the configuration that a checkpoint was saved with (its effective text). A key that the program did not
/// know then has its default, then and now.
std::vector<ConfigChange> changes_since(const std::string& saved,
                                        const config::LoadedConfig& loaded);

}  // namespace moesaic::apps
