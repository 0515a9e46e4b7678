// Attention on CUDA: the plain kernels against the CPU in every dtype, and what the op promises, on
// the plain kernels and on those that the sizes of large models take.
#include <algorithm>

#include "tests/cuda/attention_run.h"

namespace moesaic::test {
namespace {

using attention_test::distance;
using attention_test::make_problem;
using attention_test::run_attention;
using attention_test::select_random;

// f64, f32: only the order of sums and exp() differ from the CPU's. bf16: the same for o, which is
// f32; gradients are rounded to bf16 on both sides, and some fall on the other side of a tie.
double forward_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : 3e-6;
}
double backward_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-12 : dtype == DType::f32 ? 5e-6 : 2e-3;
}

void check_plain(DeviceAttention& device,
                 const Problem& p,
                 DType dtype,
                 bool wide_d_o,
                 bool backward_of_last = false) {
  const bool backward = p.tq == p.tk || backward_of_last;
  const Outputs want =
      run_attention(p, {.precision = precision_of(dtype), .threads = 2, .backward = backward});
  const Outputs got = device.run(
      p, {.compute = dtype, .path = KernelPath::plain, .wide_d_o = wide_d_o, .backward = backward});
  CHECK(device.ran() == (backward ? "plain, plain" : "plain"));
  CHECK(distance(got.o, want.o) <= forward_tolerance(dtype));
  CHECK(distance(got.lse, want.lse) <= forward_tolerance(dtype));
  CHECK(distance(got.max_logit, want.max_logit) <= forward_tolerance(dtype));
  CHECK(distance(got.dq, want.dq) <= backward_tolerance(dtype));
  CHECK(distance(got.dkvb, want.dkvb) <= backward_tolerance(dtype));
  CHECK(distance(got.dkr, want.dkr) <= backward_tolerance(dtype));
}

struct Widths {
  std::int64_t heads, dn, dr, dv;
};

// What property tests run on: the plain kernels at odd widths, and the kernels that bf16 takes at the
// widths of large models.
struct Subject {
  const char* name;
  Widths widths;
  AttentionRun how;
};
const Subject kSubjects[] = {
    {"plain", {2, 8, 4, 6}, {.compute = DType::f32, .path = KernelPath::plain}},
    {"automatic, 128 + 64, 128", {2, 128, 64, 128}, {.compute = DType::bf16}},
    {"automatic, 128, 128", {2, 128, 0, 128}, {.compute = DType::bf16}}};

bool all_finite(const Values& v) {
  return std::all_of(v.begin(), v.end(), [](double x) { return std::isfinite(x); });
}

Problem problem_of(const Subject& subject, const Ints& lengths, std::uint64_t seed = 7) {
  const auto& w = subject.widths;
  return make_problem(lengths, w.heads, w.dn, w.dr, w.dv, seed);
}

}  // namespace

TEST_CASE("Attention on CUDA (plain) matches the CPU at tile tails packed and selected", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const Ints& lengths : {Ints{1},
                              Ints{31},
                              Ints{33},
                              Ints{63},
                              Ints{64},
                              Ints{65},
                              Ints{129},
                              Ints{0, 5, 0, 70, 1, 64, 0}}) {
    for (const std::int64_t k : {0, 1, 9, 300}) {
      Problem p = make_problem(lengths, 3, 5, 3, 7);
      if (k > 0) select_random(p, k);
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
        INFO("last document border " << p.cu.back() << ", " << p.cu.size() - 1 << " documents, k "
                                     << k << ", " << name(dtype));
        check_plain(device, p, dtype, k != 9);
      }
    }
  }
}

TEST_CASE("Attention on CUDA (plain): backward of the last queries against all keys so far",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const std::int64_t k : {0, 20}) {
    Problem p = make_problem({130, 65, 0, 63, 1}, 2, 7, 4, 5);
    if (k > 0) select_random(p, k);
    for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{100, 259},
                                     {1, 130},
                                     {130, 131},
                                     {131, 195},
                                     {150, 259}}) {
      for (const auto dtype : {DType::f64, DType::f32, DType::bf16}) {
        INFO("queries " << begin << " to " << end << ", k " << k << ", " << name(dtype));
        check_plain(device, attention_test::piece_of(p, begin, end), dtype, true, true);
      }
    }
  }
}

TEST_CASE("Attention on CUDA (plain) matches the CPU at many widths", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  // The last three have more channels than one block sums.
  for (const Widths& w : {Widths{2, 16, 8, 12},
                          Widths{1, 128, 64, 128},
                          Widths{4, 32, 0, 32},
                          Widths{2, 0, 8, 4},
                          Widths{1, 33, 31, 65},
                          Widths{1, 40, 24, 600},
                          Widths{1, 500, 24, 3},
                          Widths{1, 516, 64, 520}}) {
    Problem p = make_problem({60, 90}, w.heads, w.dn, w.dr, w.dv);
    for (const std::int64_t k : {0, 20}) {
      if (k > 0) select_random(p, k);
      for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
        INFO(w.dn << " + " << w.dr << ", " << w.dv << ", k " << k << ", " << name(dtype));
        check_plain(device, p, dtype, true);
      }
    }
  }
}

