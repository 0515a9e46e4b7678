#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/tensor.h"
#include "core/checkpoint/byte_progress.h"
#include "memory/stream.h"

namespace moesaic {

/// Values of a tensor that no view can show, because they are not all in memory or not as files hold them: they are brought
/// when they are asked for. One thread at a time, the one that trains.
struct StateAccess {
  DType dtype = DType::f32;  ///< of what files hold
  Shape shape;
  using Sink = std::function<void(const std::byte*, std::size_t)>;
  /// Calls `sink` with the bytes that files hold, from the first to the last, in pieces of any size. Values are those after all
  /// work of the stream; waits for it.
  std::function<void(const Sink& sink, Stream& stream)> read;
  /// The values become those of `from`, bytes as files hold them, not aligned. `from` may go when it returns.
  std::function<void(const std::byte* from, Stream& stream)> write;
};

/// A tensor of the training state under its layout-free name: "model.layers.3.…weight" (weights),
/// "optimizer/m/…", "ema/…", "buffer/…" ("buffer/optional/…": may be missing, or unknown). Experts appear one by one under their global name.
struct StateTensor {
  std::string name;
  TensorView view;  ///< on the run's device
  /// u16, like `view`, which then is bf16: the two are an f32 tensor (core/base/split_float.h), and files hold that.
  TensorView remainder = {};

  /// Where `view` lies in the whole tensor of this name, when another rank holds other parts of it. Files hold each piece
  /// once, whoever holds it; loading takes what it wants from whatever pieces there are.
  struct Place {
    Shape whole, begin;
  };
  std::optional<Place> place = {};
  /// In place of `view` and `remainder`, which then are empty.
  std::shared_ptr<const StateAccess> access = {};

