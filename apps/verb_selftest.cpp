#include <iostream>
#include <memory>

#include <CLI/CLI.hpp>

#include "apps/selftest/selftest.h"
#include "apps/verb.h"

namespace moesaic::apps {
namespace {

void add_layouts(CLI::App& selftest, Action& action) {
  CLI::App* verb = selftest.add_subcommand(
      "layouts", "Train the same steps on one rank and in other layouts, and compare");
  const auto options = std::make_shared<selftest::LayoutsOptions>();
  const auto arguments = std::make_shared<ConfigArguments>();
  add_config_arguments(*verb, *arguments);
  verb->add_option(
          "--ranks",
          options->ranks,
          "Threads of this process as ranks, instead of the ranks of mpirun; without both, 4")
      ->check(CLI::Range(1, 64));
  verb->add_option("--layouts",
                   options->layouts,
                   "Layouts to try, as \"dp=2,ep=2;dp=4\"; all that fit the ranks when not given");
  verb->add_option("--sample", options->sample, "Try so many of them, drawn at random")
      ->check(CLI::Range(1, 1000000));
  verb->add_option("--seed", options->seed, "Of that draw")->capture_default_str();
  verb->add_option("--steps", options->steps, "Steps to train")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  verb->add_flag("--json", options->json, "A JSON array in place of the table");
  verb->footer(
      "Computes in f64 unless run.precision is among the arguments, and on the CPU unless "
      "run.device=cuda is, which takes\na rank of mpirun per GPU (comm.share_gpu=true: several). "
      "A row per layout: the largest relative\ndifferences of the first step's losses, gradient "
      "norm and gradients, "
      "of later losses and norms, and of the last weights.\nIn f32 and bf16 every layout takes the "
      "choices of the run on one rank (experts of tokens, keys of sparse attention),\nand `differ` "
      "says how many of its own would have been others. Exit code 1 when a difference is above its "
      "bound,\nwhich is printed and follows from the type and the depth; 124 when threads, or "
      "GPUs, "
      "get on no more (comm.watchdog_s,\ncomm.first_step_s).\n\n"
      "Examples:\n  moesaic selftest layouts configs/quickstart.yaml --ranks 4\n"
      "  moesaic selftest layouts my.yaml run.precision=bf16 --ranks 8 --sample 20\n"
      "  mpirun -np 8 moesaic selftest layouts my.yaml --layouts \"dp=8,ep=4\"\n"
      "  mpirun -np 2 moesaic selftest layouts my.yaml run.device=cuda run.precision=bf16\n"
      "  mpirun -np 4 moesaic selftest layouts my.yaml run.device=cuda comm.share_gpu=true "
      "comm.ranks_per_node=2   # two GPUs as two nodes\n");
  verb->callback([&action, options, arguments] {
    options->config = arguments->path;
    options->overrides = arguments->overrides;
    action = [options] { return selftest::run_layouts(*options, std::cout); };
  });
}

}  // namespace

void add_selftest(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand("selftest", "Checks of the program against itself");
  verb->require_subcommand(1);
  verb->footer("Example:\n  moesaic selftest layouts configs/quickstart.yaml\n");
  add_layouts(*verb, action);
}

}  // namespace moesaic::apps
