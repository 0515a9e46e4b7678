#pragma once
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "apps/config_changes.h"
#include "comm/communicator.h"
#include "core/config/load.h"
#include "core/train/trainer.h"

namespace moesaic::apps {

/// What --resume and --fallback say.
struct ResumeChoice {
  enum class Kind { automatic, must, never, path };
  Kind kind = Kind::automatic;
  std::string path;       ///< PATH[@STEP], for Kind::path
  bool fallback = false;  ///< a damaged checkpoint is passed over
};
/// "auto", "must", "never" or a path. Throws UsageError for a path that is not there.
ResumeChoice resume_choice(const std::string& text, bool fallback);

/// What continuing a run takes.
struct ResumeParts {
  const config::LoadedConfig* loaded = nullptr;
  ResumeChoice choice;
  std::string tokenizer;  ///< content hash of the data's tokenizer, or kUnknownTokenizer
  Communicator* host = nullptr;
  Trainer* trainer = nullptr;                   ///< null for finished_run()
  std::function<void(const std::string&)> say;  ///< a line of the log, on rank 0
  Progress* progress = nullptr;  ///< of the bytes that are read; null for finished_run()
};

struct Continued {
  bool yes = false;                   ///< there was a checkpoint to continue from
  bool is_own = false;                ///< it lies in this run's folder
  std::vector<ConfigChange> changes;  ///< of the configuration, all allowed
  std::string origin;  ///< the checkpoint that --resume=PATH named, in this life or an earlier one
};

/// Fills the trainer from the checkpoint that the run continues from. All ranks call it. Throws UsageError when the
/// configuration cannot continue it, InputError when it is damaged or there must be one. Nothing is written before all
/// is well; then, on rank 0, checkpoints that the run leaves behind get other names.
Continued continue_run(const ResumeParts& parts);

struct FinishedRun {
  std::filesystem::path checkpoint;  ///< of train.steps; empty: there is something to do
  /// Nothing could refuse this start. Else the caller does what a run that goes on does, up to continue_run().
  bool is_checked = false;
};
/// Whether the run that would be continued came to its end in an earlier life. Needs no trainer and no data, so that a job
/// array's last elements cost nothing. All ranks call it; rank 0 holds the folder's lock if the mark is there
/// (finished_mark.h). Throws UsageError as continue_run() does for changed keys; announces them if is_checked.
FinishedRun finished_run(const ResumeParts& parts);

/// checkpoint.load_weights: the weights of another run's checkpoint, and nothing else. All ranks call it. Throws
/// UsageError listing the tensors and keys when that was another model.
void load_start_weights(const ResumeParts& parts);

/// In the values of a checkpoint: Continued::origin.
inline constexpr const char* kOriginValue = "continued_from";

}  // namespace moesaic::apps
