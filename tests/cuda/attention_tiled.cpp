// The tensor-core attention kernels against the CPU in f64 on the same bf16 numbers, and their speed.
#include <algorithm>
#include <chrono>

#include "tests/cuda/attention_run.h"

namespace moesaic::test {
namespace {

using attention_test::distance;
using attention_test::make_problem;
using attention_test::piece_of;
using attention_test::run_attention;
using attention_test::select_random;

// Probabilities are rounded to bf16 (2^-9 each) before they weigh the values; in the backward d_o,
// p and ds are, and the results.
constexpr double kForward = 5e-3;
constexpr double kBackward = 1.5e-2;
// Logits and sums are f32; exp2 and the sum's order leave some 1e-6 of the log-sum-exp.
constexpr double kLogSum = 2e-5;

// Rows [begin, end) of head h of a tensor [T, H, width].
Values slice(const Values& v,
             std::int64_t heads,
             std::int64_t width,
             std::int64_t h,
             std::int64_t begin,
             std::int64_t end) {
  Values out;
  for (std::int64_t t = begin; t < end; ++t) {
    const auto* row = v.data() + (t * heads + h) * width;
    out.insert(out.end(), row, row + width);
  }
  return out;
}
// In all, per head, and over the last (up to 64) rows: an error of one tile hides in the whole.
void check_close(const char* what,
                 const Values& got,
                 const Values& want,
                 std::int64_t rows,
                 std::int64_t heads,
                 std::int64_t width,
                 double tolerance) {
  INFO(what);
  REQUIRE(got.size() == want.size());
  CHECK(distance(got, want) <= tolerance);
  if (rows == 0) return;
  for (std::int64_t h = 0; h < heads; ++h) {
    CHECK(distance(slice(got, heads, width, h, 0, rows), slice(want, heads, width, h, 0, rows)) <=
          tolerance);
    const std::int64_t last = std::max<std::int64_t>(0, rows - 64);
    CHECK(distance(slice(got, heads, width, h, last, rows),
                   slice(want, heads, width, h, last, rows)) <= tolerance);
  }
}
void check_all(const Outputs& got, const Outputs& want, const Problem& p) {
  check_close("o", got.o, want.o, p.tq, p.heads, p.dv, kForward);
  check_close("dq", got.dq, want.dq, p.tq, p.heads, p.dn + p.dr, kBackward);
  check_close("dkvb", got.dkvb, want.dkvb, p.tk, p.heads, p.dn + p.dv, kBackward);
  if (p.dr > 0) check_close("dkr", got.dkr, want.dkr, p.tk, 1, p.dr, kBackward);
  CHECK(distance(got.lse, want.lse) <= kLogSum);
  CHECK(distance(got.max_logit, want.max_logit) <= kLogSum);
}

void check_tiled(DeviceAttention& device, const Problem& p, bool wide_d_o = true) {
  const Outputs want = run_attention(p, {.precision = kF64, .threads = 2});
  const Outputs got = device.run(p, {.compute = DType::bf16, .wide_d_o = wide_d_o});
  CHECK(device.ran() == "tiled, tiled");
  check_all(got, want, p);
}

// For each of `tokens` queries of one document k keys spread over all that it sees, or these where they are fewer.
Ints spread_selection(std::int64_t tokens, std::int64_t k) {
  Ints selected(static_cast<std::size_t>(tokens * k), -1);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t keys = std::min(t + 1, k);
    for (std::int64_t i = 0; i < keys; ++i)
      selected[static_cast<std::size_t>(t * k + i)] = static_cast<std::int32_t>(i * (t + 1) / keys);
  }
  return selected;
}

}  // namespace

TEST_CASE("Attention on CUDA (tiled) agrees with f64 at tile tails packed and selected", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const std::int64_t dr : {64, 0}) {
    for (const Ints& lengths : {Ints{1},
                                Ints{63},
                                Ints{64},
                                Ints{65},
                                Ints{127},
                                Ints{128},
                                Ints{129},
                                Ints{193},
                                Ints{257},
                                Ints{0, 5, 0, 70, 1, 128, 0, 190, 0}}) {
      for (const std::int64_t k : {0, 1, 20, 300}) {
        INFO("last border " << lengths.back() << " of " << lengths.size() << ", dr " << dr << ", k "
                            << k);
        Problem p = make_problem(lengths, 2, 128, dr, 128);
        if (k > 0) select_random(p, k);
        check_tiled(device, p, k != 20);
      }
    }
  }
}

