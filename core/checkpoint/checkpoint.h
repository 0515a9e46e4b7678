#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/tensor.h"
#include "memory/stream.h"

namespace moesaic {

/// A tensor of the training state under its layout-free name: "model.layers.3.…weight" (weights), "optimizer/m/…",
/// "ema/…", "buffer/…". Experts appear one by one under their global name.
struct StateTensor {
  std::string name;
  TensorView view;  ///< on the run's device
};

/// Everything a run continues from: tensors, and named values (step, data position, counters; integers and text, written
/// to the manifest as JSON).
struct StateValues {
  std::map<std::string, std::int64_t> integers;
  std::map<std::string, double> reals;
  std::map<std::string, std::string> texts;
};

/// RUN_DIR/checkpoints/step-00000100/: safetensors files that any tool opens, and manifest.json, written last. A folder
/// without a valid manifest is not a checkpoint.
struct CheckpointInfo {
  std::int64_t step = 0;
  std::filesystem::path path;
};

/// Writes to a temporary folder beside the final one, fsyncs every file and the folder, renames, fsyncs the parent, then
/// removes what the retention rule no longer keeps. One rank calls it. Throws ResourceError (path, cause); the previous
/// checkpoint then still stands.
void save_checkpoint(const std::filesystem::path& checkpoints, std::int64_t step, std::span<const StateTensor> tensors,
                     const StateValues& values, const std::string& config_yaml, std::int64_t keep_last, std::int64_t keep_every,
                     Stream& stream);

/// Complete checkpoints in ascending order of step.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& checkpoints);
std::optional<CheckpointInfo> latest_checkpoint(const std::filesystem::path& checkpoints);

/// Fills `tensors` from the checkpoint and returns its values. Every byte is checked against the manifest's checksums
/// before it is used. `strict`: the checkpoint must hold exactly these tensors; otherwise only those asked for are read
/// (generation: weights alone). Throws InputError naming file, tensor, expected and found.
StateValues load_checkpoint(const std::filesystem::path& checkpoint, std::span<const StateTensor> tensors, bool strict, Stream& stream);
/// The configuration that the run was saved with.
std::string checkpoint_config(const std::filesystem::path& checkpoint);

}  // namespace moesaic
