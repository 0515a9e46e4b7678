#pragma once
#include <vector>

#include "kernels/ops/op.h"

namespace moesaic {

/// Attention over depth (SPEC 6.1): per token, score_i = sum_c query_c RMSNorm(v_i; norm, eps)_c, p = softmax(score),
/// h = sum_i p_i v_i.
///
///   sources      1 .. n views [tokens, d], one type: f64 | f32 | bf16; their order is the order of p
///   query, norm  [d]           one type: that of the sources or acc_t
///   h            [tokens, d]   type of the sources; may not alias a source
///   p            [tokens, n]   acc_t, saved for backward
///
/// Statistics, scores, softmax and mix in acc_t.
struct AttnResForward {
  static constexpr const char* kName = "attn_res_forward";
  TensorView h{};
  TensorView p{};
  std::vector<ConstTensorView> sources;
  ConstTensorView query{};
  ConstTensorView norm{};
  double eps = 1e-5;

  void check() const;
  OpCost cost() const;
};

/// Gradients of AttnResForward (SPEC 6.4); nothing but p is needed from the forward pass.
///
///   dsources       n views [tokens, d], each of the type of the sources or of acc_t; each ACCUMULATES, an empty view is skipped
///   dquery, dnorm  [d] acc_t; accumulate; both or neither; empty = frozen; summed over fixed blocks of tokens
///   dh             [tokens, d] type of the sources
struct AttnResBackward {
  static constexpr const char* kName = "attn_res_backward";
  std::vector<TensorView> dsources;
  TensorView dquery{};
  TensorView dnorm{};
  ConstTensorView dh{};
  ConstTensorView p{};
  std::vector<ConstTensorView> sources;
  ConstTensorView query{};
  ConstTensorView norm{};
  double eps = 1e-5;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const AttnResForward& op);
void launch(CpuContext& context, const AttnResBackward& op);
void launch(CudaContext& context, const AttnResForward& op);
void launch(CudaContext& context, const AttnResBackward& op);

}  // namespace moesaic
