#pragma once
#include <cstdint>

#include "kernels/ops/op.h"

namespace moesaic {

/// Largest k of the router ops.
constexpr int kMaxChoices = 128;
/// Largest num_groups of a group limit.
constexpr int kMaxGroups = 64;

enum class RouterScore : std::uint8_t { sigmoid, softmax };
enum class DropPolicy : std::uint8_t { prob, position };

/// s = sigmoid(logits) or softmax(logits);  topk = the k experts with the largest s + bias, best
/// first, equal values by the lower index;  weights_j = route_scale s_j / (sum over topk of s +
/// 1e-20), or route_scale s_j when not renormalised or k = 1.
///
///   logits, scores  [tokens, experts]  statistics type; scores are saved for backward; scores may
///   alias logits bias            [experts]          statistics type; acts on the choice only;
///   empty = 0 given           [tokens, k] i32    a choice to replay instead of making one; empty =
///   choose. May alias topk. topk            [tokens, k] i32 weights         [tokens, k] statistics
///   type cutoff          [tokens]           statistics type: the largest s + bias outside topk
///   (the (k+1)-th largest when
///                                      the op chose). Wants k < experts and no group limit; empty
///                                      = not wanted
///   counts          [experts] i32      assignments per expert before any capacity limit
///
/// Group limit: the experts form num_groups equal consecutive groups; only experts of the
/// topk_groups groups with the largest sum of their two largest s + bias may be chosen. A NaN score
/// counts as -infinity in the choice, so that topk always holds k different experts. Throws (in the
/// stream) when `given` holds no expert number. Source: SPEC 4.1; Kimi-K3 report eq. 13;
/// DeepSeek-V3 for groups.
struct RouterForward {
  static constexpr const char* kName = "router_forward";
  TensorView scores;
  TensorView topk;
  TensorView weights;
  TensorView cutoff;
  TensorView counts;
  ConstTensorView logits;
  ConstTensorView bias;
  ConstTensorView given;
  RouterScore score = RouterScore::sigmoid;
  int num_groups = 1;
  int topk_groups = 1;
  bool renormalize = true;
  double route_scale = 1.0;

  bool limits_groups() const { return num_groups > 1 && topk_groups < num_groups; }
  void check() const;
  OpCost cost() const;
};

/// kept[t, j] = 1 for the assignments that survive a limit of `capacity` per expert, else 0.
///
///   topk [tokens, k] i32;  weights [tokens, k] statistics type;  kept [tokens, k] u8
///
/// prob: the `capacity` largest weights of each expert survive, equal weights by the earlier token;
/// position: the first `capacity` tokens. Weights are not renormalised. Source: SPEC 5.4.
struct ExpertCapacity {
  static constexpr const char* kName = "expert_capacity";
  TensorView kept;
  ConstTensorView topk;
  ConstTensorView weights;
  std::int64_t num_experts = 0;
  std::int64_t capacity = 0;
  DropPolicy policy = DropPolicy::prob;

  void check() const;
  OpCost cost() const;
};

/// The auxiliary losses of a router, with p = s / sum of s per token and n = tokens of these
/// logits. A weight of zero turns a loss off, and its tensors may be empty.
///
///   sequence  w E / documents * sum over documents d of sum_j f_dj P_dj;  f_dj = share of the
///   assignments of d that
///             went to j, P_dj = mean over d of p_j; documents without tokens contribute nothing
///   switch    w E / tokens * sum_j f_j sum_t q_tj;  q = softmax(logits), f_j = share of j among
///   the first choices
///             of these n tokens
///   global    w E / tokens * sum_j frequency_j sum_t p_tj
///   z         w / tokens * sum_t (log sum_j e^logit_tj)^2
///
///   cu         [documents here + 1] i32  boundaries of the documents (sequence)
///   frequency  [experts] statistics type, a constant (global)
///   tokens, documents  one element each, f64 | f32 | i64 | i32: divisors that hold for the whole
///   step, so that the
///                      parts of a step add up
///
/// Gradients flow through p, q and the logarithm only. Source: SPEC 5.1.
struct RouterLosses {
  double sequence_weight = 0;
  double switch_weight = 0;
  double global_weight = 0;
  double z_weight = 0;
  ConstTensorView cu;
  ConstTensorView frequency;
  ConstTensorView tokens;
  ConstTensorView documents;

  bool any() const { return balances() || z_weight != 0; }
  bool balances() const { return sequence_weight != 0 || switch_weight != 0 || global_weight != 0; }
  void check(const ConstTensorView& scores) const;
};

/// balance_loss += the sequence, switch and global losses;  z_loss += the z loss (RouterLosses).
///
///   logits, scores [tokens, experts] statistics type;  topk [tokens, k] i32
///   balance_loss, z_loss  one element of the statistics type each; accumulate; empty = not wanted
///
/// Sums run over fixed blocks of 64 tokens, then over the blocks in order.
struct RouterLossForward {
  static constexpr const char* kName = "router_loss_forward";
  TensorView balance_loss;
  TensorView z_loss;
  ConstTensorView logits;
  ConstTensorView scores;
  ConstTensorView topk;
  RouterLosses losses;

  void check() const;
  OpCost cost() const;
};

/// dlogits = gradient of the weights and of the auxiliary losses with respect to the logits;
/// overwritten.
///
///   ds_j = (route_scale dw_j - sum_i dw_i w_i) / (sum over topk of s + 1e-20)  for the chosen, 0
///   elsewhere
///          (route_scale dw_j when not renormalised or k = 1), plus the losses' dL/ds
///   dlogits = ds s (1 - s)  for the sigmoid,  s (ds - sum_j ds_j s_j)  for softmax, plus
///   dL/dlogits
///
///   dlogits, scores [tokens, experts];  dweights, weights [tokens, k]   statistics type;  topk
///   [tokens, k] i32 logits    needed by the switch and z losses only; may be empty otherwise.
///   dlogits may alias scores or logits. dweights  must be 0 for dropped assignments
///   (RowWeightBackward writes it so) weights   as RouterForward wrote them
///
/// Source: SPEC 4.4 and 5.1.
struct RouterBackward {
  static constexpr const char* kName = "router_backward";
  TensorView dlogits;
  ConstTensorView dweights;
  ConstTensorView logits;
  ConstTensorView scores;
  ConstTensorView weights;
  ConstTensorView topk;
  RouterScore score = RouterScore::sigmoid;
  bool renormalize = true;
  double route_scale = 1.0;
  RouterLosses losses;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const RouterForward& op);
void launch(CpuContext& context, const ExpertCapacity& op);
void launch(CpuContext& context, const RouterLossForward& op);
void launch(CpuContext& context, const RouterBackward& op);
void launch(CudaContext& context, const RouterForward& op);
void launch(CudaContext& context, const ExpertCapacity& op);
void launch(CudaContext& context, const RouterLossForward& op);
void launch(CudaContext& context, const RouterBackward& op);

}  // namespace moesaic
