#pragma once
#include <array>
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic {

/// Where experts live: `nodes` x `per_node` owners, node by node, each with `places_per_owner` places
/// for an expert. Place p belongs to owner p / places_per_owner; owner o is number o % per_node of
/// node o / per_node. `owner` is the one that runs the op.
struct PlaceGrid {
  std::int32_t nodes = 1, per_node = 1, places_per_owner = 1;
  std::int32_t owner = 0;

  constexpr std::int32_t owners() const noexcept { return nodes * per_node; }
  constexpr std::int32_t places() const noexcept { return owners() * places_per_owner; }
  void check() const;
};

/// What the choices of a row have in common that travel together in one hop of an exchange:
///   owner  the owner of the place                                    (groups 0 … owners - 1)
///   node   its node                                                  (0 … nodes - 1)
///   local  its number within its node                                (0 … per_node - 1)
///   proxy  the number within this node of the owner that hands the row on: (row + node) % per_node
///          for another node, so that the rows of one owner leave through all of its node's links;
///          this owner itself for its own node                        (0 … per_node - 1)
enum class HopKind : std::uint8_t { owner, node, local, proxy };

constexpr std::int32_t num_groups(HopKind kind, const PlaceGrid& grid) noexcept {
  return kind == HopKind::owner  ? grid.owners()
         : kind == HopKind::node ? grid.nodes
                                 : grid.per_node;
}
/// The group of a place among num_groups(kind).
constexpr std::int32_t group_of(HopKind kind,
                                const PlaceGrid& grid,
                                std::int32_t place,
                                std::int64_t row) noexcept {
  const std::int32_t to = place / grid.places_per_owner, node = to / grid.per_node;
  switch (kind) {
    case HopKind::owner:
      return to;
    case HopKind::node:
      return node;
    case HopKind::local:
      return to % grid.per_node;
    case HopKind::proxy:
      break;
  }
  return node == grid.owner / grid.per_node
             ? grid.owner % grid.per_node
             : static_cast<std::int32_t>((row + node) % grid.per_node);
}

/// The hops of an exchange, at most three.
struct HopList {
  std::array<HopKind, 3> kind{};
  std::int32_t size = 0;
};
/// Elements that the first `hops` parts of ExchangeCounts take: g_1 + g_1 g_2 + …, g_i groups of hop i.
constexpr std::int64_t num_path_counts(const HopList& hops,
                                       const PlaceGrid& grid,
                                       int parts) noexcept {
  std::int64_t sum = 0, width = 1;
  for (int h = 0; h < parts; ++h) {
    width *= num_groups(hops.kind[static_cast<std::size_t>(h)], grid);
    sum += width;
  }
  return sum;
}

/// places[t, j] = place of the expert that token t chose, -1 where the choice was dropped.
///
///   places           [rows >= tokens, k] i32; -1 in the rows from `tokens` on
///   topk             [tokens, k] i32   experts 0 … experts - 1, or -1
///   kept             [tokens, k] u8    0 = dropped (ExpertCapacity); empty = all kept
///   place_of_expert  [experts] i32, each at most once; empty = expert e is at place e. Or [experts, turns]: an expert's copies
///                    have several places, and token t goes to the one in column t % turns
struct ExpertPlaces {
  static constexpr const char* kName = "expert_places";
  TensorView places{};
  ConstTensorView topk{};
  ConstTensorView kept{};
  ConstTensorView place_of_expert{};
  std::int32_t experts = 0;

  void check() const;
  OpCost cost() const;
};

/// Groups the choices of every row for one hop: groups[r, i] = the i-th smallest group that row r has a
/// choice in, -1 beyond the last; index[r, j] = i of choice j, -1 for a dropped one.
///
///   groups, index  [rows, k] i32;  places [rows, k] i32, -1 = dropped;  k <= kMaxChoices
///   per_choice     every choice is on its own: groups[r, j] = its group, index[r, j] = j
///   stride > 0     groups holds g * stride + r in place of g: the position of row r in blocks of
///                  `stride` rows that all rows of this owner have in every group
///
/// Rows are numbered from 0 for HopKind::proxy.
struct ExchangeGroups {
  static constexpr const char* kName = "exchange_groups";
  static constexpr std::int64_t kMaxChoices = 64;
  TensorView groups{};
  TensorView index{};
  ConstTensorView places{};
  PlaceGrid grid{};
  HopKind kind = HopKind::owner;
  bool per_choice = false;
  std::int64_t stride = 0;

  void check() const;
  OpCost cost() const;
};

/// How many rows leave this owner's tokens, path by path. For every hop h = 1 … hops.size and every path
/// (a_1, …, a_h) of groups, row-major and hop after hop: the number of rows with a choice whose groups of hops
/// 1 … h are this path (per_choice: the number of such choices). Then, for every owner, the number of choices that it
/// gets. Without hops these alone.
///
///   counts  [num_path_counts(hops, grid, hops.size) + owners] i32;  places [rows, k] i32, -1 = dropped
struct ExchangeCounts {
  static constexpr const char* kName = "exchange_counts";
  TensorView counts{};
  ConstTensorView places{};
  PlaceGrid grid{};
  HopList hops{};
  bool per_choice = false;

  void check() const;
  OpCost cost() const;
};

/// The choices that travel with the rows of a hop. Item i is row src[i]; it takes the choices j of its row that
/// belong to it, to_item[src[i], index[src[i], j]] = first + i, and of these the ones with keep_begin <= place <
/// keep_end:
///
///   places_out [i, j] = that place (modulo places_per_owner with `localise`: the number of the expert at its owner);  -1
///   weights_out[i, j] = weights[src[i], j];                                                                     else 0
///
///   places_out [items, k] i32, weights_out [items, k] f64 | f32
///   places [rows, k] i32, weights [rows, k] the type of weights_out
///   src [items] i32;  to_item, index [rows, k] i32;  all three empty: item i is row i with all of its choices
struct ExchangeChoices {
  static constexpr const char* kName = "exchange_choices";
  TensorView places_out{};
  TensorView weights_out{};
  ConstTensorView places{};
  ConstTensorView weights{};
  ConstTensorView src{};
  ConstTensorView to_item{};
  ConstTensorView index{};
  std::int64_t first = 0;
  std::int32_t keep_begin = 0, keep_end = 0;
  std::int32_t places_per_owner = 1;
  bool localise = false;

  void check() const;
  OpCost cost() const;
};

/// sum[0] = the sum modulo 2^64 of checksum_term(i, byte i) over the bytes of x, in any order: equal for equal bytes, and
/// for others with probability 2^-64.
///
///   sum one i64 element;  x any type and shape
struct ByteChecksum {
  static constexpr const char* kName = "byte_checksum";
  TensorView sum{};
  ConstTensorView x{};

  void check() const;
  OpCost cost() const;
};
constexpr std::uint64_t checksum_term(std::uint64_t index, std::uint8_t byte) noexcept {
  // The finaliser of SplitMix64, a bijection of 64 bits.
  std::uint64_t z = (index << 8 | byte) + 0x9E3779B97F4A7C15ULL;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

void launch(CpuContext& context, const ByteChecksum& op);
void launch(CpuContext& context, const ExpertPlaces& op);
void launch(CpuContext& context, const ExchangeGroups& op);
void launch(CpuContext& context, const ExchangeCounts& op);
void launch(CpuContext& context, const ExchangeChoices& op);
void launch(CudaContext& context, const ByteChecksum& op);
void launch(CudaContext& context, const ExpertPlaces& op);
void launch(CudaContext& context, const ExchangeGroups& op);
void launch(CudaContext& context, const ExchangeCounts& op);
void launch(CudaContext& context, const ExchangeChoices& op);

}  // namespace moesaic
