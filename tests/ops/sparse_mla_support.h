#pragma once
// Sparse MLA problems: an attention problem whose heads all have the latent as their key part and as their value, so that
// AttentionForward and AttentionBackward are the reference.
#include "kernels/ops/sparse_mla.h"
#include "tests/ops/attention_support.h"

namespace moesaic::attention_test {

struct SparseMlaProblem {
  Problem expanded;  ///< dn = dv = dc
  Values kv;         ///< [Tk, dc + dr]
  std::int64_t width() const { return expanded.dn + expanded.dr; }
};

/// kvb and kr of the reference from kv.
inline void expand(SparseMlaProblem& p) {
  Problem& e = p.expanded;
  const std::int64_t width = p.width();
  for (std::int64_t s = 0; s < e.tk; ++s) {
    const auto row = p.kv.begin() + s * width;
    for (std::int64_t h = 0; h < e.heads; ++h) {
      std::copy_n(row, e.dn, e.kvb.begin() + (s * e.heads + h) * 2 * e.dn);
      std::copy_n(row, e.dn, e.kvb.begin() + (s * e.heads + h) * 2 * e.dn + e.dn);
    }
    std::copy_n(row + e.dn, e.dr, e.kr.begin() + s * e.dr);
  }
}
inline SparseMlaProblem make_sparse_mla(const Ints& lengths,
                                        std::int64_t heads,
                                        std::int64_t dc,
                                        std::int64_t dr,
                                        std::int64_t k,
                                        std::uint64_t seed = 7) {
  SparseMlaProblem p;
  p.expanded = make_problem(lengths, heads, dc, dr, dc, seed);
  select_random(p.expanded, k);
  p.kv = rounded(normal(static_cast<std::size_t>(p.expanded.tk * p.width()), seed + 5));
  expand(p);
  return p;
}

struct SparseMlaOutputs {
  Values o, lse, max_logit, dq, dkv;
};
/// What the expanded ops say: gradients of a head's key part, of its value and of the shared key belong to one row.
inline SparseMlaOutputs from_expanded(const SparseMlaProblem& p, const Outputs& r) {
  SparseMlaOutputs out{r.o, r.lse, r.max_logit, r.dq, {}};
  const Problem& e = p.expanded;
  if (r.dkvb.empty()) return out;
  out.dkv.assign(p.kv.size(), 0);
  for (std::int64_t s = 0; s < e.tk; ++s) {
    double* to = out.dkv.data() + s * p.width();
    for (std::int64_t i = 0; i < e.heads * 2 * e.dn; ++i)
      to[i % e.dn] += r.dkvb[static_cast<std::size_t>(s * e.heads * 2 * e.dn + i)];
    for (std::int64_t c = 0; c < e.dr; ++c)
      to[e.dn + c] = r.dkr[static_cast<std::size_t>(s * e.dr + c)];
  }
  return out;
}

/// The two ops on tensors made by `floats(values, shape, dtype)`, `poisoned(shape, dtype)`, `ints(values, shape)`.
struct SparseMlaOps {
  SparseMlaForward forward;
  SparseMlaBackward backward;
};
template <class Maker>
SparseMlaOps sparse_mla_ops(Maker& m,
                            const SparseMlaProblem& p,
                            const Precision& precision,
                            bool backward_of_last = false) {
  const Problem& e = p.expanded;
  const DType compute = precision.compute, stats = precision.stats;
  SparseMlaOps ops;
  auto& f = ops.forward;
  f.o = m.poisoned({e.tq, e.heads, e.dn}, compute);
  f.lse = m.poisoned({e.heads, e.tq}, stats);
  f.max_logit = m.poisoned({e.heads}, stats);
  f.q = m.floats(e.q, {e.tq, e.heads, p.width()}, compute);
  f.kv = m.floats(p.kv, {e.tk, p.width()}, compute);
  f.cu_seqlens = m.ints(e.cu, {static_cast<std::int64_t>(e.cu.size())});
  f.selected = m.ints(e.selected, {e.tq, e.k});
  f.scale = e.scale;
  f.accumulate_max = false;
  if (e.tq != e.tk && !backward_of_last) return ops;
  ops.backward = {.dq = m.poisoned(f.q.shape(), compute),
                  .dkv = m.poisoned(f.kv.shape(), compute),
                  .d_o = m.floats(e.d_o, f.o.shape(), compute),
                  .o = f.o,
                  .lse = f.lse,
                  .q = f.q,
                  .kv = f.kv,
                  .cu_seqlens = f.cu_seqlens,
                  .selected = f.selected,
                  .scale = e.scale};
  return ops;
}

/// Both on the CPU backend; of the last rows alone the backward only when asked.
inline SparseMlaOutputs run_sparse_mla(const SparseMlaProblem& p,
                                       const Precision& precision = kF64,
                                       int threads = 1,
                                       bool backward_of_last = false) {
  Memory m;
  const SparseMlaOps ops = sparse_mla_ops(m, p, precision, backward_of_last);
  run_once(ops.forward, threads);
  SparseMlaOutputs r{
      read(ops.forward.o), read(ops.forward.lse), read(ops.forward.max_logit), {}, {}};
  if (ops.backward.dq.empty()) return r;
  run_once(ops.backward, threads);
  r.dq = read(ops.backward.dq);
  r.dkv = read(ops.backward.dkv);
  return r;
}

}  // namespace moesaic::attention_test
