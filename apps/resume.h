#pragma once
#include <filesystem>
#include <functional>
#include <string>

#include "comm/communicator.h"
#include "core/config/load.h"
#include "core/train/trainer.h"

namespace moesaic::apps {

enum class Resume { automatic, must, never };

/// What continuing a run takes.
struct ResumeParts {
  const config::LoadedConfig* loaded = nullptr;
  Resume resume = Resume::automatic;
  Communicator* host = nullptr;
  Trainer* trainer = nullptr;
  std::function<void(const std::string&)> say;  ///< a line of the log, on rank 0
};

/// Fills the trainer from the checkpoint that the run continues from; returns whether there was one. All ranks call it.
/// Throws UsageError when the configuration cannot continue it, InputError when it is damaged or there must be one.
bool continue_run(const ResumeParts& parts);

}  // namespace moesaic::apps
