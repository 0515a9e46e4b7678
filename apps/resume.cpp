#include "apps/resume.h"

#include <algorithm>
#include <chrono>
#include <set>

#include <fmt/format.h>

#include "apps/checkpoint_path.h"
#include "apps/checkpointing.h"
#include "apps/finished_mark.h"
#include "apps/rank_agreement.h"
#include "apps/run_tokenizer.h"
#include "apps/saved_config.h"
#include "core/base/durable_file.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/manifest.h"
#include "core/config/check.h"
#include "core/config/on_resume.h"
#include "core/model/from_config.h"
#include "core/train/phases.h"
#include "parallel/mesh.h"

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;
using config::OnResume;

std::string text_of(const ConfigChange& c) {
  return fmt::format("{}: {} -> {}", c.key, c.before, c.after);
}

std::string origin_of(const fs::path& checkpoint) {
  const auto texts = read_manifest(checkpoint).values.texts;
  const auto found = texts.find(kOriginValue);
  return found == texts.end() ? "" : found->second;
}

// Steps of the folders that have a manifest, complete or not, largest first.
std::vector<std::int64_t> steps_with_manifest(const fs::path& checkpoints) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (fs::directory_iterator at(checkpoints, error); !error && at != fs::directory_iterator();
       at.increment(error)) {
    const auto step = step_of_folder(at->path().filename().string());
    std::error_code absent;
    if (step >= 0 && fs::exists(fs::symlink_status(at->path() / kManifestName, absent)))
      steps.push_back(step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

// Keeps a checkpoint under a name that no run looks at; "damaged-step-00000100", then "damaged-2-step-…".
void set_aside(const fs::path& folder, const std::string& why) {
  std::error_code error;
  for (int n = 1;; ++n) {
    const std::string number = n == 1 ? "" : fmt::format("{}-", n);
    const fs::path to =
        folder.parent_path() / fmt::format("{}-{}{}", why, number, folder.filename().string());
    if (fs::exists(fs::symlink_status(to, error))) continue;
    rename_or_exchange(folder, to);
    return;
  }
}

// Rank 0's choice, before anything was loaded.
struct Target {
  fs::path folder;  ///< empty: a new run
  std::string origin;
  std::vector<fs::path> newer;    ///< of this run, left behind when it goes back to an earlier step
  std::vector<fs::path> damaged;  ///< passed over
};

class Chooser {
 public:
  explicit Chooser(const ResumeParts& parts)
      : parts_(parts), own_(checkpoints_of(parts.loaded->config)) {}

  // `unfit`: checkpoints that turned out to be damaged when they were read.
  Target choose(const std::set<fs::path>& unfit) const {
    Target target;
    if (parts_.choice.kind == ResumeChoice::Kind::path) {
      choose_path(target, unfit);
    } else if (const auto newest = newest_own(target, unfit)) {
      target.folder = *newest;
      target.origin = origin_of(*newest);
    }
    if (target.folder.empty() && !target.damaged.empty())
      throw InputError(fmt::format(
          "every checkpoint in {} is damaged; move them away to start anew", own_.string()));
    return target;
  }

 private:
  std::optional<fs::path> newest_own(Target& target, const std::set<fs::path>& unfit) const {
    if (!parts_.choice.fallback) {
      const auto latest = latest_checkpoint(own_);
      return latest ? std::optional(latest->path) : std::nullopt;
    }
    for (const std::int64_t step : steps_with_manifest(own_)) {
      const fs::path folder = own_ / folder_name(step);
      try {
        read_manifest(folder);
        if (!unfit.contains(folder)) return folder;
      } catch (const InputError& e) {
        parts_.say(fmt::format("passed over (--fallback): {}", e.what()));
      }
      target.damaged.push_back(folder);
    }
    return std::nullopt;
  }

  // The same command may start the run again after it went on from PATH; it must not go back a second time.
  void choose_path(Target& target, const std::set<fs::path>& unfit) const {
    const fs::path source = fs::canonical(find_checkpoint(parts_.choice.path));
    if (unfit.contains(source))
      throw InputError(
          fmt::format("{} is damaged; --fallback needs another one in the run's own "
                      "folder",
                      source.string()));
    target.folder = source;
    target.origin = source.string();
    const auto newest = newest_own(target, unfit);
    if (!newest) return;
    std::error_code error;
    const bool own = fs::equivalent(source.parent_path(), own_, error);
    if (origin_of(*newest) == target.origin) {
      parts_.say(fmt::format("{} has gone on from {} before and continues where it is",
                             own_.string(),
                             source.string()));
      target.folder = *newest;
    } else if (own) {
      for (const std::int64_t step : steps_with_manifest(own_)) {
        if (step > step_of_folder(source.filename().string()))
          target.newer.push_back(own_ / folder_name(step));
      }
    } else {
      throw UsageError(
          fmt::format("--resume={}, but {} already holds {}, which came from elsewhere; choose "
                      "another run.dir, "
                      "or use --resume=auto to continue that",
                      parts_.choice.path,
                      own_.string(),
                      newest->filename().string()));
    }
  }

  const ResumeParts& parts_;
  fs::path own_;
};

void report(const ResumeParts& parts, const std::vector<ConfigChange>& changes) {
  for (const ConfigChange& c : changes) {
    const config::ResumeRule* rule = config::resume_rule(c.key);
    const bool logged = rule == nullptr || rule->kind == OnResume::logged;
    parts.say(
        fmt::format("changed    {}{}", text_of(c), logged ? " (other numbers from here on)" : ""));
  }
}

void refuse(const ResumeParts& parts,
            const fs::path& checkpoint,
            const std::vector<ConfigChange>& changes) {
  std::string refused;
  for (const ConfigChange& c : changes) {
    const config::ResumeRule* rule = config::resume_rule(c.key);
    if (rule != nullptr && rule->kind == OnResume::refused)
      refused += fmt::format("\n  {} ({})", text_of(c), rule->why);
  }
  if (refused.empty()) return;
  if (parts.trainer != nullptr) {
    const auto tensors =
        checkpoint_differences(checkpoint, parts.trainer->state_of_all_ranks(), true);
    constexpr std::size_t kShown = 20;
    for (std::size_t i = 0; i < std::min(tensors.size(), kShown); ++i)
      refused += "\n  " + tensors[i];
    if (tensors.size() > kShown)
      refused += fmt::format("\n  and {} more tensors", tensors.size() - kShown);
  }
  throw UsageError(fmt::format(
      "{} cannot be continued with these changes; set the keys back, or start anew in another "
      "run.dir:{}",
      checkpoint.string(),
      refused));
}

// "" when every byte was right on all ranks; else what was wrong on this one, or on another.
std::string load_tensors(const ResumeParts& parts,
                         const fs::path& checkpoint,
                         StateValues& values) {
  std::string damage;
  Trainer& trainer = *parts.trainer;
  try {
    // The tensors of all ranks were compared with the manifest; a rank reads the files of its own.
    values = load_checkpoint(checkpoint,
                             trainer.state(),
                             !trainer.is_split(),
                             trainer.stream(),
                             counting(*parts.progress));
  } catch (const InputError& e) {
    if (!parts.choice.fallback) {
      if (parts.choice.kind == ResumeChoice::Kind::path) throw;
      throw InputError(damage_text(checkpoint, e.what()));
    }
    damage = e.what();
  }
  if (!parts.choice.fallback) return damage;
  for (const std::string& other : parts.host->all_gather_host(damage)) {
    if (damage.empty()) damage = other;
  }
  return damage;
}

void require_step(const ResumeParts& parts, const fs::path& checkpoint) {
  const std::int64_t steps = parts.loaded->config.train.steps, done = parts.trainer->steps_done();
  if (done <= steps) return;
  throw UsageError(fmt::format(
      "{} is at step {}, beyond train.steps ({}); raise train.steps, or choose another run.dir",
      checkpoint.string(),
      done,
      steps));
}

// One rank looks, so that all continue from the same step whatever a shared file system shows them.
void share(const ResumeParts& parts, Target& target) {
  std::string folder = target.folder.string();
  parts.host->broadcast_host(folder, 0);
  parts.host->broadcast_host(target.origin, 0);
  target.folder = folder;
}

void start_anew_or_throw(const ResumeParts& parts, const std::string& folder) {
  if (parts.choice.kind == ResumeChoice::Kind::must)
    throw InputError(fmt::format("--resume=must, but {} holds no complete checkpoint", folder));
}

// Keys that are right or wrong by themselves, whatever the data, the model and the machine.
bool builds_nothing(const std::string& key) {
  return key == "run.dir" || key == "run.max_minutes" || key.starts_with("log.") ||
         key.starts_with("checkpoint.");
}

// What is wrong is left to those who refuse it.
bool fits_ranks(const config::Config& config, int ranks) {
  if (!config::untrainable(config).empty()) return false;
  int data_parallel = 0;
  try {
    data_parallel = MeshLayout(mesh_config(config.parallel), ranks).extent(Axis::dp);
  } catch (const UsageError&) {
    return false;
  }
  const auto phases = make_phases(config);
  return std::all_of(phases.begin(), phases.end(), [&](const Phase& phase) {
    return phase.global_batch_size % (phase.micro_batch_size * data_parallel) == 0;
  });
}

void tidy(const ResumeParts& parts, const Target& target) {
  if (parts.host->rank() != 0) return;
  for (const fs::path& folder : target.damaged) {
    set_aside(folder, "damaged");
    parts.say(
        fmt::format("renamed    {} is damaged and keeps its files as damaged-…", folder.string()));
  }
  for (const fs::path& folder : target.newer) {
    set_aside(folder, "left");
    parts.say(fmt::format("renamed    {} is newer and keeps its files as left-…", folder.string()));
  }
}

}  // namespace

ResumeChoice resume_choice(const std::string& text, bool fallback) {
  using Kind = ResumeChoice::Kind;
  ResumeChoice choice;
  choice.fallback = fallback;
  choice.kind = text == "auto"    ? Kind::automatic
                : text == "must"  ? Kind::must
                : text == "never" ? Kind::never
                                  : Kind::path;
  if (choice.kind != Kind::path) return choice;
  choice.path = text;
  std::error_code error;
  const std::string without_step = text.substr(0, text.rfind('@'));
  if (!fs::exists(text, error) && !fs::exists(without_step, error))
    throw UsageError(fmt::format(
        "--resume={}: there is no such folder; allowed are auto, must, never, and PATH[@STEP] of a "
        "run or of one of its checkpoints",
        text));
  return choice;
}

Continued continue_run(const ResumeParts& parts) {
  const auto own = checkpoints_of(parts.loaded->config);
  std::set<fs::path> unfit;
  for (;;) {
    Target target;
    if (parts.host->rank() == 0) target = Chooser(parts).choose(unfit);
    share(parts, target);
    if (target.folder.empty()) {
      start_anew_or_throw(parts, own.string());
      return {};
    }
    if (parts.choice.kind == ResumeChoice::Kind::never) {
      throw UsageError(
          fmt::format("--resume=never, but {} already holds {}; choose another run.dir, remove the "
                      "checkpoints, "
                      "or use --resume=auto",
                      own.string(),
                      target.folder.filename().string()));
    }
    require_seen_by_all(*parts.host, target.folder, "run.dir (or the folder of --resume)");
    Continued result{.yes = true, .origin = target.origin};
    result.changes = changes_since(checkpoint_config(target.folder), *parts.loaded);
    refuse(parts, target.folder, result.changes);
    report(parts, result.changes);
    require_same_tokenizer(target.folder, parts.tokenizer);
    if (const auto differences =
            checkpoint_differences(target.folder, parts.trainer->state_of_all_ranks(), true);
        !differences.empty()) {
      std::string text = misfit_text(target.folder, differences);
      if (!result.changes.empty()) text += "\nThese keys were changed:";
      for (const ConfigChange& c : result.changes)
        text += "\n  " + text_of(c);
      if (std::any_of(result.changes.begin(), result.changes.end(), [](const ConfigChange& c) {
            return c.key.starts_with("train.phases");
          }))
        text +=
            "\nThere is optimizer state for what some phase trains, and for nothing else. Leave "
            "the "
            "phases that were in train.phases, with what they froze, and add yours behind them; "
            "what no phase has trained so far cannot be trained from here on (but in a new run: "
            "checkpoint.load_weights).";
      throw UsageError(text);
    }
    StateValues values;
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t read_before = parts.progress->done();
    if (const std::string damage = load_tensors(parts, target.folder, values); !damage.empty()) {
      parts.say(fmt::format("passed over (--fallback): {}", damage));
      unfit.insert(target.folder);
      continue;
    }
    parts.trainer->load_values(values);
    require_step(parts, target.folder);
    std::error_code error;
    result.is_own = fs::equivalent(target.folder.parent_path(), own, error);
    tidy(parts, target);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    parts.say(fmt::format(
        "continuing from {} (step {}){}",
        target.folder.string(),
        parts.trainer->steps_done(),
        amount_and_rate(static_cast<double>(parts.progress->done() - read_before), took.count())));
    return result;
  }
}

FinishedRun finished_run(const ResumeParts& parts) {
  const config::Config& config = parts.loaded->config;
  std::string folder;
  std::vector<std::string> said;  // for continue_run() to say, if there is something to continue
  if (parts.host->rank() == 0 && parts.choice.kind != ResumeChoice::Kind::never &&
      is_marked_finished(config.run.dir, config.train.steps)) {
    ResumeParts quiet = parts;
    quiet.say = [&said](const std::string& line) { said.push_back(line); };
    const Target target = Chooser(quiet).choose({});
    std::error_code error;
    if (!target.folder.empty() && target.newer.empty() && target.damaged.empty() &&
        fs::equivalent(target.folder.parent_path(), checkpoints_of(config), error) &&
        read_manifest(target.folder).step == config.train.steps)
      folder = target.folder.string();
  }
  parts.host->broadcast_host(folder, 0);
  if (folder.empty()) return {};
  const auto changes = changes_since(checkpoint_config(folder), *parts.loaded);
  refuse(parts, folder, changes);
  if (!fits_ranks(config, parts.host->size()) ||
      !std::all_of(changes.begin(), changes.end(), [](auto& c) { return builds_nothing(c.key); }))
    return {folder, false};
  for (const std::string& line : said)
    parts.say(line);
  report(parts, changes);
  return {folder, true};
}

void load_start_weights(const ResumeParts& parts) {
  Target target;
  if (parts.host->rank() == 0)
    target.folder = find_checkpoint(*parts.loaded->config.checkpoint.load_weights);
  share(parts, target);
  require_seen_by_all(*parts.host, target.folder, "checkpoint.load_weights");
  Trainer& trainer = *parts.trainer;
  const auto weights = trainer.weights();
  if (const auto differences = checkpoint_differences(target.folder, weights, false);
      !differences.empty()) {
    std::string text = "checkpoint.load_weights: " + misfit_text(target.folder, differences);
    for (const ConfigChange& c : changes_since(checkpoint_config(target.folder), *parts.loaded)) {
      if (c.key.starts_with("model.") || c.key == "run.precision")
        text += fmt::format("\n  {}", text_of(c));
    }
    throw UsageError(text);
  }
  load_checkpoint(target.folder, weights, false, trainer.stream(), counting(*parts.progress));
  trainer.weights_were_loaded();
  parts.say(fmt::format("weights    of {} (step {}); step, data and optimizer start anew",
                        target.folder.string(),
                        read_manifest(target.folder).step));
}

}  // namespace moesaic::apps
