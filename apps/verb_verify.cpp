#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "apps/verb.h"
#include "apps/verify/verify.h"

namespace moesaic::apps {

void add_verify(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand(
      "verify",
      "Compare the product's ops and modules with golden cases (reference results in float64)");
  const auto options = std::make_shared<verify::VerifyOptions>();
  CLI::Option* const cases =
      verb->add_option("--cases", options->cases, "Folder of .safetensors cases, or one case file");
  CLI::Option* const large = verb->add_flag(
      "--large",
      options->large,
      "Make the cases here, at the sizes of the tiled kernels, by the CPU backend in f64");
  cases->excludes(large);
  verb->add_option("--device", options->device, "cpu or cuda")->capture_default_str();
  verb->add_option("--dtype", options->dtype, "f64, f32 or bf16")->capture_default_str();
  verb->add_option(
          "--path",
          options->path,
          "Kernels of the CUDA ops: auto (by sizes and types) or plain (the ones for any size)")
      ->capture_default_str();
  verb->add_option("--threads",
                   options->num_threads,
                   "Threads of the CPU backend; results do not depend on it")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON object in place of the table");
  verb->footer(
      "Prints a row per case: verdict, worst relative error over its results, limit.\n"
      "Exit code 1 when a case fails. With --large on cuda in bf16 a case fails, too, when another "
      "kernel ran than\n"
      "the tiled one that it is there for.\n\n"
      "Examples:\n  moesaic verify --cases tests/golden --dtype f32\n"
      "  moesaic verify --large --device cuda --dtype bf16\n");
  verb->callback([&action, options] {
    if (!options->large && options->cases.empty()) throw CLI::RequiredError("--cases or --large");
    action = [options] { return verify::run_verify(*options, std::cout); };
  });
}

}  // namespace moesaic::apps