TEST_CASE("Attention on CUDA (tiled): the last queries against all keys so far", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const std::int64_t dr : {64, 0}) {
    for (const std::int64_t k : {0, 20, 300}) {
      Problem p = make_problem({130, 65, 0, 63, 1, 300}, 2, 128, dr, 128);
      if (k > 0) select_random(p, k);
      // Queries begin inside a document of several tiles, at borders of documents and of tiles, and leave documents of keys alone.
      for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{100, 559},
                                       {1, 130},
                                       {129, 130},
                                       {130, 195},
                                       {150, 259},
                                       {258, 259},
                                       {323, 559},
                                       {387, 559},
                                       {400, 520},
                                       {558, 559}}) {
        INFO("queries " << begin << " to " << end << ", dr " << dr << ", k " << k);
        check_tiled(device, piece_of(p, begin, end), k != 20);
      }
    }
  }
}

TEST_CASE("Attention on CUDA (tiled): a document that begins before the queries keeps its bits",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  constexpr std::int64_t kBefore = 33, kLength = 330, kAfter = 50;
  for (const std::int64_t begin : {1, 64, 200}) {
    for (const std::int64_t k : {0, 40}) {
      INFO("queries from " << begin << ", k " << k);
      Problem alone = make_problem({kLength}, 2, 128, 64, 128);
      Problem pack = make_problem({kBefore, kLength, kAfter}, 2, 128, 64, 128, 1234);
      if (k > 0) select_random(alone, k);
      if (k > 0) select_random(pack, k);
      // What is not the document's must not reach it.
      const auto put = [&](Values& to, const Values& from) {
        std::fill(to.begin(), to.end(), std::numeric_limits<double>::quiet_NaN());
        const auto width = static_cast<std::int64_t>(from.size()) / kLength;
        std::copy(from.begin(), from.end(), to.begin() + kBefore * width);
      };
      put(pack.q, alone.q);
      put(pack.kvb, alone.kvb);
      put(pack.kr, alone.kr);
      put(pack.d_o, alone.d_o);
      for (std::int64_t i = 0; i < kLength * k; ++i) {
        const auto s = alone.selected[static_cast<std::size_t>(i)];
        pack.selected[static_cast<std::size_t>(kBefore * k + i)] =
            s < 0 ? s : s + static_cast<std::int32_t>(kBefore);
      }
      const AttentionRun how{.compute = DType::bf16};
      const Outputs a = device.run(piece_of(alone, begin, kLength), how),
                    b = device.run(piece_of(pack, kBefore + begin, kBefore + kLength + kAfter),
                                   how);
      CHECK(device.ran() == "tiled, tiled");
      const auto same = [](const Values& packed, const Values& separate, std::size_t from) {
        return std::memcmp(
                   packed.data() + from, separate.data(), separate.size() * sizeof(double)) == 0;
      };
      CHECK(same(b.o, a.o, 0));
      CHECK(same(b.dq, a.dq, 0));
      CHECK(same(b.dkvb, a.dkvb, kBefore * 2 * 256));
      CHECK(same(b.dkr, a.dkr, kBefore * 64));
    }
  }
}

TEST_CASE("Attention on CUDA (tiled): a selection in few tiles and rows that see only themselves",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  Problem p = make_problem({700, 40}, 2, 128, 64, 128);
  p.k = 4;
  p.selected.assign(static_cast<std::size_t>(p.tq * p.k), -1);
  for (std::int64_t t = 0; t < p.tq; ++t) {
    auto* row = p.selected.data() + t * p.k;
    const std::int64_t begin = t < 700 ? 0 : 700;
    if (t % 3 == 0) {
      row[0] = static_cast<std::int32_t>(t);  // itself
    } else if (t < 256 || t >= 384) {         // one block of rows without any key but themselves
      row[0] = static_cast<std::int32_t>(begin);
      row[1] = static_cast<std::int32_t>(begin + (t - begin) / 2);
      if (row[1] == row[0]) row[1] = -1;
    }
  }
  check_tiled(device, p);
}

TEST_CASE("Attention on CUDA (tiled) agrees with the plain kernels over 8192 tokens", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const std::int64_t k : {0, 2048}) {
    INFO("k " << k);
    Problem p = make_problem({8192}, 2, 128, 64, 128);
    p.k = k;
    p.selected = spread_selection(p.tq, k);
    const AttentionRun automatic{.compute = DType::bf16},
        plain{.compute = DType::bf16, .path = KernelPath::plain};
    check_all(device.run(p, automatic), device.run(p, plain), p);
    const Problem piece = piece_of(p, 4109, 8192);
    check_all(device.run(piece, automatic), device.run(piece, plain), piece);
  }
}

