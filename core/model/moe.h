#pragma once
#include <optional>
#include <vector>

#include "core/model/expert_rows.h"
#include "core/model/mlp.h"
#include "core/model/options.h"
#include "core/nn/module.h"
#include "kernels/ops/grouped_gemm.h"

namespace moesaic {

/// Rows that each expert keeps of a micro-batch of `tokens` tokens; 0 = all (SPEC 5.4).
std::int64_t capacity_of(const MoeOptions& options, std::int64_t tokens);

/// Mixture of experts, plain or Stable LatentMoE (SPEC section 4), dropless unless a capacity is set:
///
///   logits = x W_r^T (statistics type), topk over sigma(logits) + bias,
///   u = sum_j w_j E_j(z),  z = x W_d^T (latent) or x,  y = RMSNorm(u) W_u^T (latent) or u,  plus shared experts
///
/// Routing is chosen once per micro-batch and saved; rows are sorted by expert, their number lives in tensors.
///
/// With expert parallelism (Bounds::exchange) a rank holds some of the experts: z travels to the ranks of its experts, which
/// sort the rows that came and form their part of u; the parts are added up where the token is. Routing, balancing and the
/// projections stay with the token. Rows may come in chunks (ExchangeOptions::chunks), each with activations of its own, so
/// that some travel while the experts work at others. Where the buffers of the exchange do not hold the rows of any routing it
/// may take further passes (ExchangeOptions::buffer_factor), which keep nothing and are computed again in backward, from z
/// where the token is and through the same plan.
///
/// With Axis::etp the inner width of the experts is split: the ranks along it gather their z and choices (Bounds::
/// expert_slices), all form their shares of u for all of them, and each receives the sum for its own tokens.
class MoeLayer : public Module {
 public:
  MoeLayer(ParameterStore& params, const std::string& prefix, const MoeOptions& options);
  void declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) override;
  void backward(Tape& tape, ConstTensorView dy, TensorView dx) override;

  bool takes_all_tokens() const override { return false; }

  const MoeOptions& options() const noexcept { return options_; }
  /// Of the layer, as the names of its parameters begin.
  std::string name() const { return prefix_.substr(0, prefix_.size() - 1); }

  // --- state of balancing, declared in the parameter store
  BufferId bias() const noexcept { return bias_; }
  BufferId counts() const noexcept { return counts_; }  ///< i64 [E], of the step
  BufferId histogram() const noexcept {
    return histogram_;
  }  ///< i32 [E, bins], of the step (quantile rule)
  /// Where the experts are.
  PlacesId places() const noexcept { return places_; }
  // With MoeOptions::place, for whoever places them:
  BufferId average_load() const noexcept { return average_load_; }  ///< [E]
  BufferId saved_places() const noexcept { return saved_places_; }  ///< i32 [E]
  BufferId copied_by() const noexcept { return copied_by_; }  ///< [E]; with MoeOptions::replicas
  BufferId frequency() const noexcept {
    return frequency_;
  }  ///< [E], of the previous step (global auxiliary loss)

  /// Memory for the margins of a step, which the exact quantile rule needs before forward: `own` [tokens of this rank,
  /// E] is a part of `all` [tokens of all ranks, E]. Micro-batches append to `own`; reset_margins() starts a step.
  void set_margins(TensorView own, TensorView all) {
    margins_ = own;
    all_margins_ = all;
  }
  void reset_margins() { margin_rows_ = 0; }
  ConstTensorView margins() const { return margins_; }
  TensorView all_margins() const { return all_margins_; }

  // --- activations, for tests and statistics
  struct Activations {
    ActId x, logits, scores, topk, weights, cutoff, counts, kept, z, u, u_inv_rms, un;
    // Along Axis::etp together.
    ActId all_topk, all_weights, all_kept, all_z, all_u;
    ActId all_x, shared;  // of the shared experts, along Axis::tp
    ActId plan;
    ActId returned;  // parts of u that came back, where they are more than one pass's
    /// Tokens at their experts: those of this rank, or what the exchange brought in one chunk.
    struct Here {
      ActId topk, weights, count, z, offsets, row_of_assignment, token_of_row, xs, gate_up, h, ye,
          u, sent;
    };
    std::vector<Here> here;
  };
  const Activations& activations() const noexcept { return a_; }
  /// Passes of the exchange beyond the chunks of each micro-batch, of all forward passes so far.
  std::int64_t further_passes() const noexcept { return further_passes_; }
  /// A choice to replay in the next forward passes, i32 [T, k]; empty = choose.
  void set_given(ConstTensorView given) { given_ = given; }

