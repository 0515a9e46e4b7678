#include "kernels/ops/elementwise.h"

#include "kernels/ops/embedding.h"
#include "kernels/ops/rope.h"
#include "tests/ops/op_test.h"

namespace moesaic::test {

TEST_CASE("elementwise ops") {
  Rig rig;
  const TensorView a = rig.values({1, 2, 3}, {3}, DType::bf16),
                   b = rig.values({0.5, -2, 1e-3}, {3}, DType::bf16),
                   y = rig.poisoned({3}, DType::bf16);
  rig.run(Add{y, a, b});
  CHECK(read(y) == std::vector<double>{1.5, 0.0, 3.0});
  const TensorView sum = rig.values({1, 1, 1}, {3}, DType::f32);
  rig.run(Accumulate{sum, a, 0.25});
  CHECK(read(sum) == std::vector<double>{1.25, 1.5, 1.75});
  const TensorView d = rig.poisoned({3}, DType::f64);
  rig.run(Cast{d, sum});
  CHECK(read(d) == read(sum));
  rig.run(Cast{y, rig.values({1 + 0x1p-8, 1 + 3 * 0x1p-8, -1e40}, {3}, DType::f64)});
  CHECK(read(y)[0] == 1.0);  // ties to even, both ways
  CHECK(read(y)[1] == 1 + 0x1p-6);
  CHECK(read(y)[2] == -INFINITY);
  const TensorView n = rig.poisoned({2}, DType::i32);
  rig.run(Fill{n, -7});
  CHECK(n.as<std::int32_t>()[1] == -7);
  rig.run(Fill{y, 0.5});
  CHECK(read(y) == std::vector<double>{0.5, 0.5, 0.5});
  rig.run(Scale{sum, sum, rig.values({4.0}, {1}, DType::f32), 0.5});
  CHECK(read(sum) == std::vector<double>{2.5, 3.0, 3.5});
}

TEST_CASE("embedding: gather, and a scatter that adds repeated ids in token order") {
  Rig rig;
  const TensorView table = rig.random({50, 6}, DType::f32, 1), ids = rig.ints({7, 0, 7, 49, 7}),
                   y = rig.poisoned({5, 6}, DType::bf16);
  rig.run(EmbeddingForward{y, ids, table});
  CHECK(read(y)[6 * 3] == static_cast<double>(static_cast<float>(bf16(table.as<float>()[6 * 49]))));
  const TensorView dy = rig.random({5, 6}, DType::f32, 2), d = rig.random({50, 6}, DType::f32, 3);
  const TensorView want = rig.values(read(d), {50, 6}, DType::f32);
  for (int t = 0; t < 5; ++t) {
    for (int c = 0; c < 6; ++c)
      want.as<float>()[ids.as<std::int32_t>()[t] * 6 + c] += dy.as<float>()[t * 6 + c];
  }
  rig.run(EmbeddingBackward{d, ids, dy});
  CHECK(same_bits(d, want));
  CHECK_THROWS_AS(rig.run(EmbeddingForward{y, rig.ints({0, 0, 0, 0, 50}), table}), InternalError);
  CHECK_THROWS_AS(rig.run(EmbeddingBackward{d, rig.ints({0, 0, -1, 0, 0}), dy}), InternalError);
  check_threads([](Rig& r) {
    std::vector<std::int32_t> many(1000);
    for (std::size_t i = 0; i < many.size(); ++i)
      many[i] = static_cast<std::int32_t>(mix64(i) % 37);
    const TensorView g = r.zeros({37, 20}, DType::f32);
    r.run(EmbeddingBackward{g, r.ints(many), r.random({1000, 20}, DType::bf16, 5)});
    return std::vector<TensorView>{g};
  });
}

TEST_CASE("embedding: blocks of a table add up to the whole, forward and backward, to the bit") {
  Rig rig;
  constexpr std::int64_t kWords = 12, kWidth = 5, kTokens = 9;
  const TensorView table = rig.random({kWords, kWidth}, DType::f32, 1),
                   ids = rig.ints({0, 3, 4, 11, 3, 7, 8, 5, 3}),
                   y = rig.poisoned({kTokens, kWidth}, DType::f32),
                   dy = rig.random({kTokens, kWidth}, DType::f32, 2),
                   dtable = rig.random({kWords, kWidth}, DType::f32, 3);
  const TensorView parts = rig.values(read(dtable), dtable.shape(), DType::f32);
  rig.run(EmbeddingForward{y, ids, table});
  rig.run(EmbeddingBackward{dtable, ids, dy});
  for (const std::int64_t blocks : {2, 3, 12}) {
    INFO(blocks << " blocks");
    const std::int64_t words = kWords / blocks;
    const TensorView sum = rig.zeros(y.shape(), DType::f32),
                     d = rig.values(read(parts), dtable.shape(), DType::f32);
    for (std::int64_t b = 0; b < blocks; ++b) {
      const TensorView share = rig.poisoned(y.shape(), DType::f32);
      rig.run(EmbeddingForward{.y = share,
                               .ids = ids,
                               .table = table.rows(b * words, (b + 1) * words),
                               .block = b,
                               .blocks = blocks});
      rig.run(Accumulate{sum, share});
      rig.run(EmbeddingBackward{.dtable = d.rows(b * words, (b + 1) * words),
                                .ids = ids,
                                .dy = dy,
                                .block = b,
                                .blocks = blocks});
    }
    CHECK(same_bits(sum, y));
    CHECK(same_bits(d, dtable));
  }
  const TensorView half = table.rows(0, 6), one = rig.zeros({1, kWidth}, DType::f32);
  const auto look_up = [&](std::int32_t id, std::int64_t block) {
    rig.run(EmbeddingForward{
        .y = one, .ids = rig.ints({id}), .table = half, .block = block, .blocks = 2});
  };
  CHECK_NOTHROW(look_up(11, 0));
  CHECK_THROWS_AS(look_up(12, 1), InternalError);
  CHECK_THROWS_AS(look_up(-1, 1), InternalError);
  CHECK_THROWS_AS(look_up(0, 2), InternalError);
}

TEST_CASE("RoPE: angles, untouched columns, and the gradient is the opposite rotation") {
  Rig rig;
  constexpr std::int64_t kTokens = 4, kHeads = 2, kWidth = 11, kBegin = 3, kRotary = 6;
  const TensorView positions = rig.ints({0, 1, 5, 100000});
  for (const bool interleaved : {true, false}) {
    const TensorView x = rig.random({kTokens, kHeads, kWidth}, DType::f64, 1);
    const auto before = read(x);
    Rope op{.x = x,
            .positions = positions,
            .begin = kBegin,
            .rotary_width = kRotary,
            .theta = 100.0,
            .interleaved = interleaved};
    rig.run(op);
    const auto after = read(x);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        const auto row = static_cast<std::size_t>((t * kHeads + h) * kWidth);
        for (std::size_t c = 0; c < kWidth; ++c) {
          if (c < kBegin || c >= kBegin + kRotary) CHECK(after[row + c] == before[row + c]);
        }
        for (std::size_t j = 0; j < kRotary / 2; ++j) {
          const std::size_t a = row + kBegin + (interleaved ? 2 * j : j),
                            b = interleaved ? a + 1 : a + kRotary / 2;
          const double angle = positions.as<std::int32_t>()[t] *
                               std::pow(100.0, -2.0 * static_cast<double>(j) / kRotary);
          CHECK(after[a] ==
                Approx(before[a] * std::cos(angle) - before[b] * std::sin(angle)).margin(1e-12));
          CHECK(after[b] ==
                Approx(before[a] * std::sin(angle) + before[b] * std::cos(angle)).margin(1e-12));
        }
      }
    }
    op.inverse = true;
    rig.run(op);
    CHECK(distance(read(x), before) < 1e-12);
    // <R x, c> has gradient R^-1 c.
    const TensorView cot = rig.random(x.shape(), DType::f64, 2),
                     dx = rig.values(read(cot), x.shape(), DType::f64);
    Rope back = op;
    back.x = dx;
    rig.run(back);
    check_gradient(x, dx, [&] {
      const TensorView y = rig.values(read(x), x.shape(), DType::f64);
      Rope forward = op;
      forward.x = y;
      forward.inverse = false;
      rig.run(forward);
      return inner(y, cot);
    });
  }
}

}  // namespace moesaic::test