  const Shape& shape() const { return access ? access->shape : view.shape(); }
  const Shape& whole() const { return place ? place->whole : shape(); }
  /// What files hold.
  DType dtype() const {
    if (access) return access->dtype;
    return remainder.empty() ? view.dtype() : DType::f32;
  }
  std::size_t bytes() const {
    return static_cast<std::size_t>(shape().numel()) * byte_size(dtype());
  }
};

/// The bytes that files hold of a tensor. Waits for the stream.
std::vector<std::byte> bytes_of_state(const StateTensor& tensor, Stream& stream);
/// The tensor's values become these bytes, as bytes_of_state() gives them. Waits.
void fill_state(const StateTensor& tensor, const std::byte* bytes, Stream& stream);

/// Everything a run continues from: tensors, and named values (step, data position, counters;
/// integers and text, written to the manifest as JSON).
struct StateValues {
  std::map<std::string, std::int64_t> integers;
  std::map<std::string, double> reals;
  std::map<std::string, std::string> texts;
};

/// RUN_DIR/checkpoints/step-00000100/: safetensors files that any tool opens, and manifest.json,
/// written last. A folder without a valid manifest is not a checkpoint.
struct CheckpointInfo {
  std::int64_t step = 0;
  std::filesystem::path path;
};

constexpr std::uint64_t kCheckpointFileBytes = 5'000'000'000;

/// Writes to a temporary folder beside the final one, fsyncs every file and the folder, renames,
/// fsyncs the parent, then removes what the retention rule no longer keeps: all but the `keep_last`
/// newest (0: all stay), the multiples of `keep_every` (0: no such rule) and this one. First
/// removes what an interrupted save left behind. A checkpoint of the same step is replaced in one
/// instant. A kind of tensors above `max_file_bytes` is spread over several files. Views may lie on
/// the host or on the stream's device; earlier work of the stream is waited for. One rank calls it. `progress` counts the
/// bytes of tensors.
/// Throws ResourceError (path, cause); the previous checkpoint then still stands.
void save_checkpoint(const std::filesystem::path& checkpoints,
                     std::int64_t step,
                     std::span<const StateTensor> tensors,
                     const StateValues& values,
                     const std::string& config_yaml,
                     std::int64_t keep_last,
                     std::int64_t keep_every,
                     Stream& stream,
                     std::uint64_t max_file_bytes = kCheckpointFileBytes,
                     const ByteProgress& progress = {});

/// The same in steps, for several writers of one checkpoint. begin: as save_checkpoint() does before it writes; `bytes` of
/// all parts together; returns the temporary folder. Any number of processes write a part each, at the same time, into
/// files that carry the name of the `writer`; what a part returns is for commit. A tensor, or a piece of one, lies in one
/// part. commit: once all parts are there, writes the manifest and makes the folder a checkpoint.
/// abandon: in place of commit. All throw ResourceError.
std::filesystem::path begin_checkpoint(const std::filesystem::path& checkpoints,
                                       std::int64_t step,
                                       std::uint64_t bytes);
std::string write_checkpoint_part(const std::filesystem::path& folder,
                                  const std::string& writer,
                                  std::span<const StateTensor> tensors,
                                  Stream& stream,
                                  std::uint64_t max_file_bytes = kCheckpointFileBytes,
                                  const ByteProgress& progress = {});
/// Several parts as one.
std::string join_checkpoint_parts(std::span<const std::string> parts);
void commit_checkpoint(const std::filesystem::path& folder,
                       std::int64_t step,
                       const StateValues& values,
                       const std::string& config_yaml,
                       std::span<const std::string> parts,
                       std::int64_t keep_last,
                       std::int64_t keep_every);
void abandon_checkpoint(const std::filesystem::path& folder) noexcept;
/// What `tensors` take in the files, headers and lines of the manifest included.
std::uint64_t checkpoint_part_bytes(std::span<const StateTensor> tensors);

/// Removes what an interrupted save or deletion left in the folder (`.tmp-*`). Only for the run that holds the folder's
/// lock. Throws ResourceError.
void remove_unfinished(const std::filesystem::path& checkpoints);

/// Deletes what the rule does not keep (keep_last = 0: keeps all); `newest` and what is no checkpoint stay. Throws
/// ResourceError.
void apply_retention(const std::filesystem::path& checkpoints,
                     std::int64_t newest,
                     std::int64_t keep_last,
                     std::int64_t keep_every);

/// Complete checkpoints in ascending order of step: manifest valid, all files there with their
/// sizes. Other files and folders are passed over.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& checkpoints);
/// Deletes one. Its name goes first, so that an interruption leaves no half of it under its name. Throws ResourceError.
void delete_checkpoint(const std::filesystem::path& checkpoints, std::int64_t step);
/// What verbs that continue a run offer when the newest checkpoint is damaged.
inline constexpr const char* kFallback = "use --fallback";
/// The one to continue from. A newer folder that has a manifest but is not complete was damaged
/// after it was saved; going on from an older one would silently lose steps, so that is an
/// InputError that says what to do; `instead` is what the caller offers.
std::optional<CheckpointInfo> latest_checkpoint(const std::filesystem::path& checkpoints,
                                                const std::string& instead = kFallback);
/// The text of that error: `what` is wrong with `folder`.
std::string damage_text(const std::filesystem::path& folder,
                        const std::string& what,
                        const std::string& instead = kFallback);

/// A checkpoint holds other tensors than the ones to fill.
struct CheckpointMisfit : InputError {
  using InputError::InputError;
};

/// Everything in which the checkpoint's tensors differ from `tensors`, a line each, with both types and shapes: missing,
/// of another shape or dtype, and, if `strict`, unexpected. Reads the manifest only. Throws InputError for a damaged one.
std::vector<std::string> checkpoint_differences(const std::filesystem::path& checkpoint,
                                                std::span<const StateTensor> tensors,
                                                bool strict);
/// Those lines as one message.
std::string misfit_text(const std::filesystem::path& checkpoint,
                        const std::vector<std::string>& differences);

/// Fills `tensors` from the checkpoint and returns its values. Every byte is checked against the
/// manifest's checksums before it is used. `strict`: the checkpoint must hold exactly these
/// tensors; otherwise only those asked for are read (generation: weights alone). Throws InputError
/// naming file, tensor, expected and found: all tensors that are missing, unexpected or of another
/// shape or dtype in one message, before anything is read; tensors may be partly filled when a
/// later file turns out to be damaged. `progress` counts the bytes of the files that are read.
StateValues load_checkpoint(const std::filesystem::path& checkpoint,
                            std::span<const StateTensor> tensors,
                            bool strict,
                            Stream& stream,
                            const ByteProgress& progress = {});
/// The configuration that the run was saved with.
std::string checkpoint_config(const std::filesystem::path& checkpoint);
/// Checks every byte of all files; throws InputError listing all damaged files and tensors.
void verify_checkpoint(const std::filesystem::path& checkpoint);

}  // namespace moesaic
