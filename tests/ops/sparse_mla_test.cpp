// Sparse MLA in the absorbed form against attention over the same selection, central differences, and its promises.
#include <cstring>

#include "tests/ops/sparse_mla_support.h"
#include "tests/support/catch.h"

using namespace moesaic;
using namespace moesaic::attention_test;

namespace {

bool same(const Values& a, const Values& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}
bool same(const SparseMlaOutputs& a, const SparseMlaOutputs& b) {
  return same(a.o, b.o) && same(a.lse, b.lse) && same(a.max_logit, b.max_logit) &&
         same(a.dq, b.dq) && same(a.dkv, b.dkv);
}
Values part(const Values& v, std::int64_t begin, std::int64_t rows, std::int64_t width) {
  return {v.begin() + begin * width, v.begin() + (begin + rows) * width};
}

double loss(SparseMlaProblem& p) {
  expand(p);
  const Outputs r = naive_forward(p.expanded);
  double sum = 0;
  for (std::size_t i = 0; i < r.o.size(); ++i)
    sum += r.o[i] * p.expanded.d_o[i];
  return sum;
}
Values differences(SparseMlaProblem& p, Values& what) {
  Values d(what.size());
  for (std::size_t i = 0; i < what.size(); ++i) {
    constexpr double kStep = 1e-5;
    const double x = what[i];
    what[i] = x + kStep;
    const double up = loss(p);
    what[i] = x - kStep;
    d[i] = (up - loss(p)) / (2 * kStep);
    what[i] = x;
  }
  expand(p);
  return d;
}

}  // namespace

TEST_CASE("sparse mla: agrees with attention over the same selection, packed, in every precision") {
  for (const Ints& lengths : {Ints{1}, Ints{63}, Ints{65}, Ints{0, 5, 0, 70, 1, 64, 0}}) {
    for (const std::int64_t k : {1, 9, 70}) {
      for (const std::int64_t dr : {0, 3}) {
        const SparseMlaProblem p = make_sparse_mla(lengths, 3, 6, dr, k);
        const SparseMlaOutputs want = from_expanded(p, run_attention(p.expanded, {}));
        const SparseMlaOutputs f64 = run_sparse_mla(p);
        CHECK(distance(f64.o, want.o) < 1e-13);
        CHECK(distance(f64.lse, want.lse) < 1e-13);
        CHECK(distance(f64.max_logit, want.max_logit) < 1e-13);
        CHECK(distance(f64.dq, want.dq) < 1e-12);
        CHECK(distance(f64.dkv, want.dkv) < 1e-12);
        const SparseMlaOutputs f32 = run_sparse_mla(p, kF32);
        CHECK(distance(f32.o, want.o) < 1e-6);
        CHECK(distance(f32.dq, want.dq) < 5e-6);
        CHECK(distance(f32.dkv, want.dkv) < 5e-6);
        // The output is rounded here, and once more what is formed from it.
        const SparseMlaOutputs b16 = run_sparse_mla(p, kBf16);
        CHECK(distance(b16.o, want.o) < 3e-3);
        CHECK(distance(b16.lse, want.lse) < 1e-6);
        CHECK(distance(b16.dq, want.dq) < 1e-2);
        CHECK(distance(b16.dkv, want.dkv) < 1e-2);
      }
    }
  }
}

TEST_CASE("sparse mla: backward equals central differences") {
  for (const std::int64_t dr : {0, 2}) {
    SparseMlaProblem p = make_sparse_mla({6, 0, 11}, 2, 3, dr, 4);
    const Values dq = differences(p, p.expanded.q), dkv = differences(p, p.kv);
    const SparseMlaOutputs r = run_sparse_mla(p);
    CHECK(distance(r.dq, dq) < 1e-8);
    CHECK(distance(r.dkv, dkv) < 1e-8);
  }
}

