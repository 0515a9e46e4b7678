// Index scores, selection, the indexer's loss and QK-clip against their definitions.
#include "kernels/ops/indexer.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/cpu/select.h"
#include "kernels/ops/qk_clip.h"
#include "tests/ops/attention_support.h"
#include "tests/support/catch.h"

using namespace moesaic;
using namespace moesaic::attention_test;

namespace {

struct IndexProblem {
  Problem a;
  std::int64_t heads = 3, dim = 5;
  Values qi, ki, w;
};
IndexProblem make_index_problem(const Ints& lengths,
                                std::int64_t heads = 3,
                                std::int64_t dim = 5,
                                std::uint64_t seed = 40) {
  IndexProblem p;
  p.a = make_problem(lengths, 2, 4, 2, 3, seed);
  p.heads = heads;
  p.dim = dim;
  p.qi = rounded(normal(static_cast<std::size_t>(p.a.tq * heads * dim), seed + 11));
  p.ki = rounded(normal(static_cast<std::size_t>(p.a.tk * dim), seed + 12));
  p.w = rounded(normal(static_cast<std::size_t>(p.a.tq * heads), seed + 13));
  return p;
}
double score(const IndexProblem& p, std::int64_t t, std::int64_t s) {
  double sum = 0;
  for (std::int64_t j = 0; j < p.heads; ++j) {
    double dot = 0;
    for (std::int64_t c = 0; c < p.dim; ++c)
      dot += p.qi[static_cast<std::size_t>((t * p.heads + j) * p.dim + c)] *
             p.ki[static_cast<std::size_t>(s * p.dim + c)];
    sum += p.w[static_cast<std::size_t>(t * p.heads + j)] * std::max(dot, 0.0);
  }
  return sum / std::sqrt(static_cast<double>(p.heads * p.dim));
}

// The k best of `values` by full sort: larger first, then lower index; NaN as -inf.
Ints sorted_selection(const Values& values, std::int64_t k) {
  Ints order(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto value = [&](std::int32_t i) {
    const double v = values[static_cast<std::size_t>(i)];
    return std::isnan(v) ? -std::numeric_limits<double>::infinity() : v;
  };
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return value(a) > value(b);
  });
  order.resize(static_cast<std::size_t>(
      std::min<std::int64_t>(k, static_cast<std::int64_t>(values.size()))));
  std::sort(order.begin(), order.end());
  return order;
}

struct Queries {
  std::int64_t begin = 0, end = -1;
};
struct Selection {
  Ints selected;
  Values scores;
};
Selection run_select(const IndexProblem& p,
                     std::int64_t k,
                     const Precision& precision,
                     int threads = 1,
                     bool with_scores = true,
                     Queries queries = {}) {
  Memory m;
  const std::int64_t tq = p.a.tq, tk = p.a.tk;
  IndexerSelect op{.selected = m.ints(Ints(static_cast<std::size_t>(tq * k), -77), {tq, k}),
                   .scores = with_scores ? m.poisoned({tq, tk}, precision.stats) : TensorView(),
                   .qi = m.floats(p.qi, {tq, p.heads, p.dim}, precision.compute),
                   .ki = m.floats(p.ki, {tk, p.dim}, precision.compute),
                   .w = m.floats(p.w, {tq, p.heads}, precision.stats),
                   .cu_seqlens = m.ints(p.a.cu, {static_cast<std::int64_t>(p.a.cu.size())}),
                   .given = {},
                   .query_begin = queries.begin,
                   .query_end = queries.end};
  run_once(op, threads);
  return {read_ints(op.selected), with_scores ? read(op.scores) : Values()};
}

