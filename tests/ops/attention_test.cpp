// Attention against its definition, central differences, and the properties that the op promises.
#include <cstring>

#include "tests/ops/attention_support.h"
#include "tests/support/catch.h"

using namespace moesaic;
using namespace moesaic::attention_test;

namespace {

void require_same_bits(const Outputs& a, const Outputs& b) {
  const auto same = [](const Values& x, const Values& y) {
    return x.size() == y.size() &&
           (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
  };
  REQUIRE(same(a.o, b.o));
  REQUIRE(same(a.lse, b.lse));
  REQUIRE(same(a.max_logit, b.max_logit));
  REQUIRE(same(a.dq, b.dq));
  REQUIRE(same(a.dkvb, b.dkvb));
  REQUIRE(same(a.dkr, b.dkr));
}

double loss(const Problem& p) {
  const Outputs r = naive_forward(p);
  double sum = 0;
  for (std::size_t i = 0; i < r.o.size(); ++i)
    sum += r.o[i] * p.d_o[i];
  return sum;
}
// Central difference of loss() by every element of `what`.
Values differences(Problem& p, Values& what) {
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
  return d;
}

}  // namespace

TEST_CASE("attention: forward follows the definition at tile tails, packed, on both paths") {
  for (const Ints& lengths : {Ints{1},
                              Ints{15},
                              Ints{16},
                              Ints{17},
                              Ints{63},
                              Ints{64},
                              Ints{65},
                              Ints{129},
                              Ints{0, 5, 0, 70, 1, 64, 0}}) {
    for (const std::int64_t k : {0, 1, 9, 300}) {
      Problem p = make_problem(lengths, 3, 5, 3, 7);
      if (k > 0) select_random(p, k);
      const Outputs want = naive_forward(p);
      for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
        const Outputs f64 = run_attention(p, {.path = path, .backward = false});
        CHECK(distance(f64.o, want.o) < 1e-13);
        CHECK(distance(f64.lse, want.lse) < 1e-13);
        CHECK(distance(f64.max_logit, want.max_logit) < 1e-13);
        const Outputs f32 = run_attention(p, {.precision = kF32, .path = path, .backward = false});
        CHECK(distance(f32.o, want.o) < 1e-6);
        CHECK(distance(f32.lse, want.lse) < 1e-6);
        // Inputs are bf16 numbers and the output is f32, so nothing is lost to storage.
        const Outputs b16 = run_attention(p, {.precision = kBf16, .path = path, .backward = false});
        CHECK(distance(b16.o, want.o) < 1e-6);
        CHECK(distance(b16.max_logit, want.max_logit) < 1e-6);
      }
    }
  }
}

TEST_CASE("attention: backward equals central differences") {
  for (const std::int64_t k : {0, 4}) {
    for (const std::int64_t dr : {0, 2}) {
      Problem p = make_problem({6, 0, 11}, 2, 3, dr, 4);
      if (k > 0) select_random(p, k);
      const Values dq = differences(p, p.q), dkvb = differences(p, p.kvb),
                   dkr = differences(p, p.kr);
      for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
        const Outputs r = run_attention(p, {.path = path});
        CHECK(distance(r.dq, dq) < 1e-8);
        CHECK(distance(r.dkvb, dkvb) < 1e-8);
        CHECK(distance(r.dkr, dkr) < 1e-8);
      }
    }
  }
}

TEST_CASE(
    "attention: backward of the two paths and of the three precisions agree over several tiles") {
  for (const std::int64_t k : {0, 20}) {
    Problem p = make_problem({130, 65, 63}, 2, 16, 8, 12);
    if (k > 0) select_random(p, k);
    const Outputs dense = run_attention(p, {.path = AttentionPath::dense});
    const Outputs rows = run_attention(p, {.path = AttentionPath::rows});
    CHECK(distance(rows.o, dense.o) < 1e-13);
    CHECK(distance(rows.dq, dense.dq) < 1e-13);
    CHECK(distance(rows.dkvb, dense.dkvb) < 1e-13);
    CHECK(distance(rows.dkr, dense.dkr) < 1e-13);
    for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
      const Outputs f32 = run_attention(p, {.precision = kF32, .path = path});
      CHECK(distance(f32.dq, dense.dq) < 2e-6);
      CHECK(distance(f32.dkvb, dense.dkvb) < 2e-6);
      CHECK(distance(f32.dkr, dense.dkr) < 2e-6);
      const Outputs b16 =
          run_attention(p, {.precision = kBf16, .path = path});  // rounded once, when stored
      CHECK(distance(b16.dq, dense.dq) < 3e-3);
      CHECK(distance(b16.dkvb, dense.dkvb) < 3e-3);
      CHECK(distance(b16.dkr, dense.dkr) < 3e-3);
    }
  }
}