 private:
  void declare_experts_parameters(ParameterStore& params);
  bool knows_cutoff() const;
  void declare_capacity(TapeSpec& tape, std::int64_t all_tokens);
  void declare_gathered_choices(TapeSpec& tape);
  void declare_shared(TapeSpec& tape, const Bounds& bounds);
  void backward_shared(Tape& tape, ConstTensorView dy, TensorView dx);
  /// Whether a loss of the router is about more than single tokens, so that it is formed from all of a micro-batch.
  bool losses_need_all() const;
  struct AllRouting {
    ConstTensorView logits, scores, topk;
  };
  AllRouting all_routing(Tape& tape) const;
  ConstTensorView gathered(Tape& tape,
                           const TokenSlices& slices,
                           ConstTensorView own,
                           const char* tag) const;
  void declare_routing(TapeSpec& tape, std::int64_t tokens);
  std::int64_t first_token(const Tape& tape, std::int64_t tokens) const;
  void declare_expert_input(TapeSpec& tape, std::int64_t tokens);
  void declare_departure(TapeSpec& tape);
  void declare_arrival(TapeSpec& tape);
  void declare_dispatch(TapeSpec& tape);
  void declare_sort(TapeSpec& tape, std::size_t chunk);
  void declare_experts(TapeSpec& tape, std::size_t chunk);
  void declare_way_back(TapeSpec& tape, std::size_t chunk);
  void declare_output(TapeSpec& tape, const Bounds& bounds, ActId y);
  RouterLosses losses(Tape& tape) const;
  void count(Tape& tape);

  // --- where the experts are
  /// What came with the rows of a pass (without exchange: of all tokens), sorted by expert.
  struct SortedRows {
    ConstTensorView weights;  ///< [tokens here, k]
    ConstTensorView count;    ///< of tokens here; empty = all
    ConstTensorView offsets, row_of_assignment, token_of_row;
  };
  /// What backward needs of the experts' forward, expert by expert.
  struct ExpertInputs {
    ConstTensorView xs, gate_up;
  };
  /// A chunk in backward: what forward left, and gradients [tokens here, …] that come, and that go back.
  struct ChunkBackward {
    SortedRows sorted;
    ExpertInputs inputs;
    TensorView du, dz, dweights;
  };
  /// Memory of a further pass.
  struct PassMemory {
    TensorView topk, weights, count, offsets, row_of_assignment, token_of_row, xs;
  };
  std::int64_t experts_here() const;
  // The weights of experts here need not be on the device all at once, nor their gradients: products are formed for a run of
  // experts at a time, each with the offsets and slots of the run.
  ExpertRows& expert_rows(Tape& tape) const { return tape.host<ExpertRows>(expert_rows_); }
  bool counts_rows_here(Tape& tape) const;
  /// The use that the pass on the tape makes of the experts' weights, or of their gradients.
  struct ExpertVisit {
    std::shared_ptr<const std::vector<std::int64_t>> rows;
    MemberVisit visit;  ///< of these rows
  };
  ExpertVisit expert_visit(Tape& tape) const;
  /// Calls `work` with runs of experts and their part of `offsets`; MemberRun::slots are weights.
  using RunWork = std::function<void(const MemberRun& run, ConstTensorView offsets)>;
  void with_weights(Tape& tape,
                    StorageId weight,
                    ConstTensorView offsets,
                    const RunWork& work) const;
  /// Adds the gradient of `weight`, for which `op` still needs dw and slots; none while it is frozen.
  void add_weight_gradient(Tape& tape,
                           StorageId weight,
                           const GroupedLinearBackwardWeight& op) const;
  /// Whether the shared experts come before the others in forward, where the host may have something to wait for.
  bool shared_come_first() const { return exchange_ != nullptr || params_.wants_member_rows(); }
  std::int64_t row_width() const { return options_.latent > 0 ? options_.latent : options_.hidden; }
  /// Of a chunk, from the tape.
  SortedRows sorted_rows(Tape& tape, std::size_t chunk) const;
  ExpertInputs expert_inputs(Tape& tape, std::size_t chunk) const;
  /// rows as they arrive in fp8.
  void round_rows(Tape& tape, TensorView rounded, ConstTensorView rows) const;
  /// gate_up may be empty; without h it alone is formed.
  void gate_and_activate(Tape& tape,
                         TensorView h,
                         TensorView gate_up,
                         ConstTensorView xs,
                         ConstTensorView offsets) const;
  void down(Tape& tape, TensorView ye, ConstTensorView h, ConstTensorView offsets) const;
  /// u = sums over a token's rows.
  void combine_here(Tape& tape, TensorView u, ConstTensorView ye, const SortedRows& rows) const;
  /// Calls `done` once dz and dweights are enqueued, before a weight gradient that does not need them.
  void backward_here(Tape& tape,
                     const SortedRows& rows,
                     const ExpertInputs& from,
                     ConstTensorView du,
                     TensorView dz,
                     TensorView dweights,
                     const std::function<void()>& done);

