#pragma once
#include "apps/verb.h"

// The subcommands of `moesaic data`, one file each in this folder. A new one is a file with such a function, a line here
// and a line in verb_data.cpp.
namespace moesaic::apps {

void add_data_info(CLI::App& data, Action& action);
void add_data_validate(CLI::App& data, Action& action);
void add_data_merge(CLI::App& data, Action& action);
void add_data_sample(CLI::App& data, Action& action);
void add_data_tokenize(CLI::App& data, Action& action);

}  // namespace moesaic::apps
