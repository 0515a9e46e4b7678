#include "comm/hang_verdict.h"

#include <algorithm>
#include <functional>
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace moesaic {
namespace {

std::string named(const std::vector<int>& ranks) {
  constexpr std::size_t kNamed = 8;
  const std::size_t n = std::min(ranks.size(), kNamed);
  std::string text =
      fmt::format("rank{} {}",
                  ranks.size() == 1 ? "" : "s",
                  fmt::join(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(n), ", "));
  if (ranks.size() > n) text += fmt::format(" and {} more", ranks.size() - n);
  return text;
}

bool is_silent(const SeenRank& r, double silence_s) {
  return !r.status || r.silent_s > silence_s;
}
bool waits(const SeenRank& r) {
  return r.status && !r.status->exchange.operation.empty() && r.status->exchange.is_moving;
}

std::vector<int> ranks_where(const std::vector<SeenRank>& seen,
                             const std::function<bool(const SeenRank&)>& condition) {
  std::vector<int> ranks;
  for (std::size_t r = 0; r < seen.size(); ++r) {
    if (condition(seen[r])) ranks.push_back(static_cast<int>(r));
  }
  return ranks;
}

// ", while rank 0 waits in …".
std::string waiting_text(const std::vector<SeenRank>& seen, double silence_s) {
  const auto waiting =
      ranks_where(seen, [&](const SeenRank& r) { return !is_silent(r, silence_s) && waits(r); });
  if (waiting.empty()) return "";
  const auto& operation = seen[static_cast<std::size_t>(waiting.front())].status->exchange;
  return fmt::format(", while {} wait{} in {}",
                     named(waiting),
                     waiting.size() == 1 ? "s" : "",
                     to_string(operation));
}

HangVerdict silent_verdict(const std::vector<SeenRank>& seen,
                           std::vector<int> culprits,
                           double silence_s) {
  const SeenRank& first = seen[static_cast<std::size_t>(culprits.front())];
  std::string text =
      fmt::format("{} give{} no sign of life (stopped, ended, or the machine is gone)",
                  named(culprits),
                  culprits.size() == 1 ? "s" : "");
  if (first.status)
    text += fmt::format("; last seen {:.1f} s ago on {} (pid {}): {}",
                        first.silent_s,
                        first.status->host,
                        first.status->pid,
                        describe(*first.status));
  text += waiting_text(seen, silence_s);
  return {std::move(culprits), std::move(text)};
}

HangVerdict busy_verdict(const std::vector<SeenRank>& seen,
                         std::vector<int> culprits,
                         double silence_s) {
  const RankStatus& first = *seen[static_cast<std::size_t>(culprits.front())].status;
  std::string text = fmt::format("{} {} behind: {} (on {}, pid {})",
                                 named(culprits),
                                 culprits.size() == 1 ? "is" : "are",
                                 describe(first),
                                 first.host,
                                 first.pid);
  text += waiting_text(seen, silence_s);
  return {std::move(culprits), std::move(text)};
}

// All wait. Groups share their counting: the lowest number is behind. Ranks of one group at one number in different
// operations, or with different sizes of a reduction, do not fit together.
std::optional<HangVerdict> order_verdict(const std::vector<SeenRank>& seen) {
  std::map<std::string, std::vector<int>> groups;
  for (std::size_t r = 0; r < seen.size(); ++r)
    groups[seen[r].status->exchange.group].push_back(static_cast<int>(r));
  const auto at = [&](int r) -> const RankStatus::Operation& {
    return seen[static_cast<std::size_t>(r)].status->exchange;
  };
  for (const auto& [group, members] : groups) {
    std::uint64_t lowest = at(members[0]).number_in_group, highest = lowest;
    for (const int r : members) {
      lowest = std::min(lowest, at(r).number_in_group);
      highest = std::max(highest, at(r).number_in_group);
    }
    std::vector<int> behind, differs;
    for (const int r : members) {
      if (at(r).number_in_group == lowest) behind.push_back(r);
      if (at(r).operation != at(members[0]).operation || at(r).bytes != at(members[0]).bytes)
        differs.push_back(r);
    }
    if (lowest != highest) {
      return HangVerdict{behind,
                         fmt::format("{} {} behind, in {}, while others are at #{}",
                                     named(behind),
                                     behind.size() == 1 ? "is" : "are",
                                     to_string(at(behind[0])),
                                     highest)};
    }
    if (!differs.empty() && at(members[0]).operation != "exchange" &&
        at(members[0]).operation != "all_to_all") {
      return HangVerdict{differs,
                         fmt::format("ranks are in exchanges that do not fit together: rank {} in "
                                     "{}, {} in {}",
                                     members[0],
                                     to_string(at(members[0])),
                                     named(differs),
                                     to_string(at(differs[0])))};
    }
  }
  return std::nullopt;
}

HangVerdict awaited_verdict(const std::vector<SeenRank>& seen) {
  std::map<int, int> votes;
  for (const SeenRank& r : seen) {
    for (const int peer : r.status->exchange.awaited_ranks)
      ++votes[peer];
  }
  int most = 0;
  for (const auto& [rank, n] : votes)
    most = std::max(most, n);
  std::vector<int> culprits;
  for (const auto& [rank, n] : votes) {
    if (n == most) culprits.push_back(rank);
  }
  const std::string where = to_string(seen[0].status->exchange);
  if (culprits.empty()) return {{}, "all ranks wait in " + where};
  std::string text = fmt::format(
      "all ranks wait in exchanges; most wait for {}; rank 0 is in {}", named(culprits), where);
  return {std::move(culprits), std::move(text)};
}

}  // namespace

HangVerdict judge_hang(const std::vector<SeenRank>& seen, double silence_s) {
  if (auto silent = ranks_where(seen, [&](const auto& r) { return is_silent(r, silence_s); });
      !silent.empty())
    return silent_verdict(seen, std::move(silent), silence_s);
  if (auto busy = ranks_where(seen, [](const auto& r) { return !waits(r); }); !busy.empty())
    return busy_verdict(seen, std::move(busy), silence_s);
  if (auto verdict = order_verdict(seen)) return *verdict;
  return awaited_verdict(seen);
}

std::string table_of(const std::vector<SeenRank>& seen, double silence_s, std::size_t most) {
  std::string table;
  for (std::size_t r = 0; r < std::min(seen.size(), most); ++r) {
    const SeenRank& rank = seen[r];
    if (!rank.status) {
      table += fmt::format("  rank {}: no status\n", r);
      continue;
    }
    table += fmt::format(
        "  rank {} ({}, pid {}){}: {}\n",
        r,
        rank.status->host,
        rank.status->pid,
        is_silent(rank, silence_s) ? fmt::format(", silent for {:.1f} s", rank.silent_s) : "",
        describe(*rank.status));
  }
  if (seen.size() > most) table += fmt::format("  and {} more ranks\n", seen.size() - most);
  return table;
}

}  // namespace moesaic
