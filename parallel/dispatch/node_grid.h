#pragma once
#include <span>
#include <string>

#include "comm/communicator.h"
#include "parallel/dispatch/method.h"

namespace moesaic {

struct FoundGrid {
  NodeGrid grid;
  std::string reason;  ///< one line: how it was found
};

/// The nodes of ranks that are on these hosts. Nodes need equal numbers of ranks that follow each other; otherwise every
/// rank counts as a node of its own, which makes the hierarchical methods equal to flat.
FoundGrid grid_of_hosts(std::span<const std::string> hosts);

/// `ranks_per_node` > 0 lets any machine pose as nodes of so many ranks; throws UsageError when it does not divide
/// the ranks, with the numbers that do. Otherwise all ranks compare `host`, their machine's name; blocks the host.
/// `group` may be null for a single rank.
FoundGrid find_node_grid(Communicator* group, int ranks_per_node, const std::string& host);

/// The name of this machine for it: NCCL_HOSTID where it is set, so that nodes are those that NCCL sees.
std::string node_name();

}  // namespace moesaic
