#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/config_changes.h"
#include "apps/shared_save.h"
#include "comm/communicator.h"
#include "core/checkpoint/background_save.h"
#include "core/config/load.h"
#include "core/train/run_sink.h"
#include "core/train/trainer.h"

namespace moesaic::apps {

/// When and how a run saves. All ranks call save(), look() and finish() in the same order. Rank 0 writes, or all ranks
/// together when each of them holds something that others do not.
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
    RunSink* sinks = nullptr;  ///< shown how far a save has come
  };
  explicit Checkpointing(Parts parts);

  /// The state is on the disk as of the trainer's present step: it was loaded from there.
  void is_saved() noexcept { last_saved_ = parts_.trainer->steps_done(); }
  /// The last acts of a save that an earlier life did not come to: half folders are removed, and if the state is on the
  /// disk, checkpoints that are not to be kept. A rule that has changed (`changes`: of the configuration) acts with the next
  /// save only; what it will delete is said. On rank 0, before the first step. Throws ResourceError.
  void finish_interrupted(const std::vector<ConfigChange>& changes) const;
  /// Goes into the values of all checkpoints from here on (resume.h).
  void set_origin(std::string origin) { origin_ = std::move(origin); }
  /// The same for the content hash of the data's tokenizer (run_tokenizer.h).
  void set_tokenizer(std::string hash) { tokenizer_ = std::move(hash); }
  /// Saves the state, unless the last checkpoint is of this step; in the background where checkpoint.async says so,
  /// after waiting for the one before. A save that fails throws ResourceError, or is only reported, as
  /// checkpoint.on_error says: one in the background when it is found out, on rank 0 alone.
  void save();
  /// Before every step: reports a save in the background that has ended since.
  void look();
  /// Saves the state and returns when everything is on the disk. Throws ResourceError on all ranks.
  void finish();
  /// Before the process ends with an error: waits for a save in the background and reports it.
  void drain() noexcept;
  /// At the end of a run that saves nothing then: waits for a save in the background. Throws ResourceError, on rank 0 at
  /// least, if the last save failed, whatever checkpoint.on_error says.
  void settle();
  /// Time that the last save took, 0 before the first.
  double last_save_seconds() const noexcept { return seconds_; }

 private:
  bool is_root() const { return parts_.host->rank() == 0; }
  void announce_rule() const;
  bool is_new();
  bool is_shared() const { return parts_.trainer->is_split(); }
  void save_together(bool must);
  void take_result(const SharedSave::Result& result, bool must);
  void start_background();
  bool has_memory_for_copy();
  void write(bool must);
  void write_on_root(bool must);
  struct Failure {
    std::int64_t step;
    std::string what;
  };
  std::optional<Failure> take_result();
  std::string text_of(const Failure& failure) const;
  void forget(const Failure& failure);
  void make_up_for(const Failure& failure);
  void failed(const Failure& failure, bool must);
  void report(std::int64_t step, double stall, double seconds, double bytes);
  SaveRequest request();

  Parts parts_;
  std::unique_ptr<ShownProgress>
      shown_;  // of the save that is being written; it outlives the writer
  BackgroundSave background_;
  SharedSave shared_;
  std::string origin_, tokenizer_;
  std::int64_t last_saved_ = -1;
  std::optional<Failure> lost_;  // the last save, if it failed
  double stall_ = 0;             // of the save in the background
  double seconds_ = 0;
  bool said_no_memory_ = false;
};

/// RUN_DIR/checkpoints
std::filesystem::path checkpoints_of(const config::Config& config);
/// Counts into `progress`, which must live as long.
ByteProgress counting(Progress& progress);
/// " | 3.20 GiB, 1.10 GiB/s" for what took a second or more; else nothing.
std::string amount_and_rate(double bytes, double seconds);
/// Bytes of a checkpoint of this trainer, its manifest apart.
double checkpoint_bytes(const Trainer& trainer);

}  // namespace moesaic::apps
