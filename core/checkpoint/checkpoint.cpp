// Saving, listing and deleting checkpoints; load.cpp has the reading.
#include "core/checkpoint/checkpoint.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <unistd.h>

#include "core/base/durable_file.h"
#include "core/checkpoint/data_files.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/retention.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTemporary = ".tmp-";
constexpr std::size_t kStagingBytes = std::size_t{32} << 20;

// Names in a folder, sorted; none when there is no such folder.
std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator at(folder, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error))
    names.push_back(at->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory) {
    throw ResourceError(fmt::format("{}: cannot list: {}", folder.string(), error.message()));
  }
  std::sort(names.begin(), names.end());
  return names;
}

void remove_folder(const fs::path& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (error)
    throw ResourceError(fmt::format("{}: cannot remove: {}", folder.string(), error.message()));
}

// What lies in the files besides the tensors: headers, and lines of the manifest, about 400 bytes per tensor.
std::uint64_t bytes_needed(std::span<const StateTensor> tensors, const std::string& config_yaml) {
  std::uint64_t bytes = (std::uint64_t{1} << 16) + config_yaml.size();
  for (const auto& t : tensors)
    bytes += t.bytes() + 2 * t.name.size() + 400;
  return bytes;
}

// Said before anything is written: a full disk found half-way costs the time of a save, and others on it their space.
void require_space(const fs::path& checkpoints, std::uint64_t needed) {
  std::error_code error;
  const fs::space_info space = fs::space(checkpoints, error);
  if (error || space.available >= needed) return;
  constexpr double kMiB = 1024.0 * 1024.0;
  throw ResourceError(
      fmt::format("{}: a checkpoint needs {:.1f} MiB, but {:.1f} MiB are free; make room, or lower "
                  "checkpoint.keep_last",
                  checkpoints.string(),
                  static_cast<double>(needed) / kMiB,
                  static_cast<double>(space.available) / kMiB));
}

void write_folder(const fs::path& folder,
                  std::span<const StateTensor> tensors,
                  Manifest manifest,
                  std::uint64_t max_file_bytes,
                  Stream& stream,
                  const ByteProgress& progress) {
  std::size_t largest = 0;
  std::uint64_t total = 0;
  std::set<std::string> names;
  for (const auto& t : tensors) {
    MOESAIC_CHECK(names.insert(stored_name(t)).second, "two tensors named " + stored_name(t));
    largest = std::max(largest, t.bytes());
    total += t.bytes();
  }
  progress.begin(total);
  Staging staging(stream, std::min(largest, kStagingBytes));
  for (const auto& file : plan_files(tensors, max_file_bytes))
    write_data_file(folder, file, staging, manifest, progress);
  DurableFile out(folder / kManifestName, DurableFile::Mode::create);
  out.write(manifest_text(manifest));
  out.finish();
  sync_folder(folder);
}

// Folders named like a checkpoint, ascending; -1 (other names) left out.
std::vector<std::int64_t> steps_in(const fs::path& checkpoints) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (const auto& name : names_in(checkpoints)) {
    const auto step = step_of_folder(name);
    if (step >= 0 && fs::is_directory(checkpoints / name, error)) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void apply_retention(const fs::path& checkpoints,
                     std::int64_t saved,
                     std::int64_t keep_last,
                     std::int64_t keep_every) {
  if (keep_last == 0) return;
  std::vector<std::int64_t> steps;
  for (const auto& c : list_checkpoints(checkpoints))
    steps.push_back(c.step);
  for (const auto step : steps_to_delete(steps, saved, keep_last, keep_every))
    delete_checkpoint(checkpoints, step);
}

}  // namespace

void remove_unfinished(const fs::path& checkpoints) {
  for (const auto& name : names_in(checkpoints)) {
    if (name.starts_with(kTemporary)) remove_folder(checkpoints / name);
  }
}

void delete_checkpoint(const fs::path& checkpoints, std::int64_t step) {
  const fs::path doomed = checkpoints / (kTemporary + folder_name(step) + "-deleted");
  remove_folder(doomed);
  rename_or_exchange(checkpoints / folder_name(step), doomed);
  remove_folder(doomed);
}

void save_checkpoint(const fs::path& checkpoints,
                     std::int64_t step,
                     std::span<const StateTensor> tensors,
                     const StateValues& values,
                     const std::string& config_yaml,
                     std::int64_t keep_last,
                     std::int64_t keep_every,
                     Stream& stream,
                     std::uint64_t max_file_bytes,
                     const ByteProgress& progress) {
  MOESAIC_CHECK(step >= 0, "negative step");
  create_folder(checkpoints);
  remove_unfinished(checkpoints);
  require_space(checkpoints, bytes_needed(tensors, config_yaml));
  const fs::path final_folder = checkpoints / folder_name(step);
  if (std::error_code error;
      fs::exists(final_folder, error) && !fs::is_directory(final_folder, error)) {
    throw ResourceError(fmt::format("{}: stands where the checkpoint should be; move it away",
                                    final_folder.string()));
  }
  const fs::path folder =
      checkpoints / fmt::format("{}{}-{}", kTemporary, folder_name(step), ::getpid());
  create_folder(folder);
  try {
    write_folder(folder, tensors, {step, values, config_yaml}, max_file_bytes, stream, progress);
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    fs::remove_all(folder, ignored);
    throw;
  }
  bool replaced = false;
  try {
    replaced = rename_or_exchange(folder, final_folder);
  } catch (...) {
    // Only where nothing can have been exchanged: the folder could hold the earlier checkpoint.
    std::error_code error;
    if (!fs::exists(final_folder, error) && !error) fs::remove_all(folder, error);
    throw;
  }
  read_manifest(
      final_folder);  // nothing is deleted before the new checkpoint has been found complete
  if (replaced) remove_folder(folder);
  apply_retention(checkpoints, step, keep_last, keep_every);
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& checkpoints) {
  std::vector<CheckpointInfo> list;
  for (const auto step : steps_in(checkpoints)) {
    const fs::path folder = checkpoints / folder_name(step);
    try {
      read_manifest(folder);
      list.push_back({step, folder});
    } catch (const InputError&) {
      continue;  // not complete: not a checkpoint
    }
  }
  return list;
}

std::optional<CheckpointInfo> latest_checkpoint(const fs::path& checkpoints) {
  auto steps = steps_in(checkpoints);
  std::reverse(steps.begin(), steps.end());
  for (const auto step : steps) {
    const fs::path folder = checkpoints / folder_name(step);
    std::error_code error;
    if (!fs::exists(fs::symlink_status(folder / kManifestName, error))) continue;
    try {
      read_manifest(folder);
    } catch (const InputError& e) {
      throw InputError(
          fmt::format("the newest checkpoint is damaged: {}. To continue from an older one, move "
                      "{} away, or use --fallback",
                      e.what(),
                      folder.string()));
    }
    return CheckpointInfo{step, folder};
  }
  return std::nullopt;
}

}  // namespace moesaic
