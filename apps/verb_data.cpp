#include <CLI/CLI.hpp>

#include "apps/data/commands.h"
#include "apps/verb.h"

namespace moesaic::apps {
namespace {

constexpr AddVerb kCommands[] = {
    add_data_info,
    add_data_validate,
    add_data_merge,
    add_data_sample,
    add_data_tokenize,
};

}  // namespace

void add_data(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand(
      "data", "Look at, check and prepare training data; needs no MPI and no GPU");
  verb->require_subcommand(1);
  verb->footer("Example:\n  moesaic data info data/train.txt\n");
  for (const AddVerb add : kCommands)
    add(*verb, action);
}

}  // namespace moesaic::apps
