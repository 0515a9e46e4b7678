#include <array>
#include <cstdio>
#include <string>

#include <sys/wait.h>

#include "tests/support/catch.h"

namespace {

struct Result {
  int code = -1;
  std::string output;
};

/// Runs the executable through the shell. `streams`: redirections, such as "2>&1".
Result moesaic(const std::string& arguments, const std::string& streams = "2>&1") {
  Result result;
  FILE* pipe = popen((MOESAIC_BINARY " " + arguments + " " + streams).c_str(), "r");
  REQUIRE(pipe);
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    result.output.append(buffer.data(), n);
  }
  const int status = pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("cli: without a command the help is printed and the code is 2") {
  const Result result = moesaic("");
  CHECK(result.code == 2);
  CHECK(contains(result.output, "explain"));
  CHECK(moesaic("", "2>/dev/null").output.empty());
}

TEST_CASE("cli: help, version, and an example for every verb") {
  CHECK(moesaic("--help").code == 0);
  CHECK(contains(moesaic("--version").output, "moesaic 0."));
  for (const std::string verb : {"schema", "explain"}) {
    CAPTURE(verb);
    const Result help = moesaic(verb + " --help");
    CHECK(help.code == 0);
    CHECK(contains(help.output, "Example:\n  moesaic " + verb));
  }
}

TEST_CASE("cli: unknown commands and options") {
  const Result verb = moesaic("explian x");
  CHECK(verb.code == 2);
  CHECK(contains(verb.output, "unknown command 'explian'; did you mean 'explain'?"));
  CHECK(moesaic("schema --jsn").code == 2);
  CHECK(moesaic("--versoin").code == 2);
}

TEST_CASE("cli: schema and explain") {
  const Result schema = moesaic("schema", "2>/dev/null");
  CHECK(schema.code == 0);
  CHECK(contains(schema.output, "\"num_experts_per_token\""));
  const Result key = moesaic("explain model.num_experts", "2>/dev/null");
  CHECK(key.code == 0);
  CHECK(contains(key.output, "Routed experts per MoE layer"));
  const Result unknown = moesaic("explain model.num_expert", "2>&1 >/dev/null");
  CHECK(unknown.code == 2);
  CHECK(unknown.output ==
        "moesaic: model.num_expert: unknown key; did you mean model.num_experts?\n");
}

TEST_CASE("cli: output that cannot be written is an error") {
  const Result full = moesaic("schema", "2>&1 >/dev/full");
  CHECK(full.code == 4);
  CHECK(contains(full.output, "standard output could not be written"));
}