TEST_CASE("Attention on CUDA: many documents and none", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  // More documents than the 1024 that are listed at a time.
  Ints lengths;
  for (int i = 0; i < 2500; ++i)
    lengths.push_back(i % 7 == 0 ? 0 : i % 3);
  check_plain(device, make_problem(lengths, 1, 4, 2, 3), DType::f32, true);
  Problem none = make_problem({}, 2, 4, 2, 3);
  const Outputs r = device.run(none, {.compute = DType::f32, .path = KernelPath::plain});
  for (const double m : r.max_logit)
    CHECK(m == -std::numeric_limits<double>::infinity());
}

TEST_CASE("Attention on CUDA: fewer queries than keys are the last rows", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const auto& subject : kSubjects) {
    const auto& w = subject.widths;
    for (const std::int64_t queries : {1, 8, 70, 130}) {
      for (const std::int64_t k : {0, 10}) {
        INFO(subject.name << ", " << queries << " queries, k " << k);
        Problem p = problem_of(subject, {40, 0, 150});
        if (k > 0) select_random(p, k);
        p.q.erase(p.q.begin(), p.q.end() - queries * w.heads * (w.dn + w.dr));
        if (k > 0) p.selected.erase(p.selected.begin(), p.selected.end() - queries * k);
        p.tq = queries;
        auto how = subject.how;
        how.backward = false;
        const Outputs want = naive_forward(p), got = device.run(p, how);
        CHECK(distance(got.o, want.o) <= (how.compute == DType::bf16 ? 5e-3 : 3e-6));
        CHECK(distance(got.lse, want.lse) <= 1e-5);
        CHECK(distance(got.max_logit, want.max_logit) <= 1e-5);
      }
    }
  }
}

TEST_CASE("Attention on CUDA: rows without keys and the largest logit over calls", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const auto& subject : kSubjects) {
    INFO(subject.name);
    Problem p = problem_of(subject, {20, 150});
    select_random(p, 3);
    for (const int row : {0, 5, 100})  // no keys at all
      std::fill_n(p.selected.begin() + row * 3, 3, -1);
    for (int row = 130; row < 170; ++row) {  // only themselves
      std::fill_n(p.selected.begin() + row * 3, 3, -1);
      p.selected[static_cast<std::size_t>(row) * 3] = row;
    }
    p.selected[6 * 3] = 19;  // not visible to row 6, nor is another document to row 25
    p.selected[6 * 3 + 1] = p.selected[6 * 3 + 2] = -1;
    p.selected[25 * 3] = 2;
    p.selected[25 * 3 + 1] = p.selected[25 * 3 + 2] = -1;
    const Outputs r = device.run(p, subject.how), want = naive_forward(p);
    const auto& w = subject.widths;
    for (const std::size_t row : {0U, 5U, 100U, 6U, 25U}) {
      const auto zero = [&](const Values& v, std::int64_t width) {
        const auto begin = v.begin() + static_cast<std::int64_t>(row) * width;
        return std::all_of(begin, begin + width, [](double x) { return x == 0; });
      };
      CHECK(zero(r.o, w.heads * w.dv));
      CHECK(zero(r.dq, w.heads * (w.dn + w.dr)));
      CHECK(r.lse[row] == -std::numeric_limits<double>::infinity());
    }
    CHECK(distance(r.o, want.o) <= (subject.how.compute == DType::bf16 ? 5e-3 : 3e-6));
    for (const auto* v : {&r.dq, &r.dkvb, &r.dkr})
      CHECK(all_finite(*v));
    auto how = subject.how;
    how.backward = false;
    how.max_before = {1e3, -1e3};
    const Outputs combined = device.run(p, how);
    CHECK(combined.max_logit[0] == 1e3);
    CHECK(combined.max_logit[1] == r.max_logit[1]);
  }
}

