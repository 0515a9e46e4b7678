#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// The gated delta rule in its chunk-parallel form. Per head and document, with the state S [K, V]
/// (SPEC 1.1, 1.4):
///
///   S~ = diag(e^{g_t}) S_{t-1};  u_t = beta_t (v_t - S~^T k_t);  S_t = S~ + k_t u_t^T;  o_t =
///   S_t^T q_t
///
///   q, k        [T, H, K]     f64 | f32 | bf16; normalised, q scaled by K^-1/2
///   v, o        [T, H, V]     the same type
///   g           [T, H, K]     acc_t; log decay, <= 0, any size
///   beta        [T, H]        acc_t
///   s0          [N, H, K, V]  acc_t; initial states; empty = zeros. [1, H, K, V]: of the first document, others zero
///   s_final     [N, H, K, V]  acc_t; empty = not wanted; may alias s0. [1, H, K, V]: of the last document; then, with several documents,
///                               no aliasing
///   cu_seqlens  [N+1] i32     document boundaries; a document without tokens passes its state
///   through saved       [kda_saved_numel(...)] acc_t; empty = backward recomputes it (about one
///   more forward)
///
/// All products of decays are products of numbers <= 1 (no exponential of a positive number, no
/// difference of cumulative sums), so any gate is safe. g below -87 (f32; f64: -708), where e^g is
/// no normal number, counts as minus infinity: the state is forgotten. Contract: a document's bits
/// depend on its own tokens only, an output's bits on no later token, and on no thread count.
/// Temporaries in acc_t, one set per thread. Source: SPEC 1.4 - 1.6.
struct KdaChunkForward {
  static constexpr const char* kName = "kda_chunk_forward";
  TensorView o;
  TensorView s_final = {};
  TensorView saved = {};
  ConstTensorView q;
  ConstTensorView k;
  ConstTensorView v;
  ConstTensorView g;
  ConstTensorView beta;
  ConstTensorView s0 = {};
  ConstTensorView cu_seqlens;
  int chunk_size = 64;  ///< 16, 32, 48 or 64

  void check() const;
  OpCost cost() const;
};

/// Gradients of KdaChunkForward (SPEC 1.7).
///
///   d_o         [T, H, V]     type of q
///   ds_final    [N, H, K, V]  acc_t; empty = zeros. [1, H, K, V]: of the last document, others zero
///   saved       what forward wrote with the same chunk_size, or empty
///   dq, dk, dv  types and shapes of q, k, v; dg, dbeta, ds0 acc_t; all overwritten; ds0 empty =
///   not wanted, [1, H, K, V]: of the first document. dv may alias d_o; ds0 may alias ds_final of its shape when that is
///   [N, H, K, V]; no other aliasing.
///
/// dg is 0 where g < -20 (f32; f64: -45): it is at most e^g times the terms of its sum, less than
/// their rounding errors.
///
/// Temporaries: without `saved`, the chunk-entry states and triangular matrices of one document per
/// thread; on CUDA those of all tokens (kernels/cuda/kda_chunk.cu has the bytes).
struct KdaChunkBackward {
  static constexpr const char* kName = "kda_chunk_backward";
  TensorView dq;
  TensorView dk;
  TensorView dv;
  TensorView dg;
  TensorView dbeta;
  TensorView ds0 = {};
  ConstTensorView d_o;
  ConstTensorView ds_final = {};
  ConstTensorView q;
  ConstTensorView k;
  ConstTensorView v;
  ConstTensorView g;
  ConstTensorView beta;
  ConstTensorView s0 = {};
  ConstTensorView saved = {};
  ConstTensorView cu_seqlens;
  int chunk_size = 64;

  void check() const;
  OpCost cost() const;
};

/// One token of each of N sequences by the recurrence (generation).
///
///   q, k [N, H, K]; v, o [N, H, V]; g [N, H, K], beta [N, H] acc_t
///   s_in, s_out [N, H, K, V] acc_t; s_out may alias s_in
struct KdaStep {
  static constexpr const char* kName = "kda_step";
  TensorView o;
  TensorView s_out;
  ConstTensorView q;
  ConstTensorView k;
  ConstTensorView v;
  ConstTensorView g;
  ConstTensorView beta;
  ConstTensorView s_in;

  void check() const;
  OpCost cost() const;
};

/// Elements of `saved`: per chunk and head the entry state, the corrections and the triangular
/// matrices. How they lie in it is up to the backend, and to the kernel it takes for these sizes: `saved` is for the
/// backward of the same op on the same device only. K and V are rounded up to multiples of 8. K = V = 64, chunk 64, f32: 1152 bytes per
/// token and head; K = V = 128: 2208.
std::int64_t kda_saved_numel(std::int64_t tokens,
                             std::int64_t documents,
                             std::int64_t heads,
                             std::int64_t key_dim,
                             std::int64_t value_dim,
                             int chunk_size);

void launch(CpuContext& context, const KdaChunkForward& op);
void launch(CpuContext& context, const KdaChunkBackward& op);
void launch(CpuContext& context, const KdaStep& op);
void launch(CudaContext& context, const KdaChunkForward& op);
void launch(CudaContext& context, const KdaChunkBackward& op);
void launch(CudaContext& context, const KdaStep& op);

}  // namespace moesaic
