#pragma once
#include <memory>
#include <string>

#include "core/config/config.h"
#include "core/train/phases.h"
#include "parallel/dispatch/exchange.h"
#include "parallel/dispatch/volumes.h"
#include "parallel/mesh.h"

namespace moesaic {

/// How the ranks of one expert group lie on nodes: `ranks_per_node` consecutive ranks of the job share a node (0: all).
/// Where groups do not fill equal parts of nodes, every rank counts as a node of its own.
NodeGrid expert_nodes(const MeshPosition& position, int ranks_per_node);

/// What carries a phase's tokens to their experts; null without expert parallelism. All ranks of `group` call it.
/// `group`: along Axis::ep; null to measure memory, where nothing is ever sent. Throws UsageError when the method of
/// section `dispatch` does not fit the nodes. count_experts: ExchangeOptions::count_experts.
std::unique_ptr<ExpertExchange> make_expert_exchange(const config::Config& config,
                                                     const Phase& phase,
                                                     const Precision& precision,
                                                     const MeshPosition& position,
                                                     int ranks_per_node,
                                                     Communicator* group,
                                                     bool count_experts = false);

/// What a reader wants to know of it, in one line: the method and why, room, types. Empty without expert parallelism.
std::string exchange_text(const config::Config& config,
                          const Phase& phase,
                          const Precision& precision,
                          const MeshPosition& position,
                          int ranks_per_node);

/// The method that section `dispatch` means for these nodes, and why.
MethodChoice exchange_method(const config::Config& config,
                             const NodeGrid& nodes,
                             std::int64_t tokens,
                             const Precision& precision);

}  // namespace moesaic
