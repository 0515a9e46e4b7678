#pragma once
#include <cstdint>
#include <string>

#include "parallel/dispatch/method.h"

namespace moesaic {

/// Groups of `groups` equal ones that a token's `choices` different experts of `experts` fall into on
/// average, all choices being equally likely: groups (1 - C(experts - experts / groups, choices) /
/// C(experts, choices)).
double expected_groups(std::int64_t groups, std::int64_t experts, std::int64_t choices);

/// Rows per token that leave a rank one way, by Link, on average over ranks and uniform routing; self are
/// those it keeps.
struct ExpectedRows {
  double self = 0, node = 0, network = 0;
  double of(Link link) const noexcept {
    return link == Link::self ? self : link == Link::node ? node : network;
  }
};
ExpectedRows expected_rows(ExchangeMethod method,
                           const NodeGrid& grid,
                           std::int64_t experts,
                           std::int64_t choices);

/// Bytes per second that one rank gets through a link, seconds per message, and seconds that the host's wait for the
/// counts costs (not in the dense methods).
struct LinkSpeeds {
  double node = 200e9, network = 25e9;
  double node_latency = 5e-6, network_latency = 15e-6;
  double host_wait = 20e-6;
};

/// Seconds of dispatch and combine of `tokens` tokens per rank with rows of `row_bytes`: per hop and direction the slower
/// link's bytes / speed + messages x latency.
double expected_seconds(ExchangeMethod method,
                        const NodeGrid& grid,
                        std::int64_t experts,
                        std::int64_t choices,
                        std::int64_t tokens,
                        std::int64_t row_bytes,
                        const LinkSpeeds& speeds);

struct MethodChoice {
  ExchangeMethod method = ExchangeMethod::flat;
  std::string reason;  ///< one line: the choice, its rows and time, and those of the runners-up
};
/// The method with the least expected time; at equal times (within 2 %) the earlier of dense, flat, hdense, inter_first,
/// intra_first, intra_first_3. `pair` is never chosen, what needs several ranks in several nodes only there, and with
/// `counting` no dense method.
MethodChoice choose_method(const NodeGrid& grid,
                           std::int64_t experts,
                           std::int64_t choices,
                           std::int64_t tokens,
                           std::int64_t row_bytes,
                           const LinkSpeeds& speeds,
                           bool counting = false);

}  // namespace moesaic
