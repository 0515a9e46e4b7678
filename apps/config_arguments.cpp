#include <CLI/CLI.hpp>

#include "apps/verb.h"

namespace moesaic::apps {

void add_config_arguments(CLI::App& verb, ConfigArguments& arguments) {
  verb.add_option("CONFIG", arguments.path, "Configuration file (YAML)")->required();
  verb.add_option("OVERRIDES",
                  arguments.overrides,
                  "Settings that replace those of the file: section.key=value")
      ->expected(0, -1);
}

}  // namespace moesaic::apps
