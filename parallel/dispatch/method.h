#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "kernels/ops/exchange.h"

namespace moesaic {

/// How tokens travel to the ranks of their experts and back. Rank r = node r / per_node, number
/// r % per_node within it.
///
///   pair           one row per token and choice; the baseline
///   flat           one row per token and rank that has one of its experts
///   inter_first    one row per token and node, to the rank of the same number there, which fans it out
///                  inside its node and adds up what comes back
///   intra_first    first inside the node, one row per token and number of the destination ranks, then
///                  to their nodes: few large messages between nodes
///   intra_first_3  inside the node to the rank whose turn it is, from there one row per node, fanned
///                  out inside it: the rows of inter_first, spread over all links of a node
///   dense          every token to every rank, equal counts, no wait of the host
///   hdense         the same along the hops of inter_first
enum class ExchangeMethod : std::uint8_t {
  pair,
  flat,
  inter_first,
  intra_first,
  intra_first_3,
  dense,
  hdense
};
constexpr std::array<ExchangeMethod, 7> kExchangeMethods{ExchangeMethod::pair,
                                                         ExchangeMethod::flat,
                                                         ExchangeMethod::inter_first,
                                                         ExchangeMethod::intra_first,
                                                         ExchangeMethod::intra_first_3,
                                                         ExchangeMethod::dense,
                                                         ExchangeMethod::hdense};

const char* name(ExchangeMethod method) noexcept;
/// Throws UsageError for another text, with the names that there are.
ExchangeMethod exchange_method_from_name(const std::string& text);

HopList hops_of(ExchangeMethod method) noexcept;
/// Rows cross to another node in the hop before the last one, which fans them out there.
constexpr bool fans_out(ExchangeMethod m) noexcept {
  return m == ExchangeMethod::inter_first || m == ExchangeMethod::intra_first_3 ||
         m == ExchangeMethod::hdense;
}
/// All tokens go everywhere: what a rank sends does not depend on the routing.
constexpr bool is_dense(ExchangeMethod m) noexcept {
  return m == ExchangeMethod::dense || m == ExchangeMethod::hdense;
}

/// What a message between two ranks passes through.
enum class Link : std::uint8_t { self, node, network };
constexpr std::array<Link, 3> kLinks{Link::self, Link::node, Link::network};
const char* name(Link link) noexcept;

/// Ranks in nodes of equal size, node by node.
struct NodeGrid {
  int nodes = 1, per_node = 1;

  constexpr int ranks() const noexcept { return nodes * per_node; }
  constexpr int node_of(int rank) const noexcept { return rank / per_node; }
  constexpr int number_of(int rank) const noexcept { return rank % per_node; }
  constexpr Link link(int a, int b) const noexcept {
    return a == b ? Link::self : node_of(a) == node_of(b) ? Link::node : Link::network;
  }
  /// The rank to which `rank` hands the rows of a group in a hop of this kind.
  constexpr int peer(HopKind kind, int rank, int group) const noexcept {
    switch (kind) {
      case HopKind::owner:
        return group;
      case HopKind::node:
        return group * per_node + number_of(rank);
      case HopKind::local:
      case HopKind::proxy:
        break;
    }
    return node_of(rank) * per_node + group;
  }
  PlaceGrid places(int rank, std::int32_t places_per_rank) const noexcept {
    return {nodes, per_node, places_per_rank, rank};
  }
  bool operator==(const NodeGrid&) const = default;
};

/// Rows and bytes by Link.
struct Traffic {
  std::array<std::int64_t, 3> rows{}, bytes{};

  void add(Link link, std::int64_t n, std::int64_t row_bytes) noexcept {
    rows[static_cast<std::size_t>(link)] += n;
    bytes[static_cast<std::size_t>(link)] += n * row_bytes;
  }
  Traffic& operator+=(const Traffic& other) noexcept {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] += other.rows[i];
      bytes[i] += other.bytes[i];
    }
    return *this;
  }
  bool operator==(const Traffic&) const = default;
};

}  // namespace moesaic
