#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "kernels/ops/op.h"
#include "memory/buffer.h"
#include "memory/stream.h"
#include "parallel/dispatch/exchange_meter.h"
#include "parallel/dispatch/hop_table.h"
#include "parallel/dispatch/method.h"

namespace moesaic {

/// What an ExpertExchange is made for; the same on all ranks of its group.
struct ExchangeOptions {
  ExchangeMethod method = ExchangeMethod::flat;
  NodeGrid grid;
  std::int64_t experts = 0;  ///< of all ranks, a multiple of their number
  std::int32_t replicas =
      0;  ///< slots of a rank for copies of experts, behind its own (ExpertCopies)
  std::int64_t choices = 0;     ///< per token (k)
  std::int64_t max_tokens = 0;  ///< of any rank
  DType weights = DType::f32;   ///< the statistics type
  /// Rows that a rank's buffers hold, as a multiple of what it gets on average when all experts are chosen equally often;
  /// 0 = what it can get at most. With fewer rows than come, an exchange takes several passes. The dense methods do not count
  /// what comes: theirs always hold the most.
  double buffer_factor = 0;
  /// Passes that every plan has at least, each with an equal part of the rows that a rank gets, so that some of them can move
  /// while the experts work at others. The buffers of a pass hold as much less; further passes are those beyond.
  /// Where rows cross to another node before they are fanned out there (fans_out()), they cross with the chunks too, while
  /// a plan has no further passes.
  int chunks = 1;
  /// Plans know how many rows each expert here gets: as many counts more are gathered. The dense methods count nothing.
  bool count_experts = false;
  /// Every message, counts too, is checked by a checksum that its sender made; a damaged one is an InternalError that names
  /// the plan's label, the hop, both ranks and what it held. For looking for faults of network and libraries: the host waits in
  /// each exchange.
  bool verify = false;
};

/// Sizes of the memory that callers provide.
struct ExchangeBounds {
  std::int64_t rows = 0;    ///< of tokens at the experts, per pass
  std::int64_t copies = 0;  ///< of tokens and experts there, per pass (rows for DispatchPlan)
  std::int64_t returned_rows =
      0;  ///< of combine(): what comes back in the last hop, then in the one that goes with chunks
  std::int64_t plan_bytes = 0;  ///< of an ExchangePlan on the device
};

/// How rows travel in dispatch.
///   plain  as they are
///   fp8    E4M3 codes with a scale per 128 elements (QuantizeFp8Block, 1 x 128), made once at the source; every hop moves
///          them as they are, and the rows at the experts are code x scale
enum class RowFormat : std::uint8_t { plain, fp8 };
const char* name(RowFormat format) noexcept;

/// Rows before the last hop, or the one before, as dispatch() takes them; made by ExpertExchange::enter().
struct EnteredRows {
  RowFormat format = RowFormat::plain;
  ConstTensorView rows;           ///< plain
  ConstTensorView codes, scales;  ///< fp8
  /// Where they are before the last hop, if not yet: the hop between nodes then goes with the passes, each of which brings
  /// what it is the first to need.
  struct Next {
    TensorView rows, codes, scales;
  } next{};
  bool goes_on() const { return !next.rows.empty() || !next.codes.empty(); }
};

/// What one ExpertExchange did so far, counted on the host from the plans.
struct ExchangeStatistics {
  std::int64_t plans = 0;
  std::int64_t further_passes = 0;  ///< beyond the chunks of each plan
  Traffic rows;                     ///< of dispatch and combine, sent by this rank
  Traffic choices;                  ///< places and weights
  std::int64_t count_bytes = 0;     ///< of the all-gather of counts, sent by this rank
};

/// Where the tokens of a micro-batch go: made once in forward, used again by backward and recomputation. Memory on the
/// device is the caller's (plan_bytes); made by ExpertExchange::make_plan() before the first step, used for
/// any number of micro-batches, one at a time.
class ExchangePlan {
 public:
  ~ExchangePlan();
  ExchangePlan(ExchangePlan&&) noexcept;
  /// Times that dispatch() and combine() are called.
  int passes() const noexcept;
  /// Rows that come in a pass.
  std::int64_t rows(int pass = 0) const;
  /// Of every expert here, in all passes; empty without ExchangeOptions::count_experts and on dry streams.
  std::span<const std::int64_t> expert_rows() const;
  struct Impl;

