#pragma once
// What a plan holds, for the sources of ExpertExchange only.
#include "parallel/dispatch/exchange.h"

namespace moesaic {

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
  std::vector<std::int64_t> send_rows, recv_rows;
  std::vector<std::int64_t> send_offset;    ///< in the list of items; in the rows for dense methods
  std::vector<std::int64_t> return_offset;  ///< in what comes back, where to_item points
  // The rows that rank p gets, in their order there: those of p itself, then of p + 1, …, round to p - 1.
  int rank = 0;                            ///< this one
  std::vector<std::int64_t> sent_to;       ///< by all ranks
  std::vector<std::int64_t> sent_earlier;  ///< of them, before those of this rank
};

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
/// neighbours do. `row_bytes` is left at 0.
AllToAllPlan pass_of(const PlanHop& hop, int pass, int passes);

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