TEST_CASE("sparse mla: queries in pieces, each with the keys so far, add up to all of them") {
  const SparseMlaProblem p = make_sparse_mla({130, 65, 0, 63, 1}, 2, 6, 4, 20);
  const SparseMlaOutputs want = run_sparse_mla(p);
  SparseMlaOutputs sum{{}, {}, {}, {}, Values(p.kv.size())};
  const std::vector<std::int64_t> cuts{0, 1, 100, 130, 195, 250, 259};
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
    const SparseMlaProblem piece{piece_of(p.expanded, cuts[i], cuts[i + 1]),
                                 rows_of(p.kv, 0, cuts[i + 1], p.width())};
    const SparseMlaOutputs part = run_sparse_mla(piece, kF64, 1, true);
    append(sum.o, part.o);
    append(sum.dq, part.dq);
    add_part(sum.dkv, part.dkv);
  }
  CHECK(distance(sum.o, want.o) < 1e-13);
  CHECK(distance(sum.dq, want.dq) < 1e-13);
  CHECK(distance(sum.dkv, want.dkv) < 1e-13);
}

TEST_CASE("sparse mla: the same bits on one and three threads") {
  const SparseMlaProblem p = make_sparse_mla({70, 3, 90}, 5, 8, 4, 12);
  CHECK(same(run_sparse_mla(p, kF32), run_sparse_mla(p, kF32, 3)));
}

TEST_CASE("sparse mla: a document in a pack gives the bits it gives alone") {
  SparseMlaProblem alone = make_sparse_mla({77}, 2, 8, 4, 10);
  SparseMlaProblem pack = make_sparse_mla({33, 77, 50}, 2, 8, 4, 10, 1234);
  const auto put = [](Values& to, const Values& from, std::int64_t width) {
    std::copy(from.begin(), from.end(), to.begin() + 33 * width);
  };
  put(pack.expanded.q, alone.expanded.q, 2 * 12);
  put(pack.expanded.d_o, alone.expanded.d_o, 2 * 8);
  put(pack.kv, alone.kv, 12);
  for (std::size_t i = 0; i < alone.expanded.selected.size(); ++i) {
    const auto s = alone.expanded.selected[i];
    pack.expanded.selected[33 * 10 + i] = s < 0 ? s : s + 33;
  }
  const SparseMlaOutputs a = run_sparse_mla(alone, kF32), b = run_sparse_mla(pack, kF32);
  CHECK(same(part(b.o, 33, 77, 2 * 8), a.o));
  CHECK(same(part(b.dq, 33, 77, 2 * 12), a.dq));
  CHECK(same(part(b.dkv, 33, 77, 12), a.dkv));
}

TEST_CASE("sparse mla: rows without keys, keys that are not visible, and few queries") {
  SparseMlaProblem p = make_sparse_mla({20, 30}, 2, 4, 2, 3);
  auto& selected = p.expanded.selected;
  std::fill_n(selected.begin() + 5 * 3, 3, -1);
  selected[25 * 3] = 2;  // of another document, then a later one
  selected[25 * 3 + 1] = 49;
  selected[25 * 3 + 2] = -1;
  const SparseMlaOutputs r = run_sparse_mla(p, kF32),
                         want = from_expanded(p, run_attention(p.expanded, {}));
  for (const std::int64_t row : {5, 25}) {
    CHECK(part(r.o, row, 1, 2 * 4) == Values(2 * 4, 0));
    CHECK(part(r.dq, row, 1, 2 * 6) == Values(2 * 6, 0));
    CHECK(r.lse[static_cast<std::size_t>(row)] == -std::numeric_limits<double>::infinity());
  }
  CHECK(distance(r.o, want.o) < 1e-6);
  CHECK(distance(r.dkv, want.dkv) < 5e-6);

  SparseMlaProblem last = p;
  last.expanded.tq = 7;
  last.expanded.q = part(p.expanded.q, 43, 7, 2 * 6);
  last.expanded.selected.erase(last.expanded.selected.begin(),
                               last.expanded.selected.begin() + 43 * 3);
  CHECK(same(run_sparse_mla(last, kF32).o, part(r.o, 43, 7, 2 * 4)));
}
