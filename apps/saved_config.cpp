#include "apps/saved_config.h"

namespace moesaic::apps {

std::vector<ConfigChange> changes_since(const std::string& saved,
                                        const config::LoadedConfig& loaded) {
  std::string before = saved;
  try {
    before = config::effective_yaml(config::load_config_text(saved, "the saved configuration"));
  } catch (const config::
               ConfigError&) {  // keys or values that this version does not take: as they stand
  }
  return config_changes(before, config::effective_yaml(loaded));
}

}  // namespace moesaic::apps