struct LossResult {
  Values kl, dqi, dki, dw;
};
LossResult run_loss(const IndexProblem& p,
                    const Options& o,
                    bool gradients = true,
                    double weight = 1,
                    double tokens = 1,
                    double kl_before = 0,
                    Queries queries = {}) {
  const Outputs forward = run_attention(
      p.a, {.precision = o.precision, .path = AttentionPath::dense, .backward = false});
  Memory m;
  const DType compute = o.precision.compute, stats = o.precision.stats;
  const std::int64_t n = p.a.tq, keys = p.a.tk;
  IndexerLoss op{.kl = m.floats({kl_before}, {}, stats),
                 .dqi = gradients ? m.poisoned({n, p.heads, p.dim}, compute) : TensorView(),
                 .dki = gradients ? m.poisoned({keys, p.dim}, compute) : TensorView(),
                 .dw = gradients ? m.poisoned({n, p.heads}, stats) : TensorView(),
                 .qi = m.floats(p.qi, {n, p.heads, p.dim}, compute),
                 .ki = m.floats(p.ki, {keys, p.dim}, compute),
                 .w = m.floats(p.w, {n, p.heads}, stats),
                 .q = m.floats(p.a.q, {n, p.a.heads, p.a.dn + p.a.dr}, compute),
                 .kvb = m.floats(p.a.kvb, {keys, p.a.heads, p.a.dn + p.a.dv}, compute),
                 .kr = m.floats(p.a.kr, {keys, p.a.dr}, compute),
                 .lse = m.floats(forward.lse, {p.a.heads, n}, stats),
                 .cu_seqlens = m.ints(p.a.cu, {static_cast<std::int64_t>(p.a.cu.size())}),
                 .selected = p.a.k > 0 ? m.ints(p.a.selected, {n, p.a.k}) : TensorView(),
                 .tokens = m.floats({tokens}, {}, DType::f64),
                 .dn = p.a.dn,
                 .scale = p.a.scale,
                 .weight = weight,
                 .path = o.path,
                 .query_begin = queries.begin,
                 .query_end = queries.end};
  run_once(op, o.threads);
  if (!gradients) return {read(op.kl), {}, {}, {}};
  return {read(op.kl), read(op.dqi), read(op.dki), read(op.dw)};
}

double naive_kl(const IndexProblem& p) {
  const Outputs f = naive_forward(p.a);
  double sum = 0;
  for (std::int64_t t = 0; t < p.a.tq; ++t) {
    const auto keys = visible_keys(p.a, t);
    Values target, index;
    double total = 0, exp_total = 0;
    for (const auto s : keys) {
      double v = 0;
      for (std::int64_t h = 0; h < p.a.heads; ++h)
        v += std::exp(logit(p.a, h, t, s) - f.lse[static_cast<std::size_t>(h * p.a.tq + t)]);
      target.push_back(v);
      total += v;
      index.push_back(score(p, t, s));
      exp_total += std::exp(index.back());
    }
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const double q = target[i] / total;
      if (q > 0) sum += q * (std::log(q) - (index[i] - std::log(exp_total)));
    }
  }
  return sum;
}
Values differences(IndexProblem& p, Values& what) {
  Values d(what.size());
  for (std::size_t i = 0; i < what.size(); ++i) {
    constexpr double kStep = 1e-5;
    const double x = what[i];
    what[i] = x + kStep;
    const double up = naive_kl(p);
    what[i] = x - kStep;
    d[i] = (up - naive_kl(p)) / (2 * kStep);
    what[i] = x;
  }
  return d;
}
bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

template <class A>
void check_selection(const Values& values, std::int64_t k) {
  const auto n = static_cast<std::int64_t>(values.size());
  std::vector<A> row(values.begin(), values.end());
  std::vector<cpu::order_key_t<A>> keys(2 * values.size());
  Ints out(static_cast<std::size_t>(std::max<std::int64_t>(k, n)), -5);
  const std::int64_t written = cpu::select_largest(row.data(), n, k, out.data(), keys.data());
  out.resize(static_cast<std::size_t>(written));
  REQUIRE(out == sorted_selection(values, k));
}

}  // namespace

TEST_CASE("select_largest: equals a full sort, with ties, signed zeros, infinities and NaN") {
  for (const std::size_t n : {1U, 2U, 17U, 300U, 1000U}) {
    std::vector<Values> rows{normal(n, 5), Values(n, 0.0), Values(n, -1.5)};
    Values coarse = normal(n, 6), strange = normal(n, 7);
    for (auto& x : coarse)
      x = std::round(x);  // many ties, both zeros
    for (std::size_t i = 0; i < n; ++i) {
      if (i % 3 == 0) strange[i] = std::numeric_limits<double>::quiet_NaN() * (i % 2 == 0 ? 1 : -1);
      if (i % 7 == 1) strange[i] = std::numeric_limits<double>::infinity();
      if (i % 5 == 2) strange[i] = -std::numeric_limits<double>::infinity();
      strange[i] = static_cast<float>(strange[i]);
    }
    for (auto& x : rows[0])
      x = static_cast<float>(x);
    rows.push_back(coarse);
    rows.push_back(strange);
    for (const auto& row : rows) {
      for (const std::int64_t k : {std::int64_t(0),
                                   std::int64_t(1),
                                   std::int64_t(2),
                                   std::int64_t(n / 2),
                                   std::int64_t(n) - 1,
                                   std::int64_t(n),
                                   std::int64_t(n) + 3}) {
        check_selection<float>(row, k);
        check_selection<double>(row, k);
      }
    }
  }
}

