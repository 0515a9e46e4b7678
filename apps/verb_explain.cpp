#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/verb.h"
#include "core/config/schema.h"

namespace moesaic::apps {

void add_explain(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand("explain", "Say what a key of the configuration means");
  const auto key = std::make_shared<std::string>();
  verb->add_option(
      "KEY",
      *key,
      "A key (model.num_experts), a section (model), or nothing for the list of sections");
  verb->footer("Example:\n  moesaic explain model.num_experts\n");
  verb->callback([&action, key] {
    action = [key] {
      std::cout << config::explain(*key);
      return 0;
    };
  });
}

}  // namespace moesaic::apps
