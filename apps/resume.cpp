#include "apps/resume.h"

#include <fmt/format.h>

#include "apps/checkpointing.h"
#include "apps/config_changes.h"
#include "core/checkpoint/checkpoint.h"

namespace moesaic::apps {
namespace {

// Another model cannot continue these weights; every other change is shown, old and new.
void report_changes(const ResumeParts& parts, const std::string& checkpoint) {
  std::string refused;
  for (const ConfigChange& c :
       config_changes(checkpoint_config(checkpoint), config::effective_yaml(*parts.loaded))) {
    const std::string line = fmt::format("{}: {} -> {}", c.key, c.before, c.after);
    if (c.key.rfind("model.", 0) == 0) {
      refused += "\n  " + line;
    } else {
      parts.say("changed    " + line);
    }
  }
  if (!refused.empty()) {
    throw UsageError(fmt::format(
        "{} was trained as another model; set these keys back, or start anew in another run.dir:{}",
        checkpoint,
        refused));
  }
}

}  // namespace

bool continue_run(const ResumeParts& parts) {
  const auto folder = checkpoints_of(parts.loaded->config);
  Trainer& trainer = *parts.trainer;
  // One rank looks, so that all continue from the same step whatever a shared file system shows them.
  std::string found;
  if (parts.host->rank() == 0) {
    if (const auto latest = latest_checkpoint(folder)) found = latest->path.string();
  }
  parts.host->broadcast_host(found, 0);
  if (found.empty()) {
    if (parts.resume == Resume::must)
      throw InputError(
          fmt::format("--resume=must, but {} holds no complete checkpoint", folder.string()));
    return false;
  }
  if (parts.resume == Resume::never) {
    throw UsageError(
        fmt::format("--resume=never, but {} already holds {}; choose another run.dir, remove the "
                    "checkpoints, or use --resume=auto",
                    folder.string(),
                    std::filesystem::path(found).filename().string()));
  }
  report_changes(parts, found);
  trainer.load_values(load_checkpoint(found, trainer.state(), true, trainer.stream()));
  const std::int64_t steps = parts.loaded->config.train.steps;
  if (trainer.steps_done() > steps) {
    throw UsageError(fmt::format(
        "{} is at step {}, beyond train.steps ({}); raise train.steps, or choose another run.dir",
        found,
        trainer.steps_done(),
        steps));
  }
  parts.say(fmt::format("continuing from {} (step {})", found, trainer.steps_done()));
  return true;
}

}  // namespace moesaic::apps