// Copies by TMA and products by wgmma run beside the threads: a missing wait shows as a rare change.
TEST_CASE("Attention on CUDA (tiled): the same bits over many runs", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device;
  for (const auto& [k, begin] :
       {std::pair<std::int64_t, std::int64_t>{0, 0}, {100, 0}, {0, 1001}, {100, 1001}}) {
    INFO("k " << k << ", queries from " << begin);
    Problem p = make_problem({700, 0, 1091, 300}, 8, 128, 64, 128);
    if (k > 0) select_random(p, k);
    if (begin > 0) p = piece_of(p, begin, p.tk);
    const auto ops = device.prepare(p, {.compute = DType::bf16});
    const auto results = [&] {
      run(device.backend(), ops.forward);
      run(device.backend(), ops.backward);
      std::vector<OwnedTensor> r;
      for (const auto& view : {ops.forward.o, ops.backward.dq, ops.backward.dkvb, ops.backward.dkr})
        r.push_back(download(view, device.stream()));
      return r;
    };
    const auto first = results();
    int changed = 0;
    for (int i = 0; i < 60; ++i) {
      const auto again = results();
      for (std::size_t j = 0; j < first.size(); ++j)
        changed += same_bits(again[j].view(), first[j].view()) ? 0 : 1;
    }
    CHECK(changed == 0);
    device.forget();
  }
}

// Hidden: it takes 25 GB of the device. Every document holds the same numbers, so the last one must
// give the bits of the first.
TEST_CASE("Offsets of attention on CUDA beyond 2^31 elements", "[.large]") {
  MOESAIC_NEEDS_CUDA();
  constexpr std::int64_t kHeads = 32, kTokens = 1000, kDocuments = 270;
  DeviceAttention device(std::size_t{4} << 30);
  Problem one = make_problem({kTokens}, kHeads, 128, 64, 128);
  const auto ops = device.prepare(one, {.compute = DType::bf16, .wide_d_o = false});
  run(device.backend(), ops.forward);
  run(device.backend(), ops.backward);
  const auto repeated = [&](ConstTensorView document) {
    Shape shape = document.shape();
    shape.dim[0] = kTokens * kDocuments;
    const TensorView all = device.poisoned(shape, document.dtype());
    for (std::int64_t d = 0; d < kDocuments; ++d)
      copy_tensor(all.rows(d * kTokens, (d + 1) * kTokens), document, device.stream());
    return all;
  };
  Ints cu;
  for (std::int64_t d = 0; d <= kDocuments; ++d)
    cu.push_back(static_cast<std::int32_t>(d * kTokens));
  auto f = ops.forward;
  f.q = repeated(f.q);
  f.kvb = repeated(f.kvb);
  f.kr = repeated(f.kr);
  f.o = device.poisoned({kTokens * kDocuments, kHeads, 128}, DType::f32);
  f.lse = device.poisoned({kHeads, kTokens * kDocuments}, DType::f32);
  f.cu_seqlens = device.upload(cu, {kDocuments + 1});
  auto b = ops.backward;
  b.dq = device.poisoned(f.q.shape(), DType::bf16);
  b.dkvb = device.poisoned(f.kvb.shape(), DType::bf16);
  b.dkr = device.poisoned(f.kr.shape(), DType::bf16);
  b.d_o = repeated(b.d_o);
  b.o = f.o;
  b.lse = f.lse;
  b.q = f.q;
  b.kvb = f.kvb;
  b.kr = f.kr;
  b.cu_seqlens = f.cu_seqlens;
  REQUIRE(f.kvb.numel() > std::int64_t{1} << 31);
  for (const KernelPath path : {KernelPath::automatic, KernelPath::plain}) {
    device.context().path = path;
    run(device.backend(), ops.forward);
    run(device.backend(), ops.backward);
    run(device.backend(), f);
    run(device.backend(), b);
    const auto check = [&](ConstTensorView all, ConstTensorView document) {
      const auto want = download(document, device.stream());
      for (const std::int64_t d : {std::int64_t{0}, kDocuments / 2, kDocuments - 1})
        CHECK(same_bits(download(all.rows(d * kTokens, (d + 1) * kTokens), device.stream()).view(),
                        want.view()));
    };
    check(f.o, ops.forward.o);
    check(b.dq, ops.backward.dq);
    check(b.dkvb, ops.backward.dkvb);
    check(b.dkr, ops.backward.dkr);
  }
}

