#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// How the contributions of many queries to one key's gradient are added up on the CUDA backend.
///   integer        as 64-bit integers, in units of a power of two that is found anew in every call: the sums do not
///                  depend on the order, and cannot overflow (argument at SparseMlaBackward)
///   float_atomics  as floating-point numbers, in whatever order they arrive: half the memory traffic, other bits each time
enum class KeySums : std::uint8_t { integer, float_atomics };

/// Causal softmax attention of MLA over selected keys in the absorbed form: all heads share one row of keys per token,
/// kv = [c ; kr], whose first dc columns are the values too.
///
///   logit_h(t,s) = scale <q_h(t), kv(s)>,  s in selected[t], s <= t, same document
///   lse_h(t) = log sum_s exp(logit_h),     o_h(t) = sum_s exp(logit_h - lse_h) kv(s)[:dc]
///
///   q          [Tq, H, dc+dr]  compute type; [q_nope Wuk_h ; q_rope]
///   kv         [Tk, dc+dr]     compute type; latent c, then the rotated key shared by the heads
///   cu_seqlens [N+1] i32       document borders of the keys, as in AttentionForward
///   selected   [Tq, k] i32     global key indices, ascending, padded with -1; others than the visible ones are ignored
///   o          [Tq, H, dc]     compute type: it is the operand of the next product (o_h Wuv_h^T); must not alias an input
///   lse        [H, Tq]         statistics type; -inf and o = 0 for a row without keys
///   max_logit  [H]             statistics type, optional; as in AttentionForward
///
/// dc = o.dim(2). Tq < Tk: the queries are the last Tq rows. Softmax in the statistics type.
///
/// A query gathers its k rows of 2 (dc + dr) bytes once for all heads; with the keys and values of every head, as
/// AttentionForward has them, it would gather H times as much and share nothing with its neighbours. In return a pair
/// costs 2 (2 dc + dr) FLOP per head instead of 2 (dn + dr + dv): worth it for long documents, where few are selected.
/// Source: SPEC sections 2.2 (absorbed form) and 3.3.
struct SparseMlaForward {
  static constexpr const char* kName = "sparse_mla_forward";
  TensorView o;
  TensorView lse;
  TensorView max_logit;
  ConstTensorView q;
  ConstTensorView kv;
  ConstTensorView cu_seqlens;
  ConstTensorView selected;
  double scale = 1.0;
  bool accumulate_max = true;

  void check() const;
  OpCost cost() const;
};

/// p = exp(logit - lse), delta_h(t) = <do_h, o_h>, ds_h = p_h (<do_h, kv(s)[:dc]> - delta_h):
///   dq_h(t) = scale sum_s ds_h kv(s),   dkv(s) = sum_(t,h) [scale ds_h q_h(t) + p_h [do_h(t) ; 0]]
///
///   dq, dkv   shapes and types of q, kv; overwritten; must not alias inputs
///   d_o       [Tq, H, dc]  compute type
///   the rest as in SparseMlaForward; Tq < Tk: gradients of what these queries add
///
/// CPU: a key's sum is formed in the statistics type, queries in order.
/// CUDA with KeySums::integer: what query t adds to an element of dkv, summed over heads, is
///   |x_t| <= B_t = sum_h (scale max|q_h| (|do_h| V + |delta_h|) + max|do_h|),   V = max over s of |kv(s)[:dc]|,
/// because p_h <= 1 and |<do_h, kv(s)[:dc]>| <= |do_h| V. A pass over q, do, o and kv forms 2 sum_t B_t before the first
/// contribution is added, and the unit is the least power of two of which 2^62 reach it. So no sum can leave 64 bits,
/// whatever the order, and the same inputs give the same unit: nothing is kept from earlier steps, hence nothing must
/// be saved to resume. (A unit from the previous step's largest sum would be finer, but might overflow, and be state.)
/// The unit is some 2^-20 of a typical contribution at T = 64k and 96 heads, where bf16 results keep 2^-8. Each x_t is
/// compared with 2 B_t on its way; a larger one (inputs that are not finite, an lse that is not theirs) makes all of dkv
/// NaN, so that the step is skipped as any step with gradients that are not finite.
struct SparseMlaBackward {
  static constexpr const char* kName = "sparse_mla_backward";
  TensorView dq;
  TensorView dkv;
  ConstTensorView d_o;
  ConstTensorView o;
  ConstTensorView lse;
  ConstTensorView q;
  ConstTensorView kv;
  ConstTensorView cu_seqlens;
  ConstTensorView selected;
  double scale = 1.0;
  KeySums key_sums = KeySums::integer;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const SparseMlaForward& op);
void launch(CpuContext& context, const SparseMlaBackward& op);
/// Kernels: "plain" takes anything; "tiled", on tensor cores, bf16 with dc = 512, dr = 64, heads a multiple of 8 and
/// scale > 0: there probabilities and their gradients are rounded to bf16 as operands.
void launch(CudaContext& context, const SparseMlaForward& op);
void launch(CudaContext& context, const SparseMlaBackward& op);

}  // namespace moesaic
