#include "kernels/ops/short_conv.h"

#include "tests/ops/kda_support.h"
#include "tests/support/catch.h"

using namespace moesaic;
using namespace moesaic::kda_test;

namespace {

struct ConvCase {
  std::vector<std::int32_t> cu;
  std::int64_t channels, taps;
  Values x, w, history, dy;
  bool silu = true, carried = true;
  std::int64_t tokens() const { return cu.back(); }
  Shape rows() const { return {tokens(), channels}; }
  Shape histories() const { return {static_cast<std::int64_t>(cu.size()) - 1, taps - 1, channels}; }
};

ConvCase random_conv(std::vector<std::int32_t> cu,
                     std::int64_t channels,
                     std::int64_t taps,
                     unsigned seed) {
  Random random(seed);
  ConvCase c{std::move(cu), channels, taps, {}, {}, {}, {}};
  c.x = random.normal(c.rows().numel());
  c.w = random.normal(channels * taps, 0.5);
  c.history = random.normal(c.histories().numel());
  c.dy = random.normal(c.rows().numel());
  return c;
}

struct ConvResult {
  Values y, dx, dw, dhistory;
};

ConvResult run_conv(Cpu& cpu, const ConvCase& c, DType t) {
  const Tensor x(c.rows(), t, c.x), w({c.channels, c.taps}, wide(t), c.w), dy(c.rows(), t, c.dy),
      cu = documents_tensor(c.cu);
  Tensor history, dhistory;
  if (c.carried) history = Tensor(c.histories(), t, c.history), dhistory = Tensor(c.histories(), t);
  const Tensor y(c.rows(), t), dx(c.rows(), t), dw({c.channels, c.taps}, wide(t));
  dw.zero();
  cpu.run(ShortConvForward{
      .y = y, .x = x, .w = w, .history = history, .cu_seqlens = cu, .silu = c.silu});
  cpu.run(ShortConvBackward{.dx = dx,
                            .dw = dw,
                            .dhistory = dhistory,
                            .dy = dy,
                            .x = x,
                            .w = w,
                            .history = history,
                            .cu_seqlens = cu,
                            .silu = c.silu});
  return {y.values(), dx.values(), dw.values(), c.carried ? dhistory.values() : Values{}};
}

/// The definition, without SiLU's help: rows before the document come from the history or are zero.
Values direct(const ConvCase& c) {
  Values y(c.x.size());
  for (std::size_t n = 0; n + 1 < c.cu.size(); ++n) {
    for (std::int64_t t = c.cu[n]; t < c.cu[n + 1]; ++t) {
      for (std::int64_t ch = 0; ch < c.channels; ++ch) {
        double sum = 0;
        for (std::int64_t j = 0; j < c.taps; ++j) {
          const std::int64_t s = t - (c.taps - 1) + j, old = s - c.cu[n] + c.taps - 1;
          double in = 0;
          if (s >= c.cu[n]) {
            in = c.x[static_cast<std::size_t>(s * c.channels + ch)];
          } else if (c.carried) {
            in = c.history[(n * static_cast<std::size_t>(c.taps - 1) +
                            static_cast<std::size_t>(old)) *
                               static_cast<std::size_t>(c.channels) +
                           static_cast<std::size_t>(ch)];
          }
          sum += c.w[static_cast<std::size_t>(ch * c.taps + j)] * in;
        }
        y[static_cast<std::size_t>(t * c.channels + ch)] =
            c.silu ? sum / (1.0 + std::exp(-sum)) : sum;
      }
    }
  }
  return y;
}

}  // namespace

TEST_CASE("ShortConv: the definition, with documents shorter than the kernel and empty ones") {
  Cpu cpu;
  for (const bool carried : {false, true}) {
    for (const bool silu : {false, true}) {
      auto c = random_conv({0, 1, 1, 3, 70, 140}, 70, 4, 61);
      c.carried = carried;
      c.silu = silu;
      const auto expected = direct(c);
      CHECK(relative_error(run_conv(cpu, c, DType::f64).y, expected) < 1e-14);
      CHECK(relative_error(run_conv(cpu, c, DType::f32).y, expected) < 1e-6);
      CHECK(relative_error(run_conv(cpu, c, DType::bf16).y, expected) < 1e-2);
    }
  }
}

TEST_CASE("ShortConv: gradients are those of finite differences, across blocks of 64 tokens") {
  Cpu cpu;
  for (const std::int64_t taps : {1, 3, 4}) {
    for (const bool silu : {false, true}) {
      auto c = random_conv({0, 2, 2, 5, 71}, 3, taps, 67);
      c.silu = silu;
      c.carried = taps > 1;
      const auto r = run_conv(cpu, c, DType::f64);
      const auto differs = [&](Values ConvCase::*field, const Values& gradient) {
        return relative_error(gradient, central_differences(c.*field, 1e-5, [&](const Values& v) {
                                auto moved = c;
                                moved.*field = v;
                                return dot(direct(moved), c.dy);
                              }));
      };
      CHECK(differs(&ConvCase::x, r.dx) < 1e-8);
      CHECK(differs(&ConvCase::w, r.dw) < 1e-8);
      if (c.carried) CHECK(differs(&ConvCase::history, r.dhistory) < 1e-8);
    }
  }
}

TEST_CASE("ShortConv: threads do not change bits; the gradient of the weight accumulates") {
  Cpu one(1), three(3);
  const auto c = random_conv({0, 100, 333}, 200, 4, 71);
  const auto a = run_conv(one, c, DType::f32), b = run_conv(three, c, DType::f32);
  CHECK(a.y == b.y);
  CHECK(a.dx == b.dx);
  CHECK(a.dw == b.dw);
  CHECK(a.dhistory == b.dhistory);
  CHECK(relative_error(a.dw, run_conv(one, c, DType::f64).dw) < 1e-5);
}

TEST_CASE("ShortConvTail: pieces joined by the carried rows equal one run") {
  Cpu cpu;
  auto whole = random_conv({0, 9}, 6, 4, 73);
  const auto expected = run_conv(cpu, whole, DType::f64).y;
  const Tensor history(whole.histories(), DType::f64, whole.history);
  const Tensor w({6, 4}, DType::f64, whole.w);
  Values joined;
  std::int64_t from = 0;
  for (const std::int32_t length : {1, 1, 5, 2}) {
    const Tensor x({length, 6},
                   DType::f64,
                   Values(whole.x.begin() + from * 6, whole.x.begin() + (from + length) * 6)),
        y({length, 6}, DType::f64);
    const Tensor cu = documents_tensor({0, length});
    cpu.run(ShortConvForward{.y = y, .x = x, .w = w, .history = history, .cu_seqlens = cu});
    cpu.run(ShortConvTail{.next = history, .x = x, .history = history, .cu_seqlens = cu});
    const auto values = y.values();
    joined.insert(joined.end(), values.begin(), values.end());
    from += length;
  }
  CHECK(joined == expected);
}
