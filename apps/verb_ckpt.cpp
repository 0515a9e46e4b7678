#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/ckpt/ckpt.h"
#include "apps/verb.h"

namespace moesaic::apps {
namespace {

struct CkptArguments {
  std::string path, other;
  bool json = false;
  InspectOptions inspect;
  PruneOptions prune;
};
using Arguments = std::shared_ptr<CkptArguments>;

constexpr const char* kPathHelp =
    "run.dir of a training run (the newest), PATH@STEP, or a step-… folder";

void add_list(CLI::App& ckpt, Action& action, const Arguments& a) {
  CLI::App* verb =
      ckpt.add_subcommand("ls", "List the checkpoints of a run: step, tokens, size, age");
  verb->add_option("RUN", a->path, "run.dir of a training run")->required();
  verb->add_flag("--json", a->json, "Print JSON");
  verb->footer("Example:\n  moesaic ckpt ls runs/quickstart\n");
  verb->callback([&action, a] { action = [a] { return ckpt_list(a->path, a->json); }; });
}

void add_verify_bytes(CLI::App& ckpt, Action& action, const Arguments& a) {
  CLI::App* verb = ckpt.add_subcommand(
      "verify", "Check every byte against the checksums; damage ends with exit code 3");
  verb->add_option("PATH", a->path, "A run (all its checkpoints), PATH@STEP, or a step-… folder")
      ->required();
  verb->footer("Example:\n  moesaic ckpt verify runs/quickstart\n");
  verb->callback([&action, a] { action = [a] { return ckpt_verify(a->path); }; });
}

void add_inspect(CLI::App& ckpt, Action& action, const Arguments& a) {
  CLI::App* verb =
      ckpt.add_subcommand("inspect", "Show values and tensors: type, shape, bytes, norm");
  verb->add_option("PATH", a->path, kPathHelp)->required();
  verb->add_option(
          "--tensors", a->inspect.pattern, "Only names that match; * stands for any characters")
      ->capture_default_str();
  CLI::Option* json = verb->add_flag("--json", a->inspect.json, "Print JSON");
  verb->add_flag("--config", a->inspect.config, "Print the saved configuration instead")
      ->excludes(json);
  verb->footer("Example:\n  moesaic ckpt inspect runs/quickstart --tensors 'model.layers.1.*'\n");
  verb->callback([&action, a] { action = [a] { return ckpt_inspect(a->path, a->inspect); }; });
}

void add_diff(CLI::App& ckpt, Action& action, const Arguments& a) {
  CLI::App* verb = ckpt.add_subcommand(
      "diff", "Compare two checkpoints tensor by tensor; exit code 1 when tensors differ");
  verb->add_option("A", a->path, kPathHelp)->required();
  verb->add_option("B", a->other, kPathHelp)->required();
  verb->add_flag("--json", a->json, "Print JSON");
  verb->footer("Example:\n  moesaic ckpt diff runs/a@100 runs/b@100\n");
  verb->callback([&action, a] { action = [a] { return ckpt_diff(a->path, a->other, a->json); }; });
}

void add_prune(CLI::App& ckpt, Action& action, const Arguments& a) {
  CLI::App* verb =
      ckpt.add_subcommand("prune", "Delete old checkpoints of a run that is not running");
  verb->add_option("RUN", a->path, "run.dir of a training run")->required();
  verb->add_option("--keep-last", a->prune.keep_last, "Newest checkpoints to keep")
      ->required()
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
  verb->add_option(
          "--keep-every", a->prune.keep_every, "Keep multiples of so many steps too; 0 = no")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  verb->add_flag("--dry-run", a->prune.dry_run, "Only say what would be deleted");
  verb->footer("Example:\n  moesaic ckpt prune runs/quickstart --keep-last 2 --dry-run\n");
  verb->callback([&action, a] { action = [a] { return ckpt_prune(a->path, a->prune); }; });
}

}  // namespace

void add_ckpt(CLI::App& app, Action& action) {
  CLI::App* verb = app.add_subcommand("ckpt", "Look at, check, compare and delete checkpoints");
  verb->require_subcommand(1);
  verb->footer("Example:\n  moesaic ckpt ls runs/quickstart\n");
  const auto arguments = std::make_shared<CkptArguments>();
  add_list(*verb, action, arguments);
  add_verify_bytes(*verb, action, arguments);
  add_inspect(*verb, action, arguments);
  add_diff(*verb, action, arguments);
  add_prune(*verb, action, arguments);
}

}  // namespace moesaic::apps
