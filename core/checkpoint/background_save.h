#pragma once
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "memory/buffer.h"

namespace moesaic {

/// A copy of a training state in host memory (pinned when the state lies on a GPU).
class StateSnapshot {
 public:
  /// Copies those that lie in views, in the order of the stream, after which the originals may change, and waits for that.
  /// The memory is taken at the first call and kept. Throws ResourceError when there is not enough.
  void take(std::span<const StateTensor> tensors, Stream& stream);
  /// What take() needs for them.
  static std::size_t bytes_for(std::span<const StateTensor> tensors);
  /// The same names, types and bytes as what was copied.
  std::span<const StateTensor> tensors() const { return tensors_; }
  std::size_t bytes() const { return memory_.bytes(); }

 private:
  Buffer memory_;
  std::vector<StateTensor> tensors_;
};

/// What save_checkpoint() takes besides the tensors.
struct SaveRequest {
  std::filesystem::path checkpoints;
  std::int64_t step = 0;
  StateValues values;
  std::string config_yaml;
  std::int64_t keep_last = 0, keep_every = 0;
  std::uint64_t max_file_bytes = kCheckpointFileBytes;
  ByteProgress progress = {};  ///< called on the thread that writes
};

/// Writes checkpoints on a thread of its own while training goes on: the files are those of save_checkpoint(). One at a
/// time, so that host memory holds one copy of the state at most. Tensors with StateAccess, which fill host memory or a file
/// already, are not copied: they are written at once, into files of their own ("…-offloaded…"), and the checkpoint is complete when both are.
class BackgroundSave {
 public:
  struct Result {
    std::int64_t step = 0;
    double seconds = 0;        ///< of writing
    std::exception_ptr error;  ///< null: the checkpoint, or the part, is complete
    std::string part;          ///< of write_part(), for commit_checkpoint()
  };
  BackgroundSave() = default;
  ~BackgroundSave();  ///< waits
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Copies the state, writes what cannot be copied (all that the caller waits for) and starts to write the rest. The result
  /// of the one before must have been taken. Throws ResourceError when there is no memory for the copy.
  void start(SaveRequest request, std::span<const StateTensor> tensors, Stream& stream);
  /// The same for a part of a checkpoint with several writers (write_checkpoint_part()).
  void start_part(const std::filesystem::path& folder,
                  const std::string& writer,
                  const SaveRequest& request,
                  std::span<const StateTensor> tensors,
                  Stream& stream);
  bool holds_memory() const { return snapshot_.bytes() > 0; }  ///< for the copy, since the first
  bool is_pending() const { return pending_.valid(); }  ///< started, and its result was not taken
  bool is_done() const;                                 ///< its result can be had without waiting
  Result take_result();                                 ///< waits for it

 private:
  using Write = std::function<std::string(std::span<const StateTensor>, Stream&)>;
  void take_snapshot(std::span<const StateTensor> tensors, Stream& stream);
  void start_thread(std::int64_t step, double seconds_before, Write write);
  void fail(std::int64_t step, std::exception_ptr error);

  StateSnapshot snapshot_;
  std::future<Result> pending_;
};

}  // namespace moesaic
