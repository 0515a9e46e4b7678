#include "comm/machine_identity.h"

#include <map>
#include <set>
#include <tuple>

#include <fmt/format.h>

namespace moesaic {

std::vector<std::string> machine_identities(std::span<const RankSite> ranks,
                                            int ranks_per_node,
                                            bool may_share) {
  std::vector<std::string> identities(ranks.size());
  std::set<std::pair<std::string, std::string>> devices;
  for (const RankSite& r : ranks)
    devices.emplace(r.host, r.device);
  const auto per_node = static_cast<std::size_t>(ranks_per_node > 0 ? ranks_per_node : 0);
  const bool shares = devices.size() < ranks.size();
  const bool poses = may_share && per_node > 0 && per_node < ranks.size();
  if (!shares && !poses) return identities;
  std::map<std::tuple<std::string, std::string, std::size_t>, int> users;  // of a device, by node
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const std::size_t node = per_node > 0 ? r / per_node : 0;
    const int before = users[{ranks[r].host, ranks[r].device, node}]++;
    identities[r] = fmt::format("{}/{}/{}", ranks[r].host, node, before);
  }
  return identities;
}

}  // namespace moesaic
