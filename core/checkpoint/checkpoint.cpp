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

fs::path final_folder_of(const fs::path& temporary, std::int64_t step) {
  return temporary.parent_path() / folder_name(step);
}

void write_manifest(const fs::path& folder, const Manifest& manifest) {
  DurableFile out(folder / kManifestName, DurableFile::Mode::create);
  out.write(manifest_text(manifest));
  out.finish();
  sync_folder(folder);
}

// Files and tensors of all parts under one table.
Manifest joined(std::span<const std::string> parts) {
  Manifest all;
  for (const std::string& text : parts) {
    const Manifest part = parse_manifest_part(text);
    const std::size_t files = all.files.size();
    all.files.insert(all.files.end(), part.files.begin(), part.files.end());
    for (ManifestTensor t : part.tensors) {
      t.file += files;
      all.tensors.push_back(std::move(t));
    }
  }
  return all;
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

void apply_retention(const fs::path& checkpoints,
                     std::int64_t newest,
                     std::int64_t keep_last,
                     std::int64_t keep_every) {
  if (keep_last == 0) return;
  std::vector<std::int64_t> steps;
  for (const auto& c : list_checkpoints(checkpoints))
    steps.push_back(c.step);
  for (const auto step : steps_to_delete(steps, newest, keep_last, keep_every))
    delete_checkpoint(checkpoints, step);
}

// Headers, and lines of the manifest: about 400 bytes per tensor.
std::uint64_t checkpoint_part_bytes(std::span<const StateTensor> tensors) {
  std::uint64_t bytes = std::uint64_t{1} << 16;
  for (const auto& t : tensors)
    bytes += t.bytes() + 2 * t.name.size() + 400;
  return bytes;
}

fs::path begin_checkpoint(const fs::path& checkpoints, std::int64_t step, std::uint64_t bytes) {
  MOESAIC_CHECK(step >= 0, "negative step");
  create_folder(checkpoints);
  remove_unfinished(checkpoints);
  require_space(checkpoints, bytes);
  const fs::path final_folder = checkpoints / folder_name(step);
  if (std::error_code error;
      fs::exists(final_folder, error) && !fs::is_directory(final_folder, error)) {
    throw ResourceError(fmt::format("{}: stands where the checkpoint should be; move it away",
                                    final_folder.string()));
  }
  const fs::path folder =
      checkpoints / fmt::format("{}{}-{}", kTemporary, folder_name(step), ::getpid());
  create_folder(folder);
  return folder;
}

std::string write_checkpoint_part(const fs::path& folder,
                                  const std::string& writer,
                                  std::span<const StateTensor> tensors,
                                  Stream& stream,
                                  std::uint64_t max_file_bytes,
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
  Manifest part;
  for (const auto& file : plan_files(tensors, max_file_bytes, writer))
    write_data_file(folder, file, staging, part, progress);
  sync_folder(folder);
  return manifest_text(part);
}

std::string join_checkpoint_parts(std::span<const std::string> parts) {
  return manifest_text(joined(parts));
}

void commit_checkpoint(const fs::path& folder,
                       std::int64_t step,
                       const StateValues& values,
                       const std::string& config_yaml,
                       std::span<const std::string> parts,
                       std::int64_t keep_last,
                       std::int64_t keep_every) {
  const fs::path final_folder = final_folder_of(folder, step);
  try {
    Manifest manifest = joined(parts);
    manifest.step = step;
    manifest.values = values;
    manifest.config = config_yaml;
    write_manifest(folder, manifest);
    // Nothing gets the name of a checkpoint, and none is deleted for it, before it was found complete: some disks claim
    // to have written more than they have.
    read_manifest(folder);
  } catch (...) {
    abandon_checkpoint(folder);  // the first error is the one to report
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
  if (replaced) remove_folder(folder);
  apply_retention(folder.parent_path(), step, keep_last, keep_every);
}

void abandon_checkpoint(const fs::path& folder) noexcept {
  std::error_code ignored;
  fs::remove_all(folder, ignored);
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
  const fs::path folder =
      begin_checkpoint(checkpoints, step, checkpoint_part_bytes(tensors) + config_yaml.size());
  std::string part;
  try {
    part = write_checkpoint_part(folder, "", tensors, stream, max_file_bytes, progress);
  } catch (...) {
    abandon_checkpoint(folder);
    throw;
  }
  commit_checkpoint(folder, step, values, config_yaml, {&part, 1}, keep_last, keep_every);
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

std::string damage_text(const fs::path& folder,
                        const std::string& what,
                        const std::string& instead) {
  return fmt::format(
      "the newest checkpoint is damaged: {}{}To take an older one, move {} away, or {}",
      what,
      what.find('\n') == std::string::npos ? ". " : "\n",
      folder.string(),
      instead);
}

std::optional<CheckpointInfo> latest_checkpoint(const fs::path& checkpoints,
                                                const std::string& instead) {
  auto steps = steps_in(checkpoints);
  std::reverse(steps.begin(), steps.end());
  for (const auto step : steps) {
    const fs::path folder = checkpoints / folder_name(step);
    std::error_code error;
    if (!fs::exists(fs::symlink_status(folder / kManifestName, error))) continue;
    try {
      read_manifest(folder);
    } catch (const InputError& e) {
      throw InputError(damage_text(folder, e.what(), instead));
    }
    return CheckpointInfo{step, folder};
  }
  return std::nullopt;
}

}  // namespace moesaic
