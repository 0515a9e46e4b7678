#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/checkpoint_path.h"
#include "apps/ckpt/ckpt.h"
#include "core/checkpoint/manifest.h"

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;

struct Row {
  std::string name;
  std::int64_t step = -1;
  std::int64_t tokens = -1;
  double bytes = 0;
  double age_seconds = 0;
  std::string problem;  ///< empty: complete
};

double age_of(const fs::path& path) {
  std::error_code error;
  const auto time = fs::last_write_time(path, error);
  if (error) return 0;
  return std::chrono::duration<double>(fs::file_time_type::clock::now() - time).count();
}

Row row_of(const fs::path& folder) {
  Row row;
  row.name = folder.filename().string();
  row.step = step_of_folder(row.name);
  std::error_code error;
  for (fs::directory_iterator at(folder, error); !error && at != fs::directory_iterator();
       at.increment(error)) {
    std::error_code ignored;
    if (at->is_regular_file(ignored)) row.bytes += static_cast<double>(at->file_size(ignored));
  }
  row.age_seconds = age_of(folder / kManifestName);
  try {
    const Manifest manifest = read_manifest(folder);
    row.step = manifest.step;
    const auto tokens = manifest.values.integers.find("tokens_seen");
    if (tokens != manifest.values.integers.end()) row.tokens = tokens->second;
  } catch (const InputError& e) {
    row.problem = e.what();
  }
  return row;
}

std::string age_text(double seconds) {
  if (seconds < 120) return fmt::format("{:.0f} s", std::max(0.0, seconds));
  if (seconds < 7200) return fmt::format("{:.0f} min", seconds / 60);
  return seconds < 172800 ? fmt::format("{:.1f} h", seconds / 3600)
                          : fmt::format("{:.1f} d", seconds / 86400);
}

// step-… first, then what a run set aside or left behind.
bool is_checkpoint_name(const std::string& name) {
  return name.find("step-") != std::string::npos;
}

}  // namespace

int ckpt_list(const std::string& run, bool json) {
  const fs::path root = checkpoints_in(run);
  std::error_code error;
  std::vector<Row> rows;
  for (fs::directory_iterator at(root, error); !error && at != fs::directory_iterator();
       at.increment(error)) {
    std::error_code ignored;
    if (is_checkpoint_name(at->path().filename().string()) && at->is_directory(ignored))
      rows.push_back(row_of(at->path()));
  }
  if (error)
    throw InputError(fmt::format("{}: cannot be listed: {}; give the run.dir of a training run",
                                 root.string(),
                                 error.message()));
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::pair{a.step, a.name} < std::pair{b.step, b.name};
  });
  if (json) {
    auto list = nlohmann::ordered_json::array();
    for (const Row& r : rows)
      list.push_back({{"name", r.name},
                      {"step", r.step},
                      {"tokens", r.tokens},
                      {"bytes", r.bytes},
                      {"age_seconds", r.age_seconds},
                      {"complete", r.problem.empty()},
                      {"problem", r.problem}});
    std::cout << list.dump(1) << "\n";
    return 0;
  }
  std::cout << fmt::format(
      "{:>10} {:>14} {:>12} {:>8}  {}\n", "step", "tokens", "size", "age", "folder");
  for (const Row& r : rows)
    std::cout << fmt::format("{:>10} {:>14} {:>12} {:>8}  {}{}\n",
                             r.step < 0 ? "-" : std::to_string(r.step),
                             r.tokens < 0 ? "-" : std::to_string(r.tokens),
                             binary_bytes(r.bytes),
                             age_text(r.age_seconds),
                             r.name,
                             r.problem.empty() ? "" : "  NOT COMPLETE: " + r.problem);
  if (rows.empty()) std::cout << "no checkpoints in " << root.string() << "\n";
  return 0;
}

}  // namespace moesaic::apps
