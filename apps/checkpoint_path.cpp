#include "apps/checkpoint_path.h"

#include <charconv>
#include <cstdint>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "core/base/error.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/manifest.h"

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;

bool is_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

bool is_checkpoint(const fs::path& path) {
  std::error_code error;
  return fs::exists(fs::symlink_status(path / kManifestName, error));
}

// A folder may have an '@' in its name; what exists as it stands has no step.
std::pair<fs::path, std::optional<std::int64_t>> split_step(const std::string& text) {
  const auto at = text.rfind('@');
  if (is_folder(text) || at == std::string::npos) return {text, std::nullopt};
  std::int64_t step = -1;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + at + 1, end, step);
  if (parsed.ec != std::errc() || parsed.ptr != end || step < 0) return {text, std::nullopt};
  return {text.substr(0, at), step};
}

// The run's folder is looked for from a checkpoint's own name up: "step-00000008/" and "." end without one.
fs::path with_name(const fs::path& path) {
  const fs::path name = path.filename();
  if (!name.empty() && name != "." && name != "..") return path;
  const fs::path whole = fs::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

fs::path of_step(const fs::path& root, std::int64_t step) {
  const fs::path folder = root / folder_name(step);
  if (is_folder(folder)) return folder;
  std::string known;
  for (const auto& info : list_checkpoints(root))
    known += fmt::format(" {}", info.step);
  throw InputError(fmt::format("{} holds no checkpoint of step {}; there are:{}",
                               root.string(),
                               step,
                               known.empty() ? " none" : known));
}

}  // namespace

fs::path checkpoints_in(const fs::path& path) {
  return is_folder(path / "checkpoints") ? path / "checkpoints" : path;
}

fs::path find_checkpoint(const std::string& text) {
  return find_checkpoint(text, 0);
}

fs::path find_checkpoint(const std::string& text, std::int64_t wanted) {
  auto [path, step] = split_step(text);
  if (wanted != 0 && step && *step != wanted)
    throw UsageError(fmt::format("--step {}, but {} names step {}", wanted, text, *step));
  if (wanted != 0) step = wanted;
  if (!is_folder(path)) {
    throw InputError(fmt::format(
        "{} is not a folder; give the run.dir of a training run, or one of its step-… folders",
        path.string()));
  }
  if (is_checkpoint(path)) {
    if (step && read_manifest(path).step != *step)
      throw InputError(fmt::format("{} is not the checkpoint of step {}", path.string(), *step));
    return with_name(path);
  }
  const fs::path root = checkpoints_in(path);
  if (step) return of_step(root, *step);
  if (const auto latest = latest_checkpoint(root, "name its step (RUN@STEP)")) return latest->path;
  throw InputError(fmt::format(
      "{} holds no complete checkpoint; give the run.dir of a training run, or a step-… folder",
      root.string()));
}

}  // namespace moesaic::apps
