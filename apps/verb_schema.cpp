#include <iostream>

#include <CLI/CLI.hpp>

#include "apps/verb.h"
#include "core/config/schema.h"

namespace moesaic::apps {

void add_schema(CLI::App& app, Action& action) {
  CLI::App* verb =
      app.add_subcommand("schema", "Print the JSON Schema of the configuration file, for editors");
  verb->footer(
      "Example:\n"
      "  moesaic schema > moesaic.schema.json\n"
      "and, as the first line of a configuration file, for editors with a YAML language server:\n"
      "  # yaml-language-server: $schema=moesaic.schema.json\n");
  verb->callback([&action] {
    action = [] {
      std::cout << config::json_schema();
      return 0;
    };
  });
}

}  // namespace moesaic::apps
