#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "apps/console_style.h"

namespace moesaic::apps::eval {

struct EvalArguments {
  std::string run;
  std::vector<std::string> overrides;
  std::vector<std::string> data, choices;  ///< NAME=PATH or PATH
  std::string details, tokenizer;
  std::int64_t step = 0;    ///< 0: the newest
  std::int64_t tokens = 0;  ///< of each data set; 0: all
  bool average = false, json = false;
  ConsoleArguments console;
};

/// The verb `eval`: on one rank, or on all ranks of an MPI job. Returns the exit code.
int run_eval(const EvalArguments& arguments);

}  // namespace moesaic::apps::eval
