#pragma once
#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace moesaic::apps {

/// What the chosen verb does; returns the exit code of the process. Errors are thrown
/// (core/base/error.h).
using Action = std::function<int()>;

/// A verb: adds its subcommand, with one example in its help, to the command line. When the
/// subcommand was given and its arguments were read, its callback puts the work into `action`. A
/// new verb is a file verb_NAME.cpp with such a function, a line here and a line in main.cpp's
/// table.
using AddVerb = void (*)(CLI::App& app, Action& action);

void add_explain(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_generate(CLI::App& app, Action& action);
void add_eval(CLI::App& app, Action& action);
void add_schema(CLI::App& app, Action& action);
void add_verify(CLI::App& app, Action& action);
void add_train(CLI::App& app, Action& action);
void add_resume(CLI::App& app, Action& action);
void add_ckpt(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_doctor(CLI::App& app, Action& action);
void add_data(CLI::App& app, Action& action);
void add_report(CLI::App& app, Action& action);
void add_selftest(CLI::App& app, Action& action);

/// The arguments of every verb that reads a configuration: CONFIG and any number of a.b=c, for
/// config::load_config.
struct ConfigArguments {
  std::string path;
  std::vector<std::string> overrides;
};

/// Declares CONFIG and the overrides on a verb's subcommand; `arguments` must live until the action
/// has run.
void add_config_arguments(CLI::App& verb, ConfigArguments& arguments);

}  // namespace moesaic::apps