TEST_CASE(
    "indexer: scores follow the formula, the choice is that of a full sort over the op's own "
    "scores") {
  for (const Ints& lengths :
       {Ints{1}, Ints{15}, Ints{17}, Ints{63}, Ints{64}, Ints{65}, Ints{0, 5, 90, 0, 1, 130}}) {
    for (const std::int64_t k : {1, 8, 200}) {
      const IndexProblem p = make_index_problem(lengths);
      for (const Precision& precision : {kF64, kF32, kBf16}) {
        const Selection r = run_select(p, k, precision);
        Values want(r.scores.size(), 0);
        for (std::int64_t t = 0; t < p.a.tq; ++t) {
          const std::int64_t begin = document_begin(p.a, t);
          Values visible;
          for (std::int64_t s = begin; s <= t; ++s) {
            want[static_cast<std::size_t>(t * p.a.tk + s)] = score(p, t, s);
            visible.push_back(r.scores[static_cast<std::size_t>(t * p.a.tk + s)]);
          }
          Ints best = sorted_selection(visible, k);
          for (auto& s : best)
            s += static_cast<std::int32_t>(begin);
          best.resize(static_cast<std::size_t>(k), -1);
          REQUIRE(Ints(r.selected.begin() + t * k, r.selected.begin() + (t + 1) * k) == best);
        }
        CHECK(distance(r.scores, want) < (precision.compute == DType::f64 ? 1e-14 : 1e-6));
        CHECK(run_select(p, k, precision, 3, false).selected == r.selected);
      }
    }
  }
}

TEST_CASE("indexer: ties go to the lower index") {
  IndexProblem p = make_index_problem({40, 30});
  std::fill(p.w.begin(), p.w.end(), 0.0);  // every score is 0
  const Selection r = run_select(p, 4, kF32);
  for (std::int64_t t = 0; t < 70; ++t) {
    const std::int64_t begin = t < 40 ? 0 : 40;
    for (std::int64_t i = 0; i < 4; ++i)
      REQUIRE(r.selected[static_cast<std::size_t>(t * 4 + i)] == (begin + i <= t ? begin + i : -1));
  }
}

TEST_CASE("indexer: few queries choose as all queries do, and a given choice is copied") {
  const IndexProblem p = make_index_problem({20, 90});
  const Selection all = run_select(p, 6, kF64);
  for (const std::int64_t queries : {1, 8, 70}) {
    IndexProblem last = p;
    last.a.tq = queries;
    last.qi.erase(last.qi.begin(), last.qi.end() - queries * p.heads * p.dim);
    last.w.erase(last.w.begin(), last.w.end() - queries * p.heads);
    const Selection r = run_select(last, 6, kF64);
    CHECK(r.selected == Ints(all.selected.end() - queries * 6, all.selected.end()));
    CHECK(distance(r.scores, Values(all.scores.end() - queries * 110, all.scores.end())) < 1e-13);
  }
  Memory m;
  Ints saved(110 * 6);
  std::iota(saved.begin(), saved.end(), 3);
  IndexerSelect op{.selected = m.ints(Ints(110 * 6, 0), {110, 6}),
                   .scores = {},
                   .qi = m.floats(p.qi, {110, 3, 5}, DType::f32),
                   .ki = m.floats(p.ki, {110, 5}, DType::f32),
                   .w = m.floats(p.w, {110, 3}, DType::f32),
                   .cu_seqlens = m.ints(p.a.cu, {3}),
                   .given = m.ints(saved, {110, 6})};
  run_once(op);
  CHECK(read_ints(op.selected) == saved);
}

TEST_CASE("indexer: parts of the queries choose as all do") {
  IndexProblem p = make_index_problem({130, 65, 0, 63}, 4, 16);
  constexpr std::int64_t kChosen = 12;
  const Selection all = run_select(p, kChosen, kF32);
  for (const Queries& part : {Queries{0, 129}, {129, 258}, {64, 128}, {1, 2}, {200, 258}}) {
    INFO("queries " << part.begin << " to " << part.end);
    const Selection own = run_select(p, kChosen, kF32, 1, false, part);
    CHECK(std::equal(own.selected.begin() + part.begin * kChosen,
                     own.selected.begin() + part.end * kChosen,
                     all.selected.begin() + part.begin * kChosen));
  }
  for (const Queries& none : {Queries{-1, 3}, {3, 3}, {250, 259}})
    CHECK_THROWS_AS(run_select(p, kChosen, kF32, 1, false, none), InternalError);
  CHECK_THROWS_AS(run_select(p, kChosen, kF32, 1, true, {0, 3}), InternalError);
}