  // --- the exchange
  /// Waits in the tape's stream for the rows of a chunk that travel beside it.
  void arrive(Tape& tape, std::size_t chunk) const {
    if (exchange_ == nullptr) return;
    exchange_->arrive(
        plan_of(tape), ExchangeWay::dispatch, tape.backend(), static_cast<int>(chunk));
  }
  ExchangePlan& plan_of(Tape& tape) const { return tape.host<ExchangePlan>(plan_); }
  EnteredRows enter(ExchangePlan& plan,
                    Backend& way,
                    Arena& memory,
                    ConstTensorView rows,
                    RowFormat format) const;
  void send_chunks(ExchangePlan& plan,
                   Backend& way,
                   const std::vector<TensorView>& to,
                   const EnteredRows& from) const;
  PassMemory pass_memory(Tape& tape, TensorView xs) const;
  SortedRows bring(
      Tape& tape, int pass, const PassMemory& to, TensorView landing, const EnteredRows& z) const;
  void further_passes(Tape& tape, TensorView returned, ConstTensorView all_z) const;
  void combine_exchanged(Tape& tape, TensorView u);
  TensorView backward_experts(Tape& tape, ConstTensorView du, TensorView dweights);
  /// From du [tokens, l] to dz; fills dweights. With experts elsewhere through backward_exchange().
  void backward_all(Tape& tape, ConstTensorView du, TensorView dz, TensorView dweights);
  void backward_exchange(Tape& tape, ConstTensorView du, TensorView dz, TensorView dweights);
  void backward_once(Tape& tape,
                     const ChunkBackward& only,
                     ConstTensorView du,
                     TensorView dz,
                     TensorView dweights);
  void backward_passes(Tape& tape,
                       const std::vector<ChunkBackward>& chunks,
                       ConstTensorView all_z,
                       ConstTensorView du,
                       TensorView dz,
                       TensorView dweights);

  void backward_router(Tape& tape, ConstTensorView dweights, TensorView dx);

  MoeOptions options_;         // inner: of this rank
  std::int64_t capacity_ = 0;  // of the micro-batches declared last; 0 = dropless
  std::string prefix_;
  Precision precision_;
  const ParameterStore& params_;
  // Of the micro-batches declared last.
  ExpertExchange* exchange_ = nullptr;
  const TokenSlices* slices_ = nullptr;
  const TokenSlices* batch_slices_ = nullptr;
  const TokenSlices* expert_slices_ = nullptr;
  std::int64_t pieces_ = 1;
  std::int64_t expert_tokens_ = 0;                  // of the ranks along Axis::etp together
  std::int64_t tokens_here_ = 0, copies_here_ = 0;  // bounds, where the experts are
  HostId plan_, expert_rows_;
  std::int64_t further_passes_ = 0;
  StorageId router_, w13_, w2_, latent_down_, latent_norm_, latent_up_;
  BufferId bias_, counts_, histogram_, frequency_, average_load_, saved_places_, copied_by_;
  PlacesId places_;
  std::unique_ptr<GatedMlp> shared_;
  Activations a_;
  ConstTensorView given_;
  TensorView margins_, all_margins_;
  std::int64_t margin_rows_ = 0;
};

}  // namespace moesaic
