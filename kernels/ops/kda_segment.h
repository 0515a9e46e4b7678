#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// Where a document is cut into pieces, each on a rank of its own: what a piece does to the recurrence of KdaChunkForward
/// is an affine map of its state, S_out = M S_in + E, and the gradients go back through its transpose,
/// dS_in = M^T dS_out + F. The three ops below form M, E and F from the tokens of a piece alone, and put together those of
/// several pieces. Source: SPEC 1.8.

/// M and E of the LAST document's tokens:
///
///   M = prod_t (I - beta_t k_t k_t^T) diag(e^{g_t}),   E = the state after them from S = 0
///
///   m           [H, K, K]  acc_t;  e [H, K, V] acc_t
///   k           [T, H, K]  f64 | f32 | bf16;  v [T, H, V] the same type
///   g [T, H, K], beta [T, H]  acc_t
///   cu_seqlens  [N+1] i32  document boundaries, N >= 1
///
/// By the recurrence, columns of [M | E] side by side: one column's bits depend on no other. A log decay below -87 (f64:
/// -708) counts as minus infinity, as in KdaChunkForward.
struct KdaSegmentMap {
  static constexpr const char* kName = "kda_segment_map";
  TensorView m;
  TensorView e;
  ConstTensorView k;
  ConstTensorView v;
  ConstTensorView g;
  ConstTensorView beta;
  ConstTensorView cu_seqlens;

  void check() const;
  OpCost cost() const;
};

/// F of the FIRST document's tokens: the gradient of the state before them when that of the state after them is 0.
///
///   f           [H, K, V]  acc_t
///   d_o         [T, H, V]  type of q
///   q, k        [T, H, K]  f64 | f32 | bf16, as in KdaChunkForward
///   g, beta, cu_seqlens as above
struct KdaSegmentGradient {
  static constexpr const char* kName = "kda_segment_gradient";
  TensorView f;
  ConstTensorView d_o;
  ConstTensorView q;
  ConstTensorView k;
  ConstTensorView g;
  ConstTensorView beta;
  ConstTensorView cu_seqlens;

  void check() const;
  OpCost cost() const;
};

/// A state through the n consecutive pieces of one document:
///
///   forward   S = E_0,      then S = M_i S + E_i      for i = 1 … n-1
///   reversed  S = E_{n-1},  then S = M_i^T S + E_i    for i = n-2 … 0
///
///   state       [H, K, V]     acc_t (f64 | f32); overwritten
///   m           [n, H, K, K]  the first (reversed: the last) is not read
///   e           [n, H, K, V]  n >= 1
struct KdaSegmentChain {
  static constexpr const char* kName = "kda_segment_chain";
  TensorView state;
  ConstTensorView m;
  ConstTensorView e;
  bool reversed = false;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const KdaSegmentMap& op);
void launch(CpuContext& context, const KdaSegmentGradient& op);
void launch(CpuContext& context, const KdaSegmentChain& op);
void launch(CudaContext& context, const KdaSegmentMap& op);
void launch(CudaContext& context, const KdaSegmentGradient& op);
void launch(CudaContext& context, const KdaSegmentChain& op);

}  // namespace moesaic
