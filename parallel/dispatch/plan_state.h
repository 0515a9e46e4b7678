#pragma once
// What a plan holds, for the sources of ExpertExchange only.
#include "parallel/dispatch/exchange.h"

namespace moesaic {

/// Rows that follow each other, to or from another rank.
struct RowRun {
  int peer = 0;
  std::int64_t rows = 0;
  std::int64_t first = 0;  ///< where they are, or land
  std::int64_t home = 0;   ///< where they land again when they come back, of rows that are sent
};

/// What one call moves here. Between two ranks both sides have the same runs, in the same order.
struct Transfer {
  std::vector<RowRun> sends, receives;
  /// The way back: what was received is sent to where it came from.
  Transfer reversed() const;
  std::int64_t received() const;
};

/// Rows of one sender that follow each other at the rank that gets them: those of one part of its rows (see Arrival).
struct Lane {
  int peer = 0, part = 0;
  std::int64_t rows = 0;
  std::int64_t earlier = 0;  ///< of the rows that the receiver gets in this hop
  std::int64_t first =
      0;  ///< of rows that are sent: in the list of items; in the rows for dense methods
  std::int64_t home = 0;  ///< of rows that are sent: in what comes back, where to_item points
  // Of the hop between nodes, when it goes with the passes of the last one: the first and the last pass in which a rank of
  // the receiving node gets rows of this part.
  int needed = 0, spent = 0;
};

/// One hop of a plan as this rank sees it.
struct PlanHop {
  // --- on the device; rows are those at this rank before the hop
  TensorView places;   ///< [rows, k] i32, -1 = not through here
  TensorView weights;  ///< [rows, k]; of hop 0 the caller's
  TensorView index;    ///< [rows, k] i32: which of the row's items a choice belongs to
  TensorView to_item;  ///< [rows, k] i32: the row's items, by ascending destination; -1 = no more
  TensorView
      src;  ///< [items] i32: the row of an item; items by destination, then by row. Not in dense methods
  TensorView
      offsets;  ///< [groups + 1] i32: where the items of a destination start. Not in dense methods
  // --- on the host, once the plan is finished; by rank
  std::int64_t rows = 0, items = 0, received = 0;
  std::vector<std::int64_t> send_rows;  ///< by this rank
  std::vector<std::int64_t> sent_to;    ///< by all ranks
  std::vector<Lane> sends;              ///< by destination, for each in the order of its rows there
  std::vector<Lane> receives;           ///< in the order of their rows here
  bool one_sender = false;  ///< of every part of the rows: its runs follow each other on both sides
};

/// Rows of one part from one sender, in the order in which all that a rank gets in a hop comes. Without HopTable::lots: one
/// part, from the rank itself, from the next one, …, round to the one before. Where rows fan out behind the hop between
/// nodes: first the part of this node, then the lots of the next one, …, round to the node before; each part from the
/// rank itself and the others of its node in turn.
struct Arrival {
  int part = 0, from = 0;
  std::int64_t rows = 0;
};
std::vector<Arrival> arrivals_of(const HopTable& table,
                                 const NodeGrid& grid,
                                 std::size_t hop,
                                 int to);

struct ExchangePlan::Impl {
  Routing routing;
  std::int64_t tokens = 0;
  std::vector<PlanHop> hops;
  TensorView counts,
      all_counts;  ///< i32 [n], [ranks, n] on the device: of paths, then of experts, if at all
  std::vector<std::int64_t> expert_rows;  ///< by number here; empty while unknown
  Buffer host_counts;
  Event counted;
  int passes = 1;
  bool finished = false;
  std::string label;

  Impl(Device device, std::string name) : counted(device), label(std::move(name)) {}
};

/// What moves in one pass of the last hop: an equal part of what every rank gets, the next rows in their order there. So any
/// number of passes brings the same rows in the same order, and in every pass each rank sends to other ranks than its
/// neighbours do.
Transfer pass_of(const PlanHop& hop, int pass, int passes);

/// Sets Lane::needed and Lane::spent of the hop before the last one, which fans out, to passes of `passes`.
void set_steps(PlanHop& hop, const HopTable& table, const NodeGrid& grid, int rank, int passes);
/// What of that hop moves with a pass: the parts that are needed first, or spent, in it. Rows land where they would all at
/// once. Parts are needed and spent in their order.
Transfer step_of(const PlanHop& hop, int pass, int Lane::*when);

/// The least number of passes, at least `passes`, in which no rank gets more than `rows` rows in one, and none more
/// than `copies` choices, as far as `choices` per row tell.
int passes_for(const HopTable& table,
               std::int64_t rows,
               std::int64_t copies,
               std::int64_t choices,
               int passes);

/// Cuts a plan's memory into the device tensors of its hops. With empty memory it only measures.
class PlanMemory {
 public:
  explicit PlanMemory(TensorView memory) : memory_(memory) {}
  TensorView take(Shape shape, DType dtype);
  std::int64_t bytes() const noexcept { return used_; }

 private:
  TensorView memory_;
  std::int64_t used_ = 0;
};

}  // namespace moesaic
