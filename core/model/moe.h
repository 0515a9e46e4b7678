#pragma once
#include <optional>

#include "core/model/mlp.h"
#include "core/model/options.h"
#include "core/nn/module.h"

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
/// projections stay with the token.
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

  // --- state of balancing, declared in the parameter store
  BufferId bias() const noexcept { return bias_; }
  BufferId counts() const noexcept { return counts_; }  ///< i64 [E], of the step
  BufferId histogram() const noexcept {
    return histogram_;
  }  ///< i32 [E, bins], of the step (quantile rule)
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
    ActId x, logits, scores, topk, weights, cutoff, counts, kept, offsets, row_of_assignment,
        token_of_row, z, xs, row_weight, gate_up, h, ye, u, u_inv_rms, un;
    // Along Axis::etp together.
    ActId all_topk, all_weights, all_kept, all_z, all_u;
    ActId all_x, shared;  // of the shared experts, along Axis::tp
    // Tokens at their experts: those of this rank, or what the exchange brought.
    ActId plan, here_topk, here_weights, here_count, here_z, here_u;
  };
  const Activations& activations() const noexcept { return a_; }
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
  void declare_exchange(TapeSpec& tape, const Bounds& bounds);
  void declare_sort(TapeSpec& tape);
  void declare_experts(TapeSpec& tape, std::int64_t tokens);
  void gate_and_activate(Tape& tape);
  void declare_output(TapeSpec& tape, const Bounds& bounds, ActId y);
  RouterLosses losses(Tape& tape) const;
  void count(Tape& tape);
  /// Sums over a token's rows, where its experts are.
  void combine_here(Tape& tape, TensorView u) const;
  ConstTensorView count_here(Tape& tape) const;
  ExchangePlan& plan_of(Tape& tape) const { return tape.host<ExchangePlan>(plan_); }
  TensorView backward_experts(Tape& tape, ConstTensorView du, TensorView dweights);
  void backward_exchange(Tape& tape, ConstTensorView du, TensorView dz, TensorView dweights);
  void backward_here(Tape& tape, ConstTensorView du, TensorView dz, TensorView dweights);
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
  std::int64_t expert_tokens_ = 0;                  // of the ranks along Axis::etp together
  std::int64_t tokens_here_ = 0, copies_here_ = 0;  // bounds, where the experts are
  HostId plan_;
  StorageId router_, w13_, w2_, latent_down_, latent_norm_, latent_up_;
  BufferId bias_, counts_, histogram_, frequency_;
  std::unique_ptr<GatedMlp> shared_;
  Activations a_;
  ConstTensorView given_;
  TensorView margins_, all_margins_;
  std::int64_t margin_rows_ = 0;
};

}  // namespace moesaic