 private:
  friend class ExpertExchange;
  explicit ExchangePlan(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// The choices of a rank's tokens.
struct Routing {
  ConstTensorView topk;     ///< [tokens, k] i32; -1 = none
  ConstTensorView weights;  ///< [tokens, k] statistics type
  ConstTensorView kept;     ///< [tokens, k] u8, 0 = dropped; may be empty
  /// [experts] i32: rank * (experts / ranks) + number there; empty = in order. With replicas [experts, turns] i32, as
  /// ExpertCopies::place_of_turn
  ConstTensorView place_of_expert;
};

/// Moves the tokens of the ranks of one group to the ranks of their experts, and results back:
///
///   forward   begin_plan  (counts; the caller may enqueue other work)  finish_plan
///             dispatch: x -> rows;  experts: rows -> partial results, summed over a row's experts;  combine: rows -> out
///   backward  dispatch: d out -> rows;  combine: d rows -> d x, and d weights
///
/// The experts' side is that of one rank: rows [bounds().rows, width], the numbers of its own experts
/// [rows, k] (-1 = not here), weights [rows, k], and the number of rows. out[t] = sum over the ranks of the token's
/// experts, ascending, of its partial rows, formed in the accumulation type and rounded once (with several hops: per
/// hop). Everything a rank sends and adds is a function of the choices of all ranks, in a fixed order.
///
/// All ranks of the group make the same calls in the same order; all calls enqueue on the backend's stream and return,
/// except finish_plan(), which waits for the counts of all ranks (never in the dense methods). Temporaries come from the
/// backend's scratch. Each hop is one call of Communicator::exchange.
class ExpertExchange {
 public:
  /// `group` may be null for a single rank, or on dry streams, which only measure. Blocks: all ranks compare their options; throws UsageError where they
  /// differ or do not fit (experts not divisible, a grid of another size).
  ExpertExchange(Communicator* group, const ExchangeOptions& options);
  ~ExpertExchange();
  ExpertExchange(const ExpertExchange&) = delete;
  ExpertExchange& operator=(const ExpertExchange&) = delete;

  const ExchangeOptions& options() const noexcept;
  const ExchangeBounds& bounds() const noexcept;
  const ExchangeStatistics& statistics() const noexcept;
  /// Passes that every plan has (ExchangeOptions::chunks).
  int chunks() const noexcept;
  /// Whether the buffers are smaller than what can come, so that a plan may have passes beyond its chunks. On a dry stream it
  /// then has one: what a further one takes is measured.
  bool may_take_passes() const noexcept;
  /// Allocates what a plan needs on the host. `label`: whose tokens it carries, for messages.
  ExchangePlan make_plan(Device device, const std::string& label = "") const;

  /// `memory` [plan_bytes] u8, 64-byte aligned, holds the plan as long as it is used. `routing` must stay valid as long.
  /// passes: at least so many.
  void begin_plan(ExchangePlan& plan,
                  Backend& backend,
                  TensorView memory,
                  const Routing& routing,
                  int passes = 1);
  void finish_plan(ExchangePlan& plan, Backend& backend);

  /// What comes with the rows of a pass: places at this rank and weights, [bounds().rows, k] each (-1 and 0 in the rows
  /// from row_count on), and row_count, one i32 element.
  void dispatch_choices(ExchangePlan& plan,
                        Backend& backend,
                        int pass,
                        TensorView topk_rows,
                        TensorView weights_rows,
                        TensorView row_count);

  // --- beside the experts' work
  /// A backend of its own for exchanges whose results are not needed at once; null: there is none. Must outlive the calls.
  void set_side(Backend* side);
  bool has_side() const noexcept;
  /// The backend for the next calls: the side, which begins when `main` has come to this point; without a side, `main`.
  /// Scratch of the side is its own; what else the calls read and write must not be touched by `main` before arrive().
  Backend& depart(Backend& main);
  /// Gives what went to the side so far a number below chunks(), so that it can be waited for alone.
  void note(int number);
  /// Later work of `main` waits for what has this number, once; does nothing when there is no such thing.
  void arrive(const ExchangePlan& plan, ExchangeWay way, Backend& main, int number);
  /// Later work of `main` waits for what went to the side since depart() and has no number, if anything did.
  void arrive(const ExchangePlan& plan, ExchangeWay way, Backend& main);
  /// Measures every call while it is on (ExchangeMeter::begin()); null: none.
  void set_meter(ExchangeMeter* meter);

  // --- one pass: everything at once
  /// rows [bounds().rows, width] = the rows of x [tokens, width] of all ranks for the experts here.
  void dispatch(ExchangePlan& plan,
                Backend& backend,
                TensorView rows,
                ConstTensorView x,
                RowFormat format = RowFormat::plain);
  /// out [tokens, width] = sums of partial rows [bounds().rows, width]; out may have the wider accumulation type.
  void combine(ExchangePlan& plan, Backend& backend, TensorView out, ConstTensorView rows);

  // --- any number of passes: enter, then for each pass dispatch, experts, combine, and leave at the end
  /// Bytes of memory that enter() takes for rows of this width and type; 0 when x itself can be read.
  std::int64_t transit_bytes(std::int64_t width, DType dtype, RowFormat format) const;
  /// All hops but the last, and but the one between nodes where that goes with the passes. `memory` [transit_bytes] u8 and x
  /// are needed until the last pass has been dispatched. Passes are dispatched in their order.
  EnteredRows enter(ExchangePlan& plan,
                    Backend& backend,
                    TensorView memory,
                    ConstTensorView x,
                    RowFormat format = RowFormat::plain);
  void dispatch(
      ExchangePlan& plan, Backend& backend, int pass, TensorView rows, const EnteredRows& from);
  /// returned [bounds().returned_rows, width]: what comes back in all passes. Where the hop between nodes goes with them,
  /// what a pass is the last to need is added up and crosses back at once; passes are combined in their order.
  void combine(
      ExchangePlan& plan, Backend& backend, int pass, TensorView returned, ConstTensorView rows);
  void leave(ExchangePlan& plan, Backend& backend, TensorView out, TensorView returned);

  /// Rows that one dispatch (or combine) of a finished plan sends from here, in all hops and passes.
  Traffic traffic(const ExchangePlan& plan, std::int64_t row_bytes) const;
  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
