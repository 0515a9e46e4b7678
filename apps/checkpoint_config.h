#pragma once
// The configuration of a checkpoint, for verbs that use its model.
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "apps/config_changes.h"
#include "core/config/load.h"

namespace moesaic::apps {

struct CheckpointConfig {
  config::LoadedConfig loaded;
  std::vector<ConfigChange> changes;  ///< since the checkpoint was saved
};

/// As it was saved, with `overrides` ("section.key=value") in place of keys of it. Throws UsageError as config::load_config_text()
/// does, and when the weights would need another type.
CheckpointConfig load_checkpoint_config(const std::filesystem::path& checkpoint,
                                        const std::vector<std::string>& overrides);

/// Calls `load`; a checkpoint that does not fit (CheckpointMisfit) because keys of the model were changed is a UsageError that
/// names them.
void load_with_changes(const std::vector<ConfigChange>& changes, const std::function<void()>& load);

}  // namespace moesaic::apps
