// A thousand runs of each tensor-core kernel with copy engine and barriers, bit by bit. What a race checker sees of shared
// memory does not cover the copy engine's writes; a missing fence or a barrier's wrong phase shows as a rare other bit.
// Runs are enqueued back to back, so that the blocks of one meet the last ones of another; in a build with
// MOESAIC_CUDA_STRESS the warps of a block pause at random in their barriers, too. MOESAIC_REPEATS=n makes n runs: 1 is enough
// for a tool that watches every access (scripts/gpu_sanitize.sh).
#include <algorithm>
#include <cstdlib>
#include <functional>

#include "kernels/ops/indexer.h"
#include "tests/cuda/attention_run.h"
#include "tests/cuda/grouped_support.h"
#include "tests/cuda/kda_support.h"

namespace moesaic::test {
namespace {

constexpr int kMostSlots = 20;  // runs between two looks at the results

int repeats() {
  const char* text = std::getenv("MOESAIC_REPEATS");
  return text == nullptr ? 1000 : std::max(1, std::atoi(text));
}

const auto kSide = [](const Twin& t) { return t.device.view(); };

struct Result {
  Shape shape;
  DType dtype;
  int start = 0xff;  ///< every byte of it before a run: poison, or 0 for what the op adds to
};
using Views = std::vector<TensorView>;

/// Runs `body` repeats() times on results of its own. The number of results that have other bits than those of the
/// first run.
int other_bits(BackendOwner& owner,
               const std::vector<Result>& results,
               const std::function<void(const Views&)>& body) {
  const int runs = repeats();
  std::vector<std::vector<OwnedTensor>> slots(static_cast<std::size_t>(std::min(runs, kMostSlots)));
  for (auto& slot : slots) {
    for (const auto& r : results)
      slot.emplace_back(r.shape, r.dtype, kCuda);
  }
  std::vector<OwnedTensor> first;
  int other = 0;
  for (int done = 0; done < runs; done += static_cast<int>(slots.size())) {
    owner.scratch().poison(owner.stream());
    for (const auto& slot : slots) {
      for (std::size_t i = 0; i < results.size(); ++i)
        fill_bytes(slot[i].view(), results[i].start, owner.stream());
    }
    for (const auto& slot : slots) {
      Views views;
      for (const auto& tensor : slot)
        views.push_back(tensor.view());
      body(views);
    }
    for (const auto& slot : slots) {
      for (std::size_t i = 0; i < results.size(); ++i) {
        auto host = download(slot[i].view(), owner.stream());
        if (first.size() == i) {
          first.push_back(std::move(host));
          continue;
        }
        other += same_bits(host.view(), first[i].view()) ? 0 : 1;
      }
    }
  }
  return other;
}

BackendOwner device_with_scratch() {
  return BackendOwner({.device = kCuda, .scratch_bytes = std::size_t{64} << 20, .name = "repeat"});
}

}  // namespace

TEST_CASE("A thousand runs of the tensor-core kernels: KDA", "[cuda][repeat]") {
  MOESAIC_NEEDS_CUDA();
  BackendOwner owner = device_with_scratch();
  const PathChoice path(owner, KernelPath::automatic);
  const KdaCase c{.cu = {0, 200, 200, 329, 394},
                  .heads = 6,
                  .K = 128,
                  .V = 128,
                  .chunk_size = 64,
                  .dtype = DType::bf16};
  const KdaTwins t(c);
  for (const auto* twin : t.all())
    twin->reset(owner.stream());
  const Shape wide = c.k_shape();
  const int other = other_bits(owner,
                               {{c.v_shape(), DType::bf16},
                                {c.state_shape(), DType::f32},
                                {t.saved.device.view().shape(), DType::f32, 0},
                                {wide, DType::bf16},
                                {wide, DType::bf16},
                                {c.v_shape(), DType::bf16},
                                {wide, DType::f32},
                                {{c.tokens(), c.heads}, DType::f32},
                                {c.state_shape(), DType::f32}},
                               [&](const Views& out) {
                                 auto forward = kda_forward(c, t, kSide);
                                 forward.o = out[0];
                                 forward.s_final = out[1];
                                 forward.saved = out[2];
                                 run(owner.backend(), forward);
                                 CHECK(path.ran() == "tiled");
                                 auto backward = kda_backward(c, t, kSide, out[2]);
                                 backward.dq = out[3];
                                 backward.dk = out[4];
                                 backward.dv = out[5];
                                 backward.dg = out[6];
                                 backward.dbeta = out[7];
                                 backward.ds0 = out[8];
                                 run(owner.backend(), backward);
                                 CHECK(path.ran() == "tiled");
                               });
  CHECK(other == 0);
}

TEST_CASE("A thousand runs of the tensor-core kernels: attention", "[cuda][repeat]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device(std::size_t{64} << 20);
  BackendOwner owner = device_with_scratch();
  const PathChoice path(owner, KernelPath::automatic);
  for (const std::int64_t k : {0, 60}) {
    INFO("k " << k);
    Problem p = attention_test::make_problem({150, 0, 331}, 4, 128, 64, 128);
    if (k > 0) attention_test::select_random(p, k);
    const auto ops = device.prepare(p, {.compute = DType::bf16});
    const auto& f = ops.forward;
    const int other = other_bits(owner,
                                 {{f.o.shape(), f.o.dtype()},
                                  {f.lse.shape(), f.lse.dtype()},
                                  {f.max_logit.shape(), f.max_logit.dtype()},
                                  {f.q.shape(), DType::bf16},
                                  {f.kvb.shape(), DType::bf16},
                                  {f.kr.shape(), DType::bf16}},
                                 [&](const Views& out) {
                                   auto forward = f;
                                   forward.o = out[0];
                                   forward.lse = out[1];
                                   forward.max_logit = out[2];
                                   run(owner.backend(), forward);
                                   CHECK(path.ran() == "tiled");
                                   auto backward = ops.backward;
                                   backward.o = out[0];
                                   backward.lse = out[1];
                                   backward.dq = out[3];
                                   backward.dkvb = out[4];
                                   backward.dkr = out[5];
                                   run(owner.backend(), backward);
                                   CHECK(path.ran() == "tiled");
                                 });
    CHECK(other == 0);
    device.forget();
  }
}

TEST_CASE("A thousand runs of the tensor-core kernels: grouped products", "[cuda][repeat]") {
  MOESAIC_NEEDS_CUDA();
  BackendOwner owner = device_with_scratch();
  const PathChoice path(owner, KernelPath::automatic);
  // Experts that need tiles of each number of rows, and none.
  for (const auto& rows : {std::vector<std::int32_t>{0, 17, 64, 90, 1, 33, 0, 48},
                           std::vector<std::int32_t>{130, 0, 150, 75}}) {
    const GroupedTensors t(routing_of(rows, 0), 264, 456, DType::bf16, DType::f32);
    for (const auto* twin : t.all())
      twin->reset(owner.stream());
    const auto shape = [](const Twin& twin) { return twin.device.view().shape(); };
    const int other = other_bits(
        owner,
        {{shape(t.y), DType::f32}, {shape(t.dx), DType::f32}, {shape(t.dw), DType::f32, 0}},
        [&](const Views& out) {
          auto forward = t.forward(kSide, false);
          forward.y = out[0];
          run(owner.backend(), forward);
          CHECK(path.ran() == "tiled");
          auto input = t.backward_input(kSide, false);
          input.dx = out[1];
          run(owner.backend(), input);
          CHECK(path.ran() == "tiled");
          auto weight = t.backward_weight(kSide);
          weight.dw = out[2];
          run(owner.backend(), weight);
          CHECK(path.ran() == "tiled");
        });
    CHECK(other == 0);
  }
}

TEST_CASE("A thousand runs of the tensor-core kernels: indexer", "[cuda][repeat]") {
  MOESAIC_NEEDS_CUDA();
  DeviceAttention device(std::size_t{64} << 20);
  BackendOwner owner = device_with_scratch();
  const PathChoice path(owner, KernelPath::automatic);
  Problem p = attention_test::make_problem({150, 0, 331}, 4, 128, 64, 128);
  const auto attention = device.prepare(p, {.compute = DType::bf16, .backward = false}).forward;
  run(device.backend(), attention);
  device.stream().synchronize();
  const std::int64_t n = p.tk, heads = 64, dim = 128, k = 100;
  const Twin qi({n, heads, dim}, DType::bf16), ki({n, dim}, DType::bf16), w({n, heads}, DType::f32);
  std::uint64_t key = 1;
  for (const auto* twin : {&qi, &ki, &w}) {
    fill_normal(twin->initial.view(), key++);
    twin->reset(owner.stream());
  }
  const int other = other_bits(owner,
                               {{{n, k}, DType::i32},
                                {{n, n}, DType::f32},
                                {{1}, DType::f32, 0},
                                {{n, heads, dim}, DType::bf16},
                                {{n, dim}, DType::bf16},
                                {{n, heads}, DType::f32}},
                               [&](const Views& out) {
                                 run(owner.backend(),
                                     IndexerSelect{.selected = out[0],
                                                   .scores = out[1],
                                                   .qi = kSide(qi),
                                                   .ki = kSide(ki),
                                                   .w = kSide(w),
                                                   .cu_seqlens = attention.cu_seqlens,
                                                   .given = {}});
                                 CHECK(path.ran() == "tiled");
                                 run(owner.backend(),
                                     IndexerLoss{.kl = out[2],
                                                 .dqi = out[3],
                                                 .dki = out[4],
                                                 .dw = out[5],
                                                 .qi = kSide(qi),
                                                 .ki = kSide(ki),
                                                 .w = kSide(w),
                                                 .q = attention.q,
                                                 .kvb = attention.kvb,
                                                 .kr = attention.kr,
                                                 .lse = attention.lse,
                                                 .cu_seqlens = attention.cu_seqlens,
                                                 .selected = out[0],
                                                 .tokens = {},
                                                 .dn = 128,
                                                 .scale = p.scale});
                                 CHECK(path.ran() == "tiled");
                               });
  CHECK(other == 0);
  device.forget();
}

}  // namespace moesaic::test