namespace {

// A tensor of normal numbers; a period that no size divides keeps it cheap to make.
TensorView fast_normal(DeviceAttention& device, Shape shape, DType dtype, std::uint64_t key) {
  constexpr std::size_t kPeriod = 1000003;
  const Values some = attention_test::normal(kPeriod, key);
  Values all(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < all.size(); ++i)
    all[i] = some[i % kPeriod];
  return device.upload(all, shape, dtype);
}

// Of one document, whose last `queries` tokens attend to all `keys` so far. dr: shared channels, 0 for none.
AttentionForward timed_forward(DeviceAttention& device,
                               std::int64_t queries,
                               std::int64_t keys,
                               std::int64_t heads,
                               std::int64_t dr,
                               const TensorView& selected = {}) {
  return {.o = device.poisoned({queries, heads, 128}, DType::f32),
          .lse = device.poisoned({heads, queries}, DType::f32),
          .max_logit = device.poisoned({heads}, DType::f32),
          .q = fast_normal(device, {queries, heads, 128 + dr}, DType::bf16, 1),
          .kvb = fast_normal(device, {keys, heads, 256}, DType::bf16, 2),
          .kr = dr > 0 ? fast_normal(device, {keys, dr}, DType::bf16, 3) : TensorView(),
          .cu_seqlens = device.upload(Ints{0, static_cast<std::int32_t>(keys)}, {2}),
          .selected = selected,
          .scale = 0.07,
          .accumulate_max = false};
}

AttentionBackward timed_backward(DeviceAttention& device, const AttentionForward& f) {
  return {.dq = device.poisoned(f.q.shape(), DType::bf16),
          .dkvb = device.poisoned(f.kvb.shape(), DType::bf16),
          .dkr = f.kr.empty() ? TensorView() : device.poisoned(f.kr.shape(), DType::bf16),
          .d_o = fast_normal(device, f.o.shape(), DType::f32, 4),
          .o = f.o,
          .lse = f.lse,
          .q = f.q,
          .kvb = f.kvb,
          .kr = f.kr,
          .cu_seqlens = f.cu_seqlens,
          .selected = f.selected,
          .scale = f.scale};
}

template <class Op>
double median_ms(DeviceAttention& device, const Op& op, int samples = 30) {
  constexpr int kPerSample = 3;
  std::vector<double> ms;
  for (int i = -2; i < samples; ++i) {
    device.stream().synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int j = 0; j < kPerSample; ++j)
      run(device.backend(), op);
    device.stream().synchronize();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    if (i >= 0) ms.push_back(took.count() / kPerSample);
  }
  const auto middle = ms.begin() + samples / 2;
  std::nth_element(ms.begin(), middle, ms.end());
  return *middle;
}

}  // namespace

TEST_CASE("Speed of attention on CUDA at 8192 tokens and 32 heads", "[.bench]") {
  MOESAIC_NEEDS_CUDA();
  constexpr std::int64_t kTokens = 8192, kHeads = 32, kSelected = 2048;
  DeviceAttention device;
  for (const std::int64_t dr : {64, 0}) {
    for (const bool sparse : {false, true}) {
      const TensorView selected =
          sparse ? device.upload(spread_selection(kTokens, kSelected), {kTokens, kSelected})
                 : TensorView();
      const AttentionForward f = timed_forward(device, kTokens, kTokens, kHeads, dr, selected);
      const AttentionBackward b = timed_backward(device, f);
      // Of the causal half, also with a selection.
      const double flops = 1.0 * kTokens * kTokens * kHeads * static_cast<double>(256 + dr);
      const double forward = median_ms(device, f), backward = median_ms(device, b);
      std::printf(
          "attention %ld x %ld, 128 + %ld, 128, %s: forward %.3f ms, %.0f TFLOP/s; backward %.3f "
          "ms, %.0f TFLOP/s (2.5 x forward)\n",
          static_cast<long>(kTokens),
          static_cast<long>(kHeads),
          static_cast<long>(dr),
          sparse ? "2048 selected" : "all keys",
          forward,
          flops / forward * 1e-9,
          backward,
          2.5 * flops / backward * 1e-9);
      CHECK(device.ran().find("plain") == std::string::npos);
      device.forget();
    }
  }
}

TEST_CASE("Speed of attention's backward on CUDA: 8192 queries against 16384 keys", "[.bench]") {
  MOESAIC_NEEDS_CUDA();
  constexpr std::int64_t kQueries = 8192, kKeys = 16384, kHeads = 16, kShared = 64;
  DeviceAttention device(std::size_t{4} << 30);
  const AttentionForward f = timed_forward(device, kQueries, kKeys, kHeads, kShared);
  const AttentionBackward b = timed_backward(device, f);
  run(device.backend(), f);
  const double pairs = kQueries * (kKeys - kQueries / 2.0),
               flops = 5 * pairs * kHeads * static_cast<double>(256 + kShared);
  for (const KernelPath path : {KernelPath::automatic, KernelPath::plain}) {
    device.context().path = path;
    const double ms = median_ms(device, b, path == KernelPath::plain ? 3 : 30);
    std::printf("attention backward %ld of %ld x %ld, 128 + %ld, 128, %s: %.2f ms, %.0f TFLOP/s\n",
                static_cast<long>(kQueries),
                static_cast<long>(kKeys),
                static_cast<long>(kHeads),
                static_cast<long>(kShared),
                path == KernelPath::plain ? "plain" : "tiled",
                ms,
                flops / ms * 1e-9);
  }
}

}  // namespace moesaic::test
