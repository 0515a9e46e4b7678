#include "parallel/dispatch/node_grid.h"

#include <array>
#include <cstdlib>
#include <set>

#include <fmt/format.h>
#include <unistd.h>

namespace moesaic {

FoundGrid grid_of_hosts(std::span<const std::string> hosts) {
  const int ranks = static_cast<int>(hosts.size());
  const auto alone = [&](const std::string& why) {
    return FoundGrid{{ranks, 1}, fmt::format("{}: every rank is a node of its own", why)};
  };
  std::set<std::string> seen;
  int per_node = 0, run = 0;
  for (int r = 0; r < ranks; ++r) {
    const auto at = static_cast<std::size_t>(r);
    ++run;
    if (r + 1 < ranks && hosts[at + 1] == hosts[at]) continue;
    if (!seen.insert(hosts[at]).second)
      return alone(fmt::format("ranks of {} do not follow each other", hosts[at]));
    if (per_node != 0 && run != per_node)
      return alone(fmt::format("{} has {} ranks, the first node {}", hosts[at], run, per_node));
    per_node = run;
    run = 0;
  }
  return {{ranks / per_node, per_node},
          fmt::format("{} host{}", ranks / per_node, ranks == per_node ? "" : "s")};
}

FoundGrid find_node_grid(Communicator* group, int ranks_per_node, const std::string& host) {
  const int ranks = group == nullptr ? 1 : group->size();
  if (ranks_per_node > 0) {
    if (ranks % ranks_per_node != 0) {
      std::string divisors;
      for (int n = 1; n <= ranks; ++n) {
        if (ranks % n == 0) divisors += fmt::format("{}{}", divisors.empty() ? "" : ", ", n);
      }
      throw UsageError(fmt::format(
          "{} ranks are not nodes of {}; possible: {}", ranks, ranks_per_node, divisors));
    }
    return {{ranks / ranks_per_node, ranks_per_node}, "as configured"};
  }
  if (group == nullptr) return {{1, 1}, "one rank"};
  return grid_of_hosts(group->all_gather_host(host));
}

std::string node_name() {
  if (const char* id = std::getenv("NCCL_HOSTID"); id != nullptr && *id != '\0') return id;
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown host";
}

}  // namespace moesaic