TEST_CASE("attention: queries in pieces, each with the keys so far, add up to all of them") {
  for (const std::int64_t k : {0, 20}) {
    Problem p = make_problem({130, 65, 0, 63, 1}, 2, 7, 4, 5);
    if (k > 0) select_random(p, k);
    for (const auto path : {AttentionPath::dense, AttentionPath::rows, AttentionPath::automatic}) {
      const Outputs want = run_attention(p, {.path = path});
      for (const std::vector<std::int64_t>& cuts :
           std::vector<std::vector<std::int64_t>>{{0, 100, 259},
                                                  {0, 1, 130, 131, 195, 250, 259},
                                                  {0, 37, 74, 111, 148, 185, 222, 259}}) {
        Outputs sum{.o = {},
                    .lse = {},
                    .max_logit = {},
                    .dq = {},
                    .dkvb = Values(p.kvb.size()),
                    .dkr = Values(p.kr.size())};
        for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
          const Outputs part = run_attention(piece_of(p, cuts[i], cuts[i + 1]), {.path = path});
          append(sum.o, part.o);
          append(sum.dq, part.dq);
          add_part(sum.dkvb, part.dkvb);
          add_part(sum.dkr, part.dkr);
        }
        CHECK(distance(sum.o, want.o) < 1e-13);
        CHECK(distance(sum.dq, want.dq) < 1e-13);
        CHECK(distance(sum.dkvb, want.dkvb) < 1e-13);
        CHECK(distance(sum.dkr, want.dkr) < 1e-13);
      }
    }
  }
}

TEST_CASE("attention: the same bits on one and three threads") {
  for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
    Problem p = make_problem({70, 3, 90}, 5, 8, 4, 8);
    require_same_bits(run_attention(p, {.precision = kF32, .path = path}),
                      run_attention(p, {.precision = kF32, .path = path, .threads = 3}));
    select_random(p, 12);
    require_same_bits(run_attention(p, {.precision = kF32, .path = path}),
                      run_attention(p, {.precision = kF32, .path = path, .threads = 3}));
  }
}

TEST_CASE(
    "attention: a document in a pack gives the bits it gives alone, whatever its neighbours hold") {
  for (const std::int64_t k :
       {0, 3, 10}) {  // with 3, `automatic` walks this document by rows, the first one by tiles
    for (const auto path : {AttentionPath::automatic, AttentionPath::dense, AttentionPath::rows}) {
      Problem alone = make_problem({77}, 2, 8, 4, 6);
      if (k > 0) select_random(alone, k);
      Problem pack = make_problem({33, 77, 50}, 2, 8, 4, 6, 1234);
      if (k > 0) select_random(pack, k);
      const auto poison = std::numeric_limits<double>::quiet_NaN();
      const auto put = [&](Values& to, const Values& from, std::int64_t width) {
        std::fill(to.begin(), to.end(), poison);
        std::copy(from.begin(), from.end(), to.begin() + 33 * width);
      };
      put(pack.q, alone.q, 2 * 12);
      put(pack.kvb, alone.kvb, 2 * 14);
      put(pack.kr, alone.kr, 4);
      put(pack.d_o, alone.d_o, 2 * 6);
      for (std::int64_t i = 0; i < 77 * k; ++i) {
        const auto s = alone.selected[static_cast<std::size_t>(i)];
        pack.selected[static_cast<std::size_t>(33 * k + i)] = s < 0 ? s : s + 33;
      }
      const Outputs a = run_attention(alone, {.precision = kF32, .path = path});
      if (path == AttentionPath::automatic) {
        const auto taken = k == 3 ? AttentionPath::rows : AttentionPath::dense;
        require_same_bits(a, run_attention(alone, {.precision = kF32, .path = taken}));
      }
      const Outputs b = run_attention(pack, {.precision = kF32, .path = path});
      const auto same = [&](const Values& packed, const Values& separate, std::int64_t width) {
        return std::memcmp(packed.data() + 33 * width,
                           separate.data(),
                           separate.size() * sizeof(double)) == 0;
      };
      CHECK(same(b.o, a.o, 2 * 6));
      CHECK(same(b.dq, a.dq, 2 * 12));
      CHECK(same(b.dkvb, a.dkvb, 2 * 14));
      CHECK(same(b.dkr, a.dkr, 4));
      for (std::int64_t h = 0; h < 2; ++h)
        CHECK(std::memcmp(
                  b.lse.data() + h * 160 + 33, a.lse.data() + h * 77, 77 * sizeof(double)) == 0);
    }
  }
}

