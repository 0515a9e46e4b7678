#include <filesystem>
#include <iostream>
#include <memory>
#include <vector>

#include <fmt/format.h>

#include "apps/checkpoint_path.h"
#include "apps/ckpt/ckpt.h"
#include "apps/file_lock.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/manifest.h"
#include "core/checkpoint/retention.h"

namespace moesaic::apps {

int ckpt_prune(const std::string& run, const PruneOptions& options) {
  const std::filesystem::path root = checkpoints_in(run);
  std::error_code error;
  if (!std::filesystem::is_directory(root, error))
    throw InputError(
        fmt::format("{} is not a folder; give the run.dir of a training run", root.string()));
  // A run deletes and renames in the same folder.
  std::unique_ptr<FileLock> lock;
  if (root != std::filesystem::path(run) && !options.dry_run)
    lock = std::make_unique<FileLock>(std::filesystem::path(run) / ".lock");
  std::vector<std::int64_t> steps;
  for (const auto& c : list_checkpoints(root))
    steps.push_back(c.step);
  if (steps.empty()) {
    std::cout << fmt::format("{} holds no complete checkpoint\n", root.string());
    return 0;
  }
  const auto doomed = steps_to_delete(steps, steps.back(), options.keep_last, options.keep_every);
  for (const std::int64_t step : doomed) {
    std::cout << fmt::format("{} {}\n",
                             options.dry_run ? "would delete" : "delete",
                             (root / folder_name(step)).string());
    if (!options.dry_run) delete_checkpoint(root, step);
  }
  std::cout << fmt::format("{} of {} checkpoints {}\n",
                           steps.size() - doomed.size(),
                           steps.size(),
                           options.dry_run ? "would stay" : "stay");
  return 0;
}

}  // namespace moesaic::apps
