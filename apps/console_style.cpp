#include "apps/console_style.h"

#include <cstdlib>
#include <cstring>

#include <CLI/CLI.hpp>
#include <sys/ioctl.h>
#include <unistd.h>

namespace moesaic::apps {
namespace {

constexpr int kLeastColumns = 61;

bool is_set(const Terminal& terminal, const char* name) {
  const char* value = terminal.environment(name);
  return value != nullptr && *value != '\0';
}

bool has_launcher(const Terminal& terminal) {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    if (is_set(terminal, name)) return true;
  }
  return false;
}

}  // namespace

void add_progress_argument(CLI::App& verb,
                           ConsoleArguments& arguments,
                           const std::string& description) {
  verb.add_option("--progress", arguments.progress, description)
      ->check(CLI::IsMember({"auto", "bar", "line", "none"}))
      ->capture_default_str();
}

void add_console_arguments(CLI::App& verb, ConsoleArguments& arguments) {
  add_progress_argument(verb,
                        arguments,
                        "line: a line per log.interval steps; bar: the same and a bar on stderr, "
                        "for one process on a "
                        "terminal; none: no lines of steps; auto: bar where it works");
  verb.add_option("--color",
                  arguments.color,
                  "auto: on a terminal without a launcher, unless NO_COLOR is set; always; never")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
}

Terminal this_terminal() {
  Terminal terminal{
      [](const char* name) { return std::getenv(name); }, isatty(1) != 0, isatty(2) != 0, 0};
  winsize size{};
  if (terminal.stderr_is_terminal && ioctl(2, TIOCGWINSZ, &size) == 0)
    terminal.columns = size.ws_col;
  return terminal;
}

ConsoleStyle console_style(const ConsoleArguments& arguments, const Terminal& terminal) {
  const char* kind = terminal.environment("TERM");
  const bool dumb = kind == nullptr || *kind == '\0' || std::strcmp(kind, "dumb") == 0;
  const bool screen = !has_launcher(terminal) && !dumb;
  ConsoleStyle style;
  style.step_lines = arguments.progress != "none";
  style.bar = (arguments.progress == "auto" || arguments.progress == "bar") && screen &&
              terminal.stderr_is_terminal && terminal.columns >= kLeastColumns;
  style.color =
      arguments.color == "always" || (arguments.color == "auto" && screen &&
                                      terminal.stdout_is_terminal && !is_set(terminal, "NO_COLOR"));
  style.columns = terminal.columns;
  return style;
}

}  // namespace moesaic::apps
