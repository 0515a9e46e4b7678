#include "apps/gpu_choice.h"

#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace moesaic::apps {
namespace {

// A matching between ranks and GPUs, grown by one rank at a time.
class Matching {
 public:
  explicit Matching(const VisibleGpus& visible) : visible_(visible), numbers_(visible.size(), -1) {}

  // Takes a free GPU, the first; else one whose rank can take another, and so on.
  bool give(std::size_t rank) {
    std::set<std::string> tried;
    return give(rank, tried);
  }
  const std::vector<int>& numbers() const { return numbers_; }

 private:
  bool give(std::size_t rank, std::set<std::string>& tried) {
    const auto& gpus = visible_[rank];
    for (std::size_t i = 0; i < gpus.size(); ++i) {
      if (!rank_of_.contains(gpus[i])) return take(rank, i);
    }
    for (std::size_t i = 0; i < gpus.size(); ++i) {
      if (tried.insert(gpus[i]).second && give(rank_of_.at(gpus[i]), tried)) return take(rank, i);
    }
    return false;
  }
  bool take(std::size_t rank, std::size_t number) {
    rank_of_[visible_[rank][number]] = rank;
    numbers_[rank] = static_cast<int>(number);
    return true;
  }

  const VisibleGpus& visible_;
  std::vector<int> numbers_;
  std::map<std::string, std::size_t> rank_of_;
};

void share_what_is_there(const VisibleGpus& visible, std::vector<int>& numbers) {
  std::map<std::string, int> users;
  for (std::size_t r = 0; r < visible.size(); ++r) {
    if (numbers[r] >= 0) ++users[visible[r][static_cast<std::size_t>(numbers[r])]];
  }
  for (std::size_t r = 0; r < visible.size(); ++r) {
    if (numbers[r] >= 0 || visible[r].empty()) continue;
    const auto least = std::min_element(
        visible[r].begin(), visible[r].end(), [&](const std::string& a, const std::string& b) {
          return users[a] < users[b];
        });
    ++users[*least];
    numbers[r] = static_cast<int>(least - visible[r].begin());
  }
}

}  // namespace

GpuChoice choose_gpus(const VisibleGpus& visible, bool share) {
  GpuChoice choice;
  Matching matching(visible);
  for (std::size_t r = 0; r < visible.size(); ++r) {
    if (!matching.give(r) && choice.first_without < 0) choice.first_without = static_cast<int>(r);
  }
  choice.numbers = matching.numbers();
  if (share) share_what_is_there(visible, choice.numbers);
  return choice;
}

int num_different(const VisibleGpus& visible) {
  std::set<std::string> all;
  for (const auto& gpus : visible)
    all.insert(gpus.begin(), gpus.end());
  return static_cast<int>(all.size());
}

bool is_alike_on_machines(const VisibleGpus& visible, std::span<const std::string> hosts) {
  std::map<std::string, std::size_t> first;  // rank of a machine
  for (std::size_t r = 0; r < visible.size(); ++r) {
    if (visible[first.emplace(hosts[r], r).first->second] != visible[r]) return false;
  }
  return true;
}

std::string gpu_choice_problem(const VisibleGpus& visible,
                               const GpuChoice& choice,
                               const GpuWords& words) {
  if (choice.first_without < 0) return {};
  const auto& seen = visible[static_cast<std::size_t>(choice.first_without)];
  const std::string all = fmt::format(
      "{} ranks see {} different GPU(s) in all", visible.size(), num_different(visible));
  if (seen.empty())
    return fmt::format(
        "{}, and rank {} sees none: give every rank a GPU (CUDA_VISIBLE_DEVICES; Slurm: "
        "--gpus-per-node), or use {}",
        all,
        choice.first_without,
        words.cpu);
  return fmt::format(
      "{}, and rank {} finds none that no other rank uses (it sees {}): start one rank per GPU, "
      "use {}, or set {} to let ranks take turns on a GPU (slow, for tests)",
      all,
      choice.first_without,
      fmt::join(seen, ", "),
      words.cpu,
      words.share);
}

}  // namespace moesaic::apps
