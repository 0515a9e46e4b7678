#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// How the CPU backend walks the (query, key) pairs of a document. Results agree to rounding.
///   dense  tiles of 64 x 64; with `selected`, entries outside the selection are masked and tiles
///   without a selected key
///          are skipped
///   rows   one query row at a time over exactly its keys: for few queries (decoding) and for a
///   selection that is short
///          next to the document
///   automatic  per document: rows when it has at most 8 query rows, or when `selected` is shorter
///   than 1/16 of its keys
///          (16 k < keys; measured break-even between 1/8 and 1/16); else dense
enum class AttentionPath : std::uint8_t { automatic, dense, rows };

/// Causal softmax attention inside documents, with one key part per head and one shared by all
/// heads:
///
///   k_h(s) = [kn_h(s) ; kr(s)],   logit_h(t,s) = scale <q_h(t), k_h(s)>,   s <= t, same document
///   (, s in selected[t]) lse_h(t) = log sum_s exp(logit_h),   o_h(t) = sum_s exp(logit_h - lse_h)
///   v_h(s)
///
///   q          [Tq, H, dn+dr]   compute type
///   kvb        [Tk, H, dn+dv]   compute type; per head the key part kn, then the value v (the
///   product of kv_b_proj) kr         [Tk, dr]         compute type; empty when dr = 0 cu_seqlens
///   [N+1] i32        document borders of the keys, 0 = c_0 <= … <= c_N = Tk; empty documents
///   allowed selected   [Tq, k] i32      optional: global key indices, ascending, padded with -1;
///   others than the visible ones
///                               (s <= t, same document) are ignored
///   o          [Tq, H, dv]      statistics type (K3 keeps the attention output in f32); must not
///   alias an input lse        [H, Tq]          statistics type; -inf and o = 0 for a row without
///   keys max_logit  [H]              statistics type; largest scaled visible logit; optional.
///   Combined by max with what it
///                               holds when accumulate_max, so that micro-batches combine (start
///                               from -inf); else overwritten
///
/// dn, dr and dv follow from the shapes: dv = o.dim(2), dn = kvb.dim(2) - dv, dr = q.dim(2) - dn.
/// Decoding: Tq < Tk is allowed; the queries are then the last Tq rows (query i stands at position
/// Tk - Tq + i), and kvb, kr are the cached rows of all positions so far, cu_seqlens = {0, Tk}.
/// Softmax in the statistics type. A document's results do not depend on the documents around it
/// (bitwise). Source: SPEC sections 2.1 and 3.3; tiles after Dao et al., arXiv:2205.14135.
struct AttentionForward {
  static constexpr const char* kName = "attention_forward";
  TensorView o;
  TensorView lse;
  TensorView max_logit;
  ConstTensorView q;
  ConstTensorView kvb;
  ConstTensorView kr;
  ConstTensorView cu_seqlens;
  ConstTensorView selected;
  double scale = 1.0;
  bool accumulate_max = true;
  AttentionPath path = AttentionPath::automatic;

  void check() const;
  OpCost cost() const;
};

/// p = exp(logit - lse), delta_t = <do_t, o_t>, ds = p (<do_t, v_s> - delta_t):
///   dq_t = scale sum_s ds k_s,  dk_s = scale sum_t ds q_t,  dv_s = sum_t p do_t,  dkr_s = sum over
///   heads of its slice
///
///   dq, dkvb, dkr  shapes and types of q, kvb, kr; overwritten; must not alias inputs
///   d_o            [Tq, H, dv] compute or statistics type: the gradient of the *ungated* output
///   the rest as in AttentionForward. Tq < Tk, the queries the last Tq rows: gradients of what these queries add
///
/// No atomics: a (head, document) pair is one task; dkr is summed over heads in order.
struct AttentionBackward {
  static constexpr const char* kName = "attention_backward";
  TensorView dq;
  TensorView dkvb;
  TensorView dkr;
  ConstTensorView d_o;
  ConstTensorView o;
  ConstTensorView lse;
  ConstTensorView q;
  ConstTensorView kvb;
  ConstTensorView kr;
  ConstTensorView cu_seqlens;
  ConstTensorView selected;
  double scale = 1.0;
  AttentionPath path = AttentionPath::automatic;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const AttentionForward& op);
void launch(CpuContext& context, const AttentionBackward& op);
/// Kernels: "plain" takes anything; "tiled", on tensor cores, bf16 with dn = dv = 128, dr = 0 or 64 and scale > 0: there
/// probabilities, their gradients and d_o are rounded to bf16 as operands. `path` of the op is not looked at.
void launch(CudaContext& context, const AttentionForward& op);
void launch(CudaContext& context, const AttentionBackward& op);

}  // namespace moesaic