TEST_CASE("indexer loss: value and gradients equal the definition and its central differences") {
  for (const std::int64_t k : {0, 1, 4, 30}) {
    IndexProblem p = make_index_problem({7, 0, 12}, 3, 4);
    if (k > 0) select_random(p.a, k);
    const double want = naive_kl(p);
    const Values dqi = differences(p, p.qi), dki = differences(p, p.ki), dw = differences(p, p.w);
    for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
      if (k == 0 && path == AttentionPath::rows) continue;
      const LossResult r = run_loss(p, {.path = path});
      CHECK(std::abs(r.kl[0] - want) < 1e-12);
      if (k == 1) {  // one key: nothing to learn
        for (const auto* v : {&r.dqi, &r.dki, &r.dw}) {
          for (const double x : *v)
            CHECK(std::abs(x) < 1e-15);
        }
        continue;
      }
      CHECK(distance(r.dqi, dqi) < 1e-7);
      CHECK(distance(r.dki, dki) < 1e-7);
      CHECK(distance(r.dw, dw) < 1e-7);
    }
  }
}

TEST_CASE(
    "indexer loss: paths, precisions and threads agree over several tiles; weight and tokens scale "
    "gradients only") {
  for (const std::int64_t k : {0, 20}) {
    IndexProblem p = make_index_problem({130, 65, 0, 63}, 5, 16);
    if (k > 0) select_random(p.a, k);
    const LossResult f64 = run_loss(p, {.path = AttentionPath::dense});
    CHECK(std::abs(f64.kl[0] - naive_kl(p)) < 1e-10 * f64.kl[0]);
    const LossResult scaled = run_loss(p, {.path = AttentionPath::dense}, true, 3.0, 12.0, 100.0);
    CHECK(scaled.kl[0] == Approx(f64.kl[0] + 100));
    Values quarter = f64.dqi;
    for (auto& x : quarter)
      x *= 0.25;
    CHECK(distance(scaled.dqi, quarter) < 1e-14);
    CHECK(run_loss(p, {.path = AttentionPath::dense}, false).kl == f64.kl);
    for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
      if (k == 0 && path == AttentionPath::rows) continue;
      const LossResult again = run_loss(p, {.path = path});
      CHECK(distance(again.dqi, f64.dqi) < 1e-13);
      CHECK(distance(again.dki, f64.dki) < 1e-13);
      CHECK(distance(again.dw, f64.dw) < 1e-13);
      const LossResult one = run_loss(p, {.precision = kF32, .path = path});
      const LossResult three = run_loss(p, {.precision = kF32, .path = path, .threads = 3});
      CHECK((same_bits(one.kl, three.kl) && same_bits(one.dqi, three.dqi) &&
             same_bits(one.dki, three.dki) && same_bits(one.dw, three.dw)));
      CHECK(distance(one.kl, f64.kl) < 2e-6);
      CHECK(distance(one.dqi, f64.dqi) < 5e-6);
      CHECK(distance(one.dki, f64.dki) < 5e-6);
      CHECK(distance(one.dw, f64.dw) < 5e-6);
      const LossResult b16 = run_loss(p, {.precision = kBf16, .path = path});
      CHECK(distance(b16.kl, f64.kl) < 2e-6);
      CHECK(distance(b16.dqi, f64.dqi) < 3e-3);
      CHECK(distance(b16.dki, f64.dki) < 3e-3);
    }
  }
}