TEST_CASE("attention: causal to the bit, and a longer document keeps the bits of its beginning") {
  for (const std::int64_t k : {0, 10}) {
    for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
      Problem p = make_problem({140}, 2, 8, 4, 6);
      if (k > 0) select_random(p, k);
      const Outputs before = run_attention(p, {.precision = kF32, .path = path, .backward = false});
      for (const std::int64_t t : {1, 16, 63, 64, 100, 139}) {
        Problem changed = p;
        for (std::int64_t c = 0; c < 2 * 12; ++c)
          changed.q[static_cast<std::size_t>(t * 24 + c)] += 3;
        for (std::int64_t c = 0; c < 2 * 14; ++c)
          changed.kvb[static_cast<std::size_t>(t * 28 + c)] -= 2;
        for (std::int64_t c = 0; c < 4; ++c)
          changed.kr[static_cast<std::size_t>(t * 4 + c)] *= -5;
        const Outputs after =
            run_attention(changed, {.precision = kF32, .path = path, .backward = false});
        CHECK(std::memcmp(after.o.data(),
                          before.o.data(),
                          static_cast<std::size_t>(t * 12) * sizeof(double)) == 0);
        CHECK(std::memcmp(after.o.data() + t * 12, before.o.data() + t * 12, 12 * sizeof(double)) !=
              0);
        Problem shorter = p;
        shorter.cu = {0, static_cast<std::int32_t>(t)};
        shorter.tq = shorter.tk = t;
        shorter.q.resize(static_cast<std::size_t>(t * 24));
        shorter.kvb.resize(static_cast<std::size_t>(t * 28));
        shorter.kr.resize(static_cast<std::size_t>(t * 4));
        if (k > 0) shorter.selected.resize(static_cast<std::size_t>(t * k));
        const Outputs prefix =
            run_attention(shorter, {.precision = kF32, .path = path, .backward = false});
        CHECK(std::memcmp(prefix.o.data(),
                          before.o.data(),
                          static_cast<std::size_t>(t * 12) * sizeof(double)) == 0);
      }
    }
  }
}

TEST_CASE("attention: fewer queries than keys are the last rows") {
  for (const std::int64_t queries : {1, 8, 70}) {
    for (const std::int64_t k : {0, 10}) {
      Problem p = make_problem({40, 100}, 2, 8, 4, 6);
      if (k > 0) select_random(p, k);
      const Outputs all = run_attention(p, {.backward = false});
      Problem last = p;
      last.tq = queries;
      last.q.erase(last.q.begin(), last.q.end() - queries * 24);
      if (k > 0) last.selected.erase(last.selected.begin(), last.selected.end() - queries * k);
      for (const auto path :
           {AttentionPath::automatic, AttentionPath::dense, AttentionPath::rows}) {
        const Outputs r = run_attention(last, {.path = path, .backward = false});
        CHECK(distance(r.o, Values(all.o.end() - queries * 12, all.o.end())) < 1e-13);
        CHECK(distance(r.lse, naive_forward(last).lse) < 1e-13);
      }
    }
  }
}

