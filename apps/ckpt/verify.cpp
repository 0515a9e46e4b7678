#include <algorithm>
#include <filesystem>
#include <iostream>
#include <vector>

#include <fmt/format.h>

#include "apps/checkpoint_path.h"
#include "apps/ckpt/ckpt.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/manifest.h"

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;

// One checkpoint, or the step-… folders of a run.
std::vector<fs::path> folders_of(const std::string& path) {
  std::vector<fs::path> folders;
  const fs::path root = checkpoints_in(path);
  std::error_code error;
  for (fs::directory_iterator at(root, error); !error && at != fs::directory_iterator();
       at.increment(error)) {
    if (step_of_folder(at->path().filename().string()) >= 0) folders.push_back(at->path());
  }
  if (folders.empty()) return {find_checkpoint(path)};
  std::sort(folders.begin(), folders.end(), [](const fs::path& a, const fs::path& b) {
    return step_of_folder(a.filename().string()) < step_of_folder(b.filename().string());
  });
  return folders;
}

}  // namespace

int ckpt_verify(const std::string& path) {
  std::string problems;
  for (const fs::path& folder : folders_of(path)) {
    try {
      verify_checkpoint(folder);
      const Manifest manifest = read_manifest(folder);
      double bytes = 0;
      for (const auto& f : manifest.files)
        bytes += static_cast<double>(f.bytes);
      std::cout << fmt::format("{}: every byte is right ({} tensors, {} files, {})\n",
                               folder.string(),
                               manifest.tensors.size(),
                               manifest.files.size(),
                               binary_bytes(bytes));
    } catch (const InputError& e) {
      std::cout << fmt::format("{}: DAMAGED\n", folder.string());
      problems += (problems.empty() ? "" : "\n") + std::string(e.what());
    }
  }
  if (!problems.empty()) throw InputError(problems);
  return 0;
}

}  // namespace moesaic::apps