TEST_CASE("Attention on CUDA: a document in a pack gives the bits it gives alone", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const auto& subject : kSubjects) {
    const auto& w = subject.widths;
    for (const int length : {1, 77, 200}) {
      for (const std::int64_t k : {0, 3, 40}) {
        INFO(subject.name << ", " << length << " tokens, k " << k);
        Problem alone = problem_of(subject, {length});
        if (k > 0) select_random(alone, k);
        Problem pack = problem_of(subject, {33, length, 50}, 1234);
        if (k > 0) select_random(pack, k);
        const auto poison = std::numeric_limits<double>::quiet_NaN();
        const auto put = [&](Values& to, const Values& from, std::int64_t width) {
          std::fill(to.begin(), to.end(), poison);
          std::copy(from.begin(), from.end(), to.begin() + 33 * width);
        };
        const std::int64_t q_width = w.heads * (w.dn + w.dr), kv_width = w.heads * (w.dn + w.dv),
                           o_width = w.heads * w.dv;
        put(pack.q, alone.q, q_width);
        put(pack.kvb, alone.kvb, kv_width);
        put(pack.kr, alone.kr, w.dr);
        put(pack.d_o, alone.d_o, o_width);
        for (std::int64_t i = 0; i < length * k; ++i) {
          const auto s = alone.selected[static_cast<std::size_t>(i)];
          pack.selected[static_cast<std::size_t>(33 * k + i)] = s < 0 ? s : s + 33;
        }
        const Outputs a = device.run(alone, subject.how), b = device.run(pack, subject.how);
        const auto same = [&](const Values& packed, const Values& separate, std::int64_t width) {
          return separate.empty() || std::memcmp(packed.data() + 33 * width,
                                                 separate.data(),
                                                 separate.size() * sizeof(double)) == 0;
        };
        CHECK(same(b.o, a.o, o_width));
        CHECK(same(b.dq, a.dq, q_width));
        CHECK(same(b.dkvb, a.dkvb, kv_width));
        CHECK(same(b.dkr, a.dkr, w.dr));
        const std::int64_t all = 33 + length + 50;
        for (std::int64_t h = 0; h < w.heads; ++h)
          CHECK(std::memcmp(b.lse.data() + h * all + 33,
                            a.lse.data() + h * length,
                            static_cast<std::size_t>(length) * sizeof(double)) == 0);
      }
    }
  }
}

TEST_CASE("Attention on CUDA: causal to the bit and a longer document keeps its beginning",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const auto& subject : kSubjects) {
    const auto& w = subject.widths;
    const auto count = [](std::int64_t n) { return static_cast<std::size_t>(n); };
    const std::int64_t q_width = w.heads * (w.dn + w.dr), kv_width = w.heads * (w.dn + w.dv),
                       o_width = w.heads * w.dv;
    for (const std::int64_t k : {0, 10}) {
      Problem p = problem_of(subject, {270});
      if (k > 0) select_random(p, k);
      auto how = subject.how;
      how.backward = false;
      const Outputs before = device.run(p, how);
      for (const std::int64_t t : {1, 63, 64, 128, 200, 269}) {
        INFO(subject.name << ", token " << t << ", k " << k);
        Problem changed = p;
        for (std::int64_t c = 0; c < q_width; ++c)
          changed.q[count(t * q_width + c)] += 3;
        for (std::int64_t c = 0; c < kv_width; ++c)
          changed.kvb[count(t * kv_width + c)] -= 2;
        for (std::int64_t c = 0; c < w.dr; ++c)
          changed.kr[count(t * w.dr + c)] *= -5;
        const Outputs after = device.run(changed, how);
        const auto bytes = count(t * o_width) * sizeof(double);
        CHECK(std::memcmp(after.o.data(), before.o.data(), bytes) == 0);
        CHECK(std::memcmp(after.o.data() + t * o_width,
                          before.o.data() + t * o_width,
                          count(o_width) * sizeof(double)) != 0);
        Problem shorter = p;
        shorter.cu = {0, static_cast<std::int32_t>(t)};
        shorter.tq = shorter.tk = t;
        shorter.q.resize(count(t * q_width));
        shorter.kvb.resize(count(t * kv_width));
        shorter.kr.resize(count(t * w.dr));
        if (k > 0) shorter.selected.resize(count(t * k));
        const Outputs prefix = device.run(shorter, how);
        CHECK(std::memcmp(prefix.o.data(), before.o.data(), bytes) == 0);
      }
    }
  }
}

TEST_CASE("Attention on CUDA: logits far beyond the range of exp stay finite", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const auto& subject : kSubjects) {
    INFO(subject.name);
    Problem p = problem_of(subject, {190});
    p.scale = 300;
    const Outputs r = device.run(p, subject.how);
    for (const auto* v : {&r.o, &r.lse, &r.dq, &r.dkvb, &r.dkr})
      CHECK(all_finite(*v));
    CHECK(r.max_logit[0] > 500);
    // Logits of thousands are known to 1e-3 of a unit.
    CHECK(distance(r.o, run_attention(p, {.backward = false}).o) <= 2e-2);
  }
}

TEST_CASE("Attention on CUDA: a dry run measures its scratch memory", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const auto& subject : kSubjects) {
    for (const std::int64_t k : {0, 7}) {
      INFO(subject.name << ", k " << k);
      Problem p = problem_of(subject, {100, 90});
      if (k > 0) select_random(p, k);
      DeviceAttention device;
      const Outputs want = device.run(p, subject.how);
      const auto ops = device.prepare(p, subject.how);
      BackendOwner dry({.device = kCuda, .mode = Stream::Mode::dry});
      std::get<CudaContext>(dry.backend()).path = subject.how.path;
      run(dry.backend(), ops.forward);
      run(dry.backend(), ops.backward);
      DeviceAttention tight(dry.scratch().high_water_bytes());
      CHECK(DeviceAttention::same(tight.run(p, subject.how), want));
    }
  }
}

}  // namespace moesaic::test