TEST_CASE("attention: the largest logit combines over calls, a row without keys gives zero") {
  Problem p = make_problem({20}, 2, 4, 2, 3);
  select_random(p, 3);
  std::fill_n(p.selected.begin() + 5 * 3, 3, -1);  // row 5 has no keys
  p.selected[6 * 3] = 19;                          // not visible to row 6
  p.selected[6 * 3 + 1] = p.selected[6 * 3 + 2] = -1;
  for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
    const Outputs r = run_attention(p, {.path = path});
    for (std::size_t row : {5U, 6U}) {
      for (std::size_t i = row * 6; i < row * 6 + 6; ++i)
        CHECK(r.o[i] == 0);
      for (std::size_t i = row * 12; i < row * 12 + 12; ++i)
        CHECK(r.dq[i] == 0);
      CHECK(r.lse[row] == -std::numeric_limits<double>::infinity());
    }
    CHECK(distance(r.o, naive_forward(p).o) < 1e-13);
    for (const auto* v : {&r.dq, &r.dkvb, &r.dkr}) {
      for (const double x : *v)
        CHECK(std::isfinite(x));
    }
    Memory m;
    AttentionForward op{.o = m.poisoned({20, 2, 3}, DType::f64),
                        .lse = m.poisoned({2, 20}, DType::f64),
                        .max_logit = m.floats({1e3, -1e3}, {2}, DType::f64),
                        .q = m.floats(p.q, {20, 2, 6}, DType::f64),
                        .kvb = m.floats(p.kvb, {20, 2, 7}, DType::f64),
                        .kr = m.floats(p.kr, {20, 2}, DType::f64),
                        .cu_seqlens = m.ints(p.cu, {2}),
                        .selected = m.ints(p.selected, {20, 3}),
                        .scale = p.scale,
                        .path = path};
    run_once(op);
    CHECK(read(op.max_logit)[0] == 1e3);
    CHECK(read(op.max_logit)[1] == r.max_logit[1]);
  }
}

TEST_CASE("attention: logits far beyond the range of exp stay finite") {
  Problem p = make_problem({90}, 1, 4, 2, 3);
  p.scale = 300;
  for (const auto path : {AttentionPath::dense, AttentionPath::rows}) {
    const Outputs r = run_attention(p, {.precision = kF32, .path = path});
    for (const auto* v : {&r.o, &r.lse, &r.dq, &r.dkvb, &r.dkr}) {
      for (const double x : *v)
        REQUIRE(std::isfinite(x));
    }
    REQUIRE(r.max_logit[0] > 500);
  }
}

TEST_CASE("attention: wrong shapes are refused") {
  Problem p = make_problem({4}, 1, 4, 2, 3);
  Memory m;
  AttentionForward op{.o = m.poisoned({4, 1, 3}, DType::f32),
                      .lse = m.poisoned({1, 4}, DType::f32),
                      .max_logit = {},
                      .q = m.floats(p.q, {4, 1, 6}, DType::f32),
                      .kvb = m.floats(p.kvb, {4, 1, 7}, DType::f32),
                      .kr = m.floats(p.kr, {4, 2}, DType::f32),
                      .cu_seqlens = m.ints(p.cu, {2}),
                      .selected = {}};
  CHECK_NOTHROW(op.check());
  auto bad = op;
  bad.lse = m.poisoned({4, 1}, DType::f32);
  CHECK_THROWS_AS(bad.check(), InternalError);
  bad = op;
  bad.kr = m.poisoned({4, 3}, DType::f32);
  CHECK_THROWS_AS(bad.check(), InternalError);
  bad = op;
  bad.o = m.poisoned({4, 1, 3}, DType::bf16);
  CHECK_THROWS_AS(bad.check(), InternalError);
  bad = op;
  bad.cu_seqlens = m.floats({0, 4}, {2}, DType::f32);
  CHECK_THROWS_AS(bad.check(), InternalError);
}
