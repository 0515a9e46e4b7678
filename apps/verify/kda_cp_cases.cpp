// kda_cp__*: a sequence of packed documents cut into the pieces of several ranks, each with the states that the affine
// maps of the others give it.
#include "apps/verify/case_run.h"
#include "core/nn/context_piece.h"
#include "kernels/ops/kda_chunk.h"
#include "kernels/ops/kda_prepare.h"
#include "kernels/ops/kda_segment.h"

namespace moesaic::verify {
namespace {

struct Core {
  ConstTensorView q, k, v, g, beta, d_o;
  Core rows(std::int64_t begin, std::int64_t end) const {
    return {q.rows(begin, end),
            k.rows(begin, end),
            v.rows(begin, end),
            g.rows(begin, end),
            beta.rows(begin, end),
            d_o.rows(begin, end)};
  }
};

struct CoreGradients {
  TensorView dq, dk, dv, dg, dbeta;
};

/// One per rank, [ranks, …].
struct States {
  TensorView m, e, s_in, f, ds_out;
};

template <class View>
View of_rank(const View& all, int r) {
  const Shape& s = all.shape();
  return all.rows(r, r + 1).reshaped({s[1], s[2], s[3]});
}

void segment(CaseRun& run, const Core& own, ConstTensorView cu, const States& states, int r) {
  moesaic::run(run.backend(),
               KdaSegmentMap{.m = of_rank(states.m, r),
                             .e = of_rank(states.e, r),
                             .k = own.k,
                             .v = own.v,
                             .g = own.g,
                             .beta = own.beta,
                             .cu_seqlens = cu});
  moesaic::run(run.backend(),
               KdaSegmentGradient{.f = of_rank(states.f, r),
                                  .d_o = own.d_o,
                                  .q = own.q,
                                  .k = own.k,
                                  .g = own.g,
                                  .beta = own.beta,
                                  .cu_seqlens = cu});
}

void piece(CaseRun& run,
           const Core& own,
           ConstTensorView cu,
           const PieceLinks& links,
           const States& states,
           TensorView o,
           const CoreGradients& d) {
  const int r = links.rank;
  if (links.continues())
    moesaic::run(run.backend(),
                 KdaSegmentChain{.state = of_rank(states.s_in, r),
                                 .m = states.m.rows(links.first, r),
                                 .e = states.e.rows(links.first, r)});
  if (links.continued())
    moesaic::run(run.backend(),
                 KdaSegmentChain{.state = of_rank(states.ds_out, r),
                                 .m = states.m.rows(r + 1, links.last + 1),
                                 .e = states.f.rows(r + 1, links.last + 1),
                                 .reversed = true});
  moesaic::run(run.backend(),
               KdaChunkForward{.o = o,
                               .q = own.q,
                               .k = own.k,
                               .v = own.v,
                               .g = own.g,
                               .beta = own.beta,
                               .s0 = states.s_in.rows(r, r + 1),
                               .cu_seqlens = cu});
  moesaic::run(run.backend(),
               KdaChunkBackward{.dq = d.dq,
                                .dk = d.dk,
                                .dv = d.dv,
                                .dg = d.dg,
                                .dbeta = d.dbeta,
                                .d_o = own.d_o,
                                .ds_final = states.ds_out.rows(r, r + 1),
                                .q = own.q,
                                .k = own.k,
                                .v = own.v,
                                .g = own.g,
                                .beta = own.beta,
                                .s0 = states.s_in.rows(r, r + 1),
                                .cu_seqlens = cu});
}

void run_kda_cp(CaseRun& run) {
  const DType compute = run.precision().compute, stats = run.precision().stats;
  const Shape keys = run.shape("in.q_raw"), rows = run.shape("in.v"), heads{keys[0], keys[1]};
  const double g_min = run.cfg_real("g_min");
  const auto z = run.load("in.z"), logit = run.load("in.beta_logit"),
             a_log = run.load("in.A_log", stats), bias = run.load("in.dt_bias", stats);
  const auto q = run.poisoned(keys, compute), k = run.poisoned(keys, compute),
             g = run.poisoned(keys, stats), beta = run.poisoned(heads, stats),
             q_rstd = run.poisoned(heads, stats), k_rstd = run.poisoned(heads, stats);
  moesaic::run(run.backend(),
               KdaPrepareForward{.q = q,
                                 .k = k,
                                 .g = g,
                                 .beta = beta,
                                 .q_rstd = q_rstd,
                                 .k_rstd = k_rstd,
                                 .q_raw = run.load("in.q_raw"),
                                 .k_raw = run.load("in.k_raw"),
                                 .z = z,
                                 .beta_logit = logit,
                                 .a_log = a_log,
                                 .dt_bias = bias,
                                 .g_min = g_min});
  const Core all{q, k, run.load("in.v"), g, beta, run.load("cot.o")};

  const auto cuts = run.host_ints("in.cuts"), borders = run.host_ints("in.cu");
  const std::vector<std::int32_t> documents(borders.begin(), borders.end());
  const int ranks = static_cast<int>(cuts.size()) - 1;
  const Shape square{ranks, keys[1], keys[2], keys[2]}, state{ranks, keys[1], keys[2], rows[2]};
  const States states{run.poisoned(square, stats),
                      run.poisoned(state, stats),
                      run.zeros(state, stats),
                      run.poisoned(state, stats),
                      run.zeros(state, stats)};
  const TensorView o = run.poisoned(rows, compute);
  const CoreGradients d{run.poisoned(keys, compute),
                        run.poisoned(keys, compute),
                        run.poisoned(rows, compute),
                        run.poisoned(keys, stats),
                        run.poisoned(heads, stats)};
  std::vector<ContextPiece> pieces;
  std::vector<TensorView> cu;
  for (int r = 0; r < ranks; ++r) {
    const ContextPiece& p = pieces.emplace_back(context_piece(documents, cuts, r));
    cu.push_back(
        run.upload_i32({p.cu.begin(), p.cu.end()}, {static_cast<std::int64_t>(p.cu.size())}));
    segment(run, all.rows(p.begin, p.end), cu.back(), states, r);
  }
  for (int r = 0; r < ranks; ++r) {
    const ContextPiece& p = pieces[static_cast<std::size_t>(r)];
    const auto own = [&](const TensorView& view) { return view.rows(p.begin, p.end); };
    piece(run,
          all.rows(p.begin, p.end),
          cu[static_cast<std::size_t>(r)],
          p.links,
          states,
          own(o),
          {own(d.dq), own(d.dk), own(d.dv), own(d.dg), own(d.dbeta)});
  }
  run.expect("aux.M", states.m);
  run.expect("aux.E", states.e);
  run.expect("aux.s_in", states.s_in);
  run.expect("aux.F", states.f);
  run.expect("aux.ds_out", states.ds_out);
  run.expect("out.o", o);

  const auto dz = run.poisoned(keys, compute), dlogit = run.poisoned(heads, compute),
             da_log = run.zeros(a_log.shape(), stats), dbias = run.zeros(bias.shape(), stats);
  moesaic::run(run.backend(),
               KdaPrepareBackward{.dq_raw = d.dq,
                                  .dk_raw = d.dk,
                                  .dz = dz,
                                  .dbeta_logit = dlogit,
                                  .da_log = da_log,
                                  .ddt_bias = dbias,
                                  .dq = d.dq,
                                  .dk = d.dk,
                                  .dg = d.dg,
                                  .dbeta = d.dbeta,
                                  .q = q,
                                  .k = k,
                                  .q_rstd = q_rstd,
                                  .k_rstd = k_rstd,
                                  .z = z,
                                  .beta_logit = logit,
                                  .a_log = a_log,
                                  .dt_bias = bias,
                                  .g_min = g_min});
  run.expect("grad.in.q_raw", d.dq);
  run.expect("grad.in.k_raw", d.dk);
  run.expect("grad.in.v", d.dv);
  run.expect("grad.in.z", dz);
  run.expect("grad.in.beta_logit", dlogit);
  run.expect("grad.in.A_log", da_log);
  run.expect("grad.in.dt_bias", dbias);
}

const RegisterFamily kFamily{{"kda_cp__", run_kda_cp}};

}  // namespace
}  // namespace moesaic::verify
