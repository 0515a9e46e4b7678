#pragma once
#include <functional>
#include <string>

#include "core/train/sinks/console.h"

namespace CLI {
class App;
}

namespace moesaic::apps {

/// --progress and --color of a verb that trains.
struct ConsoleArguments {
  std::string progress = "auto";  ///< auto, bar, line, none
  std::string color = "auto";     ///< auto, always, never
};
void add_console_arguments(CLI::App& verb, ConsoleArguments& arguments);
/// --progress alone, with what its words mean to this verb.
void add_progress_argument(CLI::App& verb,
                           ConsoleArguments& arguments,
                           const std::string& description);

/// What the choice depends on; `environment` as std::getenv.
struct Terminal {
  std::function<const char*(const char*)> environment;
  bool stdout_is_terminal = false, stderr_is_terminal = false;
  int columns = 0;  ///< of stderr's terminal
};
/// To be asked before MPI starts: it sets the variables of a launcher even for a process that has none.
Terminal this_terminal();

struct ConsoleStyle {
  bool bar = false, step_lines = true, color = false;
  int columns = 80;
};
/// mpirun gives every rank a pseudo-terminal as stdout, so stdout says nothing about who reads; under a launcher there is
/// no bar, and no colour unless it is asked for. Colour needs stdout to be a terminal, a bar stderr, of more than 60
/// columns.
ConsoleStyle console_style(const ConsoleArguments& arguments, const Terminal& terminal);

}  // namespace moesaic::apps