TEST_CASE("indexer loss: parts of the queries add up to all of them") {
  const auto add = [](Values& to, const Values& from) {
    for (std::size_t i = 0; i < to.size(); ++i)
      to[i] += from[i];
  };
  for (const std::int64_t k : {0, 20}) {
    IndexProblem p = make_index_problem({130, 65, 0, 63}, 5, 16);
    if (k > 0) select_random(p.a, k);
    for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
      if (k == 0 && path == AttentionPath::rows) continue;
      const LossResult all = run_loss(p, {.path = path});
      for (const std::vector<std::int64_t>& cuts :
           {std::vector<std::int64_t>{0, 258}, {0, 129, 258}, {0, 1, 64, 131, 200, 257, 258}}) {
        LossResult sum{{0}, Values(all.dqi.size()), Values(all.dki.size()), Values(all.dw.size())};
        for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
          INFO("queries " << cuts[i] << " to " << cuts[i + 1] << ", k " << k);
          const Queries queries{cuts[i], cuts[i + 1]};
          const LossResult part = run_loss(p, {.path = path}, true, 1, 1, 0, queries);
          const auto rows_match = [&](const Values& got, const Values& want, std::int64_t width) {
            for (std::int64_t t = 0; t < p.a.tq; ++t) {
              const bool counts = queries.begin <= t && t < queries.end;
              for (std::int64_t c = 0; c < width; ++c) {
                const auto at = static_cast<std::size_t>(t * width + c);
                if (got[at] != (counts ? want[at] : 0.0)) return false;
              }
            }
            return true;
          };
          CHECK(rows_match(part.dqi, all.dqi, p.heads * p.dim));
          CHECK(rows_match(part.dw, all.dw, p.heads));
          add(sum.kl, part.kl);
          add(sum.dki, part.dki);
          CHECK(run_loss(p, {.path = path}, false, 1, 1, 0, queries).kl == part.kl);
        }
        CHECK(std::abs(sum.kl[0] - all.kl[0]) < 1e-12 * all.kl[0]);
        CHECK(distance(sum.dki, all.dki) < 1e-13);
      }
    }
  }
  IndexProblem p = make_index_problem({7});
  for (const Queries& none : {Queries{-1, 3}, Queries{3, 3}, Queries{2, 8}})
    CHECK_THROWS_AS(run_loss(p, {}, true, 1, 1, 0, none), InternalError);
}

TEST_CASE(
    "indexer: queries in pieces, each with the keys so far, choose and learn as all of them") {
  for (const std::int64_t k : {0, 20}) {
    IndexProblem p = make_index_problem({130, 65, 0, 63, 1}, 3, 6);
    if (k > 0) select_random(p.a, k);
    const Selection chosen = run_select(p, 20, kF64);
    for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
      if (k == 0 && path == AttentionPath::rows) continue;
      const LossResult want = run_loss(p, {.path = path});
      LossResult sum{{0}, {}, Values(p.ki.size()), {}};
      Ints selected;
      const std::vector<std::int64_t> cuts{0, 1, 100, 130, 195, 250, 259};
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        IndexProblem piece = p;
        piece.a = piece_of(p.a, cuts[i], cuts[i + 1]);
        piece.qi = rows_of(p.qi, cuts[i], cuts[i + 1], p.heads * p.dim);
        piece.w = rows_of(p.w, cuts[i], cuts[i + 1], p.heads);
        piece.ki = rows_of(p.ki, 0, cuts[i + 1], p.dim);
        const LossResult part = run_loss(piece, {.path = path});
        const Ints own = run_select(piece, 20, kF64).selected;
        selected.insert(selected.end(), own.begin(), own.end());
        add_part(sum.kl, part.kl);
        append(sum.dqi, part.dqi);
        append(sum.dw, part.dw);
        add_part(sum.dki, part.dki);
      }
      CHECK(selected == chosen.selected);
      CHECK(distance(sum.kl, want.kl) < 1e-13);
      CHECK(distance(sum.dqi, want.dqi) < 1e-13);
      CHECK(distance(sum.dw, want.dw) < 1e-13);
      CHECK(distance(sum.dki, want.dki) < 1e-13);
    }
  }
}

