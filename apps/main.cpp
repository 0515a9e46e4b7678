#include <algorithm>
#include <exception>
#include <iostream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "apps/failure.h"
#include "apps/launch.h"
#include "apps/verb.h"
#include "apps/version.h"
#include "core/base/error.h"
#include "core/config/nearest.h"

namespace {

using moesaic::ExitCode;

constexpr moesaic::apps::AddVerb kVerbs[] = {
    moesaic::apps::add_train,
    moesaic::apps::add_resume,
    moesaic::apps::add_ckpt,
    moesaic::apps::add_plan,
    moesaic::apps::add_generate,
    moesaic::apps::add_eval,
    moesaic::apps::add_schema,
    moesaic::apps::add_explain,
    moesaic::apps::add_verify,
    moesaic::apps::add_bench,
    moesaic::apps::add_doctor,
    moesaic::apps::add_data,
    moesaic::apps::add_report,
    moesaic::apps::add_selftest,
};

/// Those that may be started as several ranks.
constexpr std::string_view kVerbsOfRanks[] = {
    "train", "resume", "eval", "doctor", "selftest layouts", "bench a2a"};

/// "bench a2a": what was given on the command line.
std::string chosen_verb(const CLI::App& app) {
  std::string name;
  for (const CLI::App* at = &app; !at->get_subcommands().empty();) {
    at = at->get_subcommands().front();
    name += (name.empty() ? "" : " ") + at->get_name();
  }
  return name;
}

int code(ExitCode exit_code) {
  return static_cast<int>(exit_code);
}

/// "Unknown command" with the nearest verb, if the first argument is a word that is none.
std::string unknown_verb(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return "";
  std::vector<std::string> names;
  for (const CLI::App* verb : app.get_subcommands(nullptr)) {
    if (verb->get_name() == argv[1]) return "";
    names.push_back(verb->get_name());
  }
  std::string text = std::string("unknown command '") + argv[1] + "'";
  const std::string near = moesaic::config::nearest(argv[1], names);
  if (!near.empty()) return text + "; did you mean '" + near + "'?";
  text += "; commands:";
  for (const std::string& name : names)
    text += " " + name;
  return text;
}

/// What an unset variable of a shell leaves behind has no meaning for any option: a file without a name would be looked for.
std::string empty_argument(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '\0')
      return std::string("an empty argument after '") + (i > 1 ? argv[i - 1] : "moesaic") +
             "'; is it a shell variable that is not set?";
  }
  return "";
}

int fail(ExitCode exit_code, const std::string& what) {
  std::cerr << "moesaic: " << what << std::endl;
  return code(exit_code);
}

/// Reads the command line and runs the verb; every error that a verb throws leaves through here.
int run(int argc, char** argv) {
  CLI::App app("moesaic trains hybrid-attention sparse mixture-of-experts language models",
               "moesaic");
  app.set_version_flag("--version", moesaic::apps::version_text());
  app.require_subcommand(
      0, 1);  // what follows a verb is its argument: `explain train` names a section
  app.footer("'moesaic COMMAND --help' shows the arguments and an example of a command.\n");
  moesaic::apps::Action action;
  for (const moesaic::apps::AddVerb add : kVerbs)
    add(app, action);
  if (const std::string empty = empty_argument(argc, argv); !empty.empty())
    return fail(ExitCode::usage, empty);
  if (const std::string unknown = unknown_verb(app, argc, argv); !unknown.empty())
    return fail(ExitCode::usage, unknown);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return fail(ExitCode::usage, std::string(error.what()) + "\n'--help' shows what is accepted");
  }
  if (!action) {
    std::cerr << app.help();
    return code(ExitCode::usage);
  }
  const std::string verb = chosen_verb(app);
  const bool takes_ranks = std::find(std::begin(kVerbsOfRanks), std::end(kVerbsOfRanks), verb) !=
                           std::end(kVerbsOfRanks);
  if (!takes_ranks && !moesaic::apps::is_the_one_process(verb)) return 0;
  const int result = action();
  if (!std::cout.flush())
    throw moesaic::ResourceError(
        "standard output could not be written (disk full, or closed by the reader)");
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (...) {
    const moesaic::apps::Failure failure =
        moesaic::apps::describe_failure(std::current_exception());
    std::cerr << failure.text() << std::endl;
    return failure.code;
  }
}
