#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include "comm/communicator.h"
#include "core/config/load.h"
#include "core/train/trainer.h"

namespace moesaic::apps {

/// When and how a run saves. All ranks call the same functions in the same order; rank 0 writes.
class Checkpointing {
 public:
  struct Parts {
    const config::LoadedConfig* loaded = nullptr;
    Communicator* host = nullptr;
    Trainer* trainer = nullptr;
    std::function<void(const std::string&)> say;  ///< a line of the log, on rank 0
    /// An event of the metrics: type, step, numbers.
    std::function<void(const std::string&, std::int64_t, const std::map<std::string, double>&)>
        event;
  };
  explicit Checkpointing(Parts parts);

  /// The state is on the disk as of the trainer's present step: it was loaded from there.
  void is_saved() { last_saved_ = parts_.trainer->steps_done(); }
  /// Saves the state, unless the last checkpoint is of this step. Throws ResourceError on all ranks.
  void save();
  double last_save_seconds() const noexcept { return seconds_; }
  bool has_saved() const noexcept { return seconds_ > 0; }

 private:
  void write();

  Parts parts_;
  std::int64_t last_saved_ = -1;
  double seconds_ = 0;
};

/// RUN_DIR/checkpoints
std::filesystem::path checkpoints_of(const config::Config& config);
/// Bytes of a checkpoint of this trainer, its manifest apart.
double checkpoint_bytes(const Trainer& trainer);

}  // namespace moesaic::apps
