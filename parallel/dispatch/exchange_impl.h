#pragma once
// The steps of ExpertExchange, for its sources only.
#include <optional>

#include "parallel/dispatch/plan_state.h"

namespace moesaic {

/// Whether an exchange of these options has the hop between nodes go with its chunks.
bool comes_in_steps(const ExchangeOptions& options) noexcept;

struct ExpertExchange::Impl {
  Communicator* group;
  ExchangeOptions options;
  HopList hops;
  int rank;
  std::int32_t places_per_rank;
  ExchangeBounds bounds;
  ExchangeStatistics statistics;
  Backend* side = nullptr;
  std::optional<Event> departed, arrived;
  bool is_away = false;  // something without a number is under way on the side
  struct Landing {
    Event event;
    bool is_awaited = false;
  };
  std::vector<Landing> landings;  // by number; empty without a side
  ExchangeMeter* meter = nullptr;
  int calls = 0;  // in progress

  Impl(Communicator* group, const ExchangeOptions& options, const ExchangeBounds& bounds);

  bool dense() const { return is_dense(options.method); }
  /// Also where there is no group, on dry streams, which measure what that takes.
  bool verifies() const { return options.verify && options.grid.ranks() > 1; }
  PlaceGrid places() const { return options.grid.places(rank, places_per_rank); }
  std::size_t last() const { return static_cast<std::size_t>(hops.size - 1); }
  /// Whether the hop between nodes goes with the passes of the last hop, where a plan has no more passes than chunks.
  bool steps() const { return comes_in_steps(options); }
  /// A dry run, which has more passes, must take the memory of both ways.
  bool in_steps(const ExchangePlan::Impl& plan, Backend& backend) const;
  /// Whether the rows before the hop between nodes are needed longer than enter() takes, and are not the caller's.
  bool keeps_before(RowFormat format) const {
    return steps() && (format != RowFormat::plain || last() > 1);
  }
  /// Runs of rows from one rank to another in one move, at most.
  std::int64_t most_runs() const;
  /// Counts that a rank sends to all: num_counts() of them are about hops, the others about experts.
  std::int64_t counts_per_rank() const;
  /// Rows before a hop, and rows that it sends, at most.
  std::int64_t most(std::size_t hop) const;
  std::int64_t most_sent(std::size_t hop) const;
  /// Whether more can come than the buffers hold.
  bool limited() const;
  /// `stream` waits for the event, as time of an exchange that its work is not beside.
  void wait(const ExchangePlan::Impl& plan, ExchangeWay way, Stream& stream, const Event& event);
  static ExchangePlan::Impl& finished(const ExchangePlan& plan);

  /// Sets the device tensors of a plan to parts of `memory`; returns the bytes that they take.
  std::int64_t lay_out(ExchangePlan::Impl& plan, TensorView memory) const;
  /// Which of `rows` rows goes where in a hop, from their places.
  void sort_items(PlanHop& hop, std::size_t h, std::int64_t rows, Backend& backend) const;
  /// Counts this rank's rows, gathers the counts of all ranks and starts their way to the host.
  void gather_counts(ExchangePlan::Impl& plan, Backend& backend);
  /// Waits for them, unless the method is dense; also learns how many rows experts here get.
  HopTable table_of(ExchangePlan::Impl& plan, Backend& backend) const;
  void set_rows(PlanHop& hop, const HopTable& table, std::size_t h) const;

  struct Piece {
    TensorView out;
    ConstTensorView in;
    const char* what;
  };
  /// What is under way, for messages.
  struct Place {
    std::string label, hop;
  } place;
  /// Measures a call from its construction to its end; calls inside of calls belong to those.
  class Measured {
   public:
    Measured(Impl& self, const ExchangePlan::Impl& plan, ExchangeWay way, Backend& backend);
    ~Measured();
    Measured(const Measured&) = delete;
    Measured& operator=(const Measured&) = delete;

   private:
    Impl& self_;
    const std::string& label_;
    ExchangeWay way_;
    Stream& stream_;
    bool is_outermost_;
    Traffic before_;
    std::size_t span_ = 0;
  };
  /// Names it: set at the start of every call.
  void be_at(const ExchangePlan::Impl& plan, const char* what, std::size_t hop);
  /// Moves rows of all pieces at once; those for this rank itself are copied, unless `own_is_there`.
  void move(Backend& backend,
            const std::vector<Piece>& pieces,
            const Transfer& plan,
            Traffic& traffic,
            bool own_is_there = false);
  /// Compares the counts of every rank with the checksum that it made of them; waits.
  void verify_counts(const ExchangePlan::Impl& plan, Backend& backend);
  /// Compares checksums of all messages of a move with those of their senders; waits.
  void verify(Backend& backend, const std::vector<Piece>& pieces, const Transfer& plan);
  /// out = the rows of `in` [hop.rows, width] that come here in a pass of the hop, for all pieces at once.
  void send_rows(const PlanHop& hop,
                 Backend& backend,
                 const Transfer& plan,
                 const std::vector<Piece>& pieces);
  /// The places and weights of these rows. `weights` are those of the rows before the hop.
  void send_choices(const PlanHop& hop,
                    std::size_t h,
                    Backend& backend,
                    ConstTensorView weights,
                    const Transfer& plan,
                    TensorView places_in,
                    TensorView weights_in);
  /// Memory for `rows` rows in a format, in parts of `memory`.
  struct RowMemory {
    RowFormat format = RowFormat::plain;
    TensorView rows, codes, scales;
    EnteredRows entered() const {
      return {.format = format, .rows = rows, .codes = codes, .scales = scales, .next = {}};
    }
  };
  static RowMemory row_memory(
      PlanMemory& memory, std::int64_t rows, std::int64_t width, DType dtype, RowFormat format);
  static RowMemory row_memory(
      Arena& scratch, std::int64_t rows, std::int64_t width, DType dtype, RowFormat format);
  /// `to` = the rows of `from` that come here in a pass of the hop.
  void send_rows(const PlanHop& hop,
                 Backend& backend,
                 const Transfer& plan,
                 const EnteredRows& from,
                 const RowMemory& to);
  /// The way back of what `there` brought: rows to where they came from, each to its place in `returned` [items, width].
  void send_back(Backend& backend,
                 const Transfer& there,
                 TensorView returned,
                 ConstTensorView rows);
  /// Between nodes, what a pass of the last hop needs first: `to` = more of the rows of `from`.
  void step_across(const ExchangePlan::Impl& plan,
                   Backend& backend,
                   int pass,
                   const EnteredRows& from,
                   const RowMemory& to);
  /// And back, what it was the last to need, added up.
  void step_back(const ExchangePlan::Impl& plan, Backend& backend, int pass, TensorView returned);
  /// Of memory for what comes back, the parts of the last hop and of the one between nodes.
  TensorView returned_last(TensorView returned) const {
    return returned.rows(0, most_sent(last()));
  }
  TensorView returned_across(TensorView returned) const {
    return returned.rows(most_sent(last()), returned.dim(0));
  }
  /// sums = of the rows before the hop from `first` on, the rows that came back for each, ascending by destination.
  void add_up(const PlanHop& hop,
              Backend& backend,
              TensorView sums,
              ConstTensorView returned,
              std::int64_t first = 0) const;
  /// x, with rows of no meaning up to max_tokens in the dense methods, which send so many.
  ConstTensorView padded(Backend& backend, ConstTensorView x) const;
};

}  // namespace moesaic
