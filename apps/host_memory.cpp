#include "apps/host_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace moesaic::apps {
namespace {

namespace fs = std::filesystem;

// The number behind a word at the begin of a line; "max" is none.
std::optional<std::uint64_t> number_after(const fs::path& path, const std::string& word) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, word.size(), word) != 0) continue;
    std::istringstream rest(line.substr(word.size()));
    std::uint64_t number = 0;
    if (rest >> number) return number;
    return std::nullopt;
  }
  return std::nullopt;
}

// What a group has left. Memory of files that nobody uses now can be had again.
std::optional<std::uint64_t> left_of_group(const fs::path& group) {
  const auto limit = number_after(group / "memory.max", "");
  const auto used = number_after(group / "memory.current", "");
  if (!limit || !used) return std::nullopt;
  const std::uint64_t files = number_after(group / "memory.stat", "inactive_file ").value_or(0);
  const std::uint64_t held = *used - std::min(*used, files);
  return *limit - std::min(*limit, held);
}

}  // namespace

std::optional<std::uint64_t> available_host_memory(const fs::path& root) {
  const auto kib = number_after(root / "proc/meminfo", "MemAvailable:");
  if (!kib) return std::nullopt;
  std::uint64_t least = *kib << 10;
  const fs::path groups = root / "sys/fs/cgroup";
  std::string own;
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, 4, "0::/") == 0) own = line.substr(4);
  for (fs::path group = own;; group = group.parent_path()) {
    if (const auto left = left_of_group(groups / group)) least = std::min(least, *left);
    if (group.empty()) return least;
  }
}

}  // namespace moesaic::apps
