// The KDA core over pieces of packed documents, joined by affine state maps, against one run.
#include "core/base/random.h"
#include "core/nn/context_piece.h"
#include "kernels/ops/kda_segment.h"
#include "tests/ops/kda_support.h"
#include "tests/support/catch.h"

using namespace moesaic;
using namespace moesaic::kda_test;

namespace {

Values rows_of(const Values& all, std::int64_t begin, std::int64_t end, std::int64_t width) {
  return {all.begin() + begin * width, all.begin() + end * width};
}
void append(Values& to, const Tensor& rows) {
  const Values v = rows.values();
  to.insert(to.end(), v.begin(), v.end());
}

/// What one rank holds of a case.
struct Piece {
  ContextPiece at;
  CoreCase c;
  Tensor q, k, v, g, beta, d_o, cu;

  Piece(const CoreCase& whole, const std::vector<std::int64_t>& cuts, int r)
      : at(context_piece(whole.cu, cuts, r)), c{.H = whole.H, .K = whole.K, .V = whole.V} {
    const DType t = DType::f64;
    const std::int64_t keys = c.H * c.K, values = c.H * c.V;
    c.cu = at.cu;
    q = Tensor(c.keys(), t, rows_of(whole.q, at.begin, at.end, keys));
    k = Tensor(c.keys(), t, rows_of(whole.k, at.begin, at.end, keys));
    v = Tensor(c.rows(), t, rows_of(whole.v, at.begin, at.end, values));
    g = Tensor(c.keys(), t, rows_of(whole.g, at.begin, at.end, keys));
    beta = Tensor(c.heads(), t, rows_of(whole.beta, at.begin, at.end, c.H));
    d_o = Tensor(c.rows(), t, rows_of(whole.d_o, at.begin, at.end, values));
    cu = documents_tensor(at.cu);
  }
};

CoreResult by_pieces(Cpu& cpu, const CoreCase& whole, const std::vector<std::int64_t>& cuts) {
  const int ranks = static_cast<int>(cuts.size()) - 1;
  const DType t = DType::f64;
  const Shape state{whole.H, whole.K, whole.V};
  std::vector<Piece> pieces;
  for (int r = 0; r < ranks; ++r)
    pieces.emplace_back(whole, cuts, r);
  const Tensor m({ranks, whole.H, whole.K, whole.K}, t), e({ranks, whole.H, whole.K, whole.V}, t),
      f({ranks, whole.H, whole.K, whole.V}, t);
  const auto of = [](const Tensor& all, int r) {
    const TensorView view = all;
    const Shape& s = view.shape();
    return view.rows(r, r + 1).reshaped({s[1], s[2], s[3]});
  };
  for (int r = 0; r < ranks; ++r) {
    const Piece& p = pieces[static_cast<std::size_t>(r)];
    cpu.run(KdaSegmentMap{.m = of(m, r),
                          .e = of(e, r),
                          .k = p.k,
                          .v = p.v,
                          .g = p.g,
                          .beta = p.beta,
                          .cu_seqlens = p.cu});
    cpu.run(KdaSegmentGradient{.f = of(f, r),
                               .d_o = p.d_o,
                               .q = p.q,
                               .k = p.k,
                               .g = p.g,
                               .beta = p.beta,
                               .cu_seqlens = p.cu});
  }
  CoreResult all;
  for (int r = 0; r < ranks; ++r) {
    const Piece& p = pieces[static_cast<std::size_t>(r)];
    const PieceLinks& links = p.at.links;
    const Tensor in(state, t), out(state, t);
    if (links.continues())
      cpu.run(KdaSegmentChain{.state = in,
                              .m = static_cast<TensorView>(m).rows(links.first, r),
                              .e = static_cast<TensorView>(e).rows(links.first, r)});
    if (links.continued())
      cpu.run(KdaSegmentChain{.state = out,
                              .m = static_cast<TensorView>(m).rows(r + 1, links.last + 1),
                              .e = static_cast<TensorView>(f).rows(r + 1, links.last + 1),
                              .reversed = true});
    const auto given = [&](const Tensor& s, bool there) {
      return there ? static_cast<ConstTensorView>(s).reshaped({1, whole.H, whole.K, whole.V})
                   : ConstTensorView();
    };
    const ConstTensorView s0 = given(in, links.continues()), ds = given(out, links.continued());
    const CoreCase& c = p.c;
    const Tensor o(c.rows(), t), dq(c.keys(), t), dk(c.keys(), t), dv(c.rows(), t), dg(c.keys(), t),
        dbeta(c.heads(), t);
    cpu.run(KdaChunkForward{.o = o,
                            .q = p.q,
                            .k = p.k,
                            .v = p.v,
                            .g = p.g,
                            .beta = p.beta,
                            .s0 = s0,
                            .cu_seqlens = p.cu});
    cpu.run(KdaChunkBackward{.dq = dq,
                             .dk = dk,
                             .dv = dv,
                             .dg = dg,
                             .dbeta = dbeta,
                             .d_o = p.d_o,
                             .ds_final = ds,
                             .q = p.q,
                             .k = p.k,
                             .v = p.v,
                             .g = p.g,
                             .beta = p.beta,
                             .s0 = s0,
                             .cu_seqlens = p.cu});
    append(all.o, o);
    append(all.dq, dq);
    append(all.dk, dk);
    append(all.dv, dv);
    append(all.dg, dg);
    append(all.dbeta, dbeta);
  }
  return all;
}

void agree(Cpu& cpu,
           const std::vector<std::int32_t>& documents,
           const std::vector<std::int64_t>& cuts) {
  auto c = random_case(documents, 2, 6, 5, 77, -0.4);
  std::fill(c.s0.begin(), c.s0.end(), 0.0);
  std::fill(c.ds_final.begin(), c.ds_final.end(), 0.0);
  CoreResult expected = run_core(cpu, c);
  expected.s_final.clear();
  expected.ds0.clear();
  CHECK(worst_error(by_pieces(cpu, c, cuts), expected) < 1e-12);
}

}  // namespace

TEST_CASE(
    "KDA in pieces: documents over several cuts, ending at one, of one token, whole pieces "
    "inside") {
  Cpu cpu;
  agree(cpu, {0, 90}, {0, 30, 60, 90});
  agree(cpu, {0, 30, 90}, {0, 30, 60, 90});
  agree(cpu, {0, 29, 30, 31, 90}, {0, 30, 60, 90});
  agree(cpu, {0, 10, 85, 86, 90}, {0, 1, 2, 50, 51, 90});
}

TEST_CASE("KDA in pieces: any documents, any cuts") {
  Cpu cpu;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    std::uint64_t draws = 0;
    const auto draw = [&](std::int64_t n) {
      return 1 + static_cast<std::int64_t>(uniform(seed, draws++) * static_cast<double>(n));
    };
    std::vector<std::int64_t> cuts{0};
    for (std::int64_t r = 1 + draw(4); r > 0; --r)
      cuts.push_back(cuts.back() + draw(40));
    std::vector<std::int32_t> documents{0};
    while (documents.back() < cuts.back())
      documents.push_back(
          static_cast<std::int32_t>(std::min(cuts.back(), documents.back() + draw(60))));
    INFO("seed " << seed);
    agree(cpu, documents, cuts);
  }
}
