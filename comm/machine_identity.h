#pragma once
#include <span>
#include <string>
#include <vector>

namespace moesaic {

/// Where a rank runs: the machine's name, and what tells its devices apart.
struct RankSite {
  std::string host, device;
};

/// Which machine each rank is to claim as its own towards NCCL (NCCL_HOSTID), by rank. NCCL moves data between ranks of one
/// machine through device memory and between machines through the network, and refuses two ranks of one machine on one device.
///
/// Empty texts: as it is. Otherwise, when ranks share a device, or `may_share` is set and `ranks_per_node` lets consecutive
/// ranks pose as nodes (0: they do not): one machine per posed node, and further ones for the second, third, … rank of a
/// posed node on one device. So four ranks on two devices as nodes of two are (a, a, b, b) when each node has both devices.
std::vector<std::string> machine_identities(std::span<const RankSite> ranks,
                                            int ranks_per_node,
                                            bool may_share);

}  // namespace moesaic
