#include "apps/checkpoint_config.h"

#include <fmt/format.h>

#include "apps/saved_config.h"
#include "core/base/error.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/manifest.h"

namespace moesaic::apps {
namespace {

// f64 is a type of weights of its own; all others are saved alike.
void require_same_types(const std::filesystem::path& checkpoint,
                        const std::vector<ConfigChange>& changes) {
  for (const ConfigChange& c : changes) {
    if (c.key == "run.precision" && (c.before == "f64" || c.after == "f64"))
      throw UsageError(fmt::format(
          "run.precision: {} -> {}: {} holds weights in {}, and they are not converted; "
          "leave the key out",
          c.before,
          c.after,
          checkpoint.string(),
          c.before == "f64" ? "f64" : "f32"));
  }
}

}  // namespace

CheckpointConfig load_checkpoint_config(const std::filesystem::path& checkpoint,
                                        const std::vector<std::string>& overrides) {
  const std::string saved = checkpoint_config(checkpoint);
  CheckpointConfig config;
  config.loaded = config::load_config_text(
      saved, (checkpoint / kManifestName).string() + " (config)", overrides);
  config.changes = changes_since(saved, config.loaded);
  require_same_types(checkpoint, config.changes);
  return config;
}

void load_with_changes(const std::vector<ConfigChange>& changes,
                       const std::function<void()>& load) {
  try {
    load();
  } catch (const CheckpointMisfit& e) {
    std::string keys;
    for (const ConfigChange& c : changes) {
      if (c.key.starts_with("model."))
        keys += fmt::format("\n  {}: {} -> {}", c.key, c.before, c.after);
    }
    if (keys.empty()) throw;
    throw UsageError(fmt::format("{}\nThese keys were changed:{}", e.what(), keys));
  }
}

}  // namespace moesaic::apps