TEST_CASE("indexer loss: a document in a pack gives the bits it gives alone") {
  for (const std::int64_t k :
       {0, 3, 10}) {  // with 3, `automatic` walks this document by rows, the first one by tiles
    for (const auto path : {AttentionPath::automatic, AttentionPath::dense, AttentionPath::rows}) {
      if (k == 0 && path == AttentionPath::rows) continue;
      IndexProblem pack = make_index_problem({33, 77, 50});
      if (k > 0) select_random(pack.a, k);
      IndexProblem alone = pack;
      alone.a.cu = {0, 77};
      alone.a.tq = alone.a.tk = 77;
      const auto cut = [](Values& v, std::int64_t width) {
        v = Values(v.begin() + 33 * width, v.begin() + 110 * width);
      };
      cut(alone.a.q, 12), cut(alone.a.kvb, 14), cut(alone.a.kr, 2), cut(alone.qi, 15),
          cut(alone.ki, 5), cut(alone.w, 3);
      if (k > 0) {
        alone.a.selected =
            Ints(pack.a.selected.begin() + 33 * k, pack.a.selected.begin() + 110 * k);
        for (auto& s : alone.a.selected)
          s -= s < 0 ? 0 : 33;
      }
      const LossResult a = run_loss(alone, {.precision = kF32, .path = path});
      const LossResult b = run_loss(pack, {.precision = kF32, .path = path});
      CHECK(same_bits(Values(b.dqi.begin() + 33 * 15, b.dqi.begin() + 110 * 15), a.dqi));
      CHECK(same_bits(Values(b.dki.begin() + 33 * 5, b.dki.begin() + 110 * 5), a.dki));
      if (path == AttentionPath::automatic) {
        const auto taken = k == 3 ? AttentionPath::rows : AttentionPath::dense;
        CHECK(same_bits(a.dki, run_loss(alone, {.precision = kF32, .path = taken}).dki));
        CHECK(std::abs(b.kl[0] - naive_kl(pack)) < 1e-5 * b.kl[0]);
      }
      CHECK(same_bits(Values(b.dw.begin() + 33 * 3, b.dw.begin() + 110 * 3), a.dw));
    }
  }
}

TEST_CASE("QK-clip: logits of clipped heads shrink by gamma, others and values stay") {
  constexpr std::int64_t kHeads = 3, kDn = 4, kDr = 2, kDv = 3, kIn = 5, kLatent = 6, kKeys = 7;
  const Values x = normal(kKeys * kIn, 1), c = normal(kKeys * kLatent, 2),
               kr = normal(kKeys * kDr, 3);
  const Values wq = normal(kHeads * (kDn + kDr) * kIn, 4),
               wk = normal(kHeads * (kDn + kDv) * kLatent, 5);
  const auto row =
      [](const Values& w, const Values& v, std::int64_t out, std::int64_t t, std::int64_t in) {
        double sum = 0;
        for (std::int64_t i = 0; i < in; ++i)
          sum +=
              w[static_cast<std::size_t>(out * in + i)] * v[static_cast<std::size_t>(t * in + i)];
        return sum;
      };
  const auto logits = [&](const Values& q, const Values& k, std::int64_t h) {
    Values all;
    for (std::int64_t t = 0; t < kKeys; ++t) {
      for (std::int64_t s = 0; s < kKeys; ++s) {
        double sum = 0;
        for (std::int64_t i = 0; i < kDn; ++i)
          sum +=
              row(q, x, h * (kDn + kDr) + i, t, kIn) * row(k, c, h * (kDn + kDv) + i, s, kLatent);
        for (std::int64_t i = 0; i < kDr; ++i)
          sum += row(q, x, h * (kDn + kDr) + kDn + i, t, kIn) *
                 kr[static_cast<std::size_t>(s * kDr + i)];
        all.push_back(sum);
      }
    }
    return all;
  };
  Memory m;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  QkClip op{.q_weight = m.floats(wq, {kHeads * (kDn + kDr), kIn}, DType::f64),
            .kv_b_weight = m.floats(wk, {kHeads * (kDn + kDv), kLatent}, DType::f64),
            .gamma = m.poisoned({kHeads}, DType::f64),
            .max_logit = m.floats({250, 99, nan}, {kHeads}, DType::f64),
            .skip = m.ints({1}, {}),
            .dn = kDn,
            .dr = kDr,
            .dv = kDv,
            .tau = 100};
  run_once(op);
  CHECK(
      (read(op.q_weight) == wq && read(op.kv_b_weight) == wk && read(op.gamma) == Values{1, 1, 1}));
  op.skip = m.ints({0}, {});
  run_once(op);
  CHECK(read(op.gamma) == Values{0.4, 1, 1});
  for (std::int64_t h = 0; h < kHeads; ++h) {
    Values want = logits(wq, wk, h);
    for (auto& v : want)
      v *= h == 0 ? 0.4 : 1.0;
    CHECK(distance(logits(read(op.q_weight), read(op.kv_b_weight), h), want) < 1e-14);
  }
  const Values after = read(op.kv_b_weight);
  for (std::size_t i = kDn * kLatent; i < (kDn + kDv) * kLatent; ++i)
    CHECK(after[i] == wk[i]);
}
