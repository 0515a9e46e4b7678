#include "kernels/ops/embedding.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

constexpr DType kTypes[] = {DType::f64, DType::f32, DType::bf16};

struct Size {
  std::int64_t tokens, vocabulary, d;
  bool even = false;  // every word alike; else few words make up most of the text
};
const Size kSizes[] = {{1, 1, 1},
                       {0, 5, 8},
                       {33, 3, 7},
                       {1000, 300, 128},
                       {257, 17, 1032},
                       {500, 65536, 40, true},
                       {8192, 163840, 16},
                       {9001, 1, 24},             // one word only
                       {300, 1500000, 8, true}};  // more than 4096 words for each of 256 owners

void fill_ids(TensorView ids, const Size& s, std::uint64_t key) {
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const double u = uniform(key, static_cast<std::uint64_t>(t));
    const double share = s.even ? u : u * u * u * u * u * u;
    ids.as<std::int32_t>()[t] = static_cast<std::int32_t>(std::min<double>(
        static_cast<double>(s.vocabulary) * share, static_cast<double>(s.vocabulary - 1)));
  }
}

}  // namespace

TEST_CASE("Embedding forward on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    if (s.vocabulary > 200000) continue;  // nothing new for a gather
    for (const DType from : kTypes) {
      for (const DType to : kTypes) {
        INFO(s.tokens << " tokens of " << s.vocabulary << " x " << s.d << ", " << name(from)
                      << " to " << name(to));
        const Twin ids({s.tokens}, DType::i32), table({s.vocabulary, s.d}, from),
            y({s.tokens, s.d}, to);
        fill_ids(ids.initial.view(), s, 1);
        fill_normal(table.initial.view().rows(0, std::min<std::int64_t>(s.vocabulary, 4096)), 2);
        fill_normal(y.initial.view(), 3);
        require_cuda_matches_cpu(both, {&ids, &table, &y}, {{&y, 0}}, [&](auto side) {
          return EmbeddingForward{.y = side(y), .ids = side(ids), .table = side(table)};
        });
      }
    }
  }
}

TEST_CASE("Embedding by blocks of words on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const Size& s :
       {Size{0, 6, 8}, Size{33, 3, 7}, Size{1000, 300, 128}, Size{500, 65536, 40}}) {
    for (const std::int64_t blocks : {std::int64_t{1}, std::int64_t{3}, s.vocabulary}) {
      if (s.vocabulary % blocks != 0) continue;
      const std::int64_t words = s.vocabulary / blocks;
      for (const std::int64_t block : {std::int64_t{0}, blocks / 2, blocks - 1}) {
        INFO(s.tokens << " tokens, block " << block << " of " << blocks << " x " << s.d);
        const Twin ids({s.tokens}, DType::i32), table({words, s.d}, DType::bf16),
            y({s.tokens, s.d}, DType::bf16), dtable({words, s.d}, DType::f32);
        fill_ids(ids.initial.view(), s, 1);
        fill_normal(table.initial.view(), 2);
        fill_normal(y.initial.view(), 3);
        fill_normal(dtable.initial.view(), 4);
        require_cuda_matches_cpu(both, {&ids, &table, &y}, {{&y, 0}}, [&](auto side) {
          return EmbeddingForward{.y = side(y),
                                  .ids = side(ids),
                                  .table = side(table),
                                  .block = block,
                                  .blocks = blocks};
        });
        require_cuda_matches_cpu(both, {&ids, &dtable, &y}, {{&dtable, 0}}, [&](auto side) {
          return EmbeddingBackward{.dtable = side(dtable),
                                   .ids = side(ids),
                                   .dy = side(y),
                                   .block = block,
                                   .blocks = blocks};
        });
      }
    }
  }
}

// The order of a word's sums is that of the tokens on both sides, and so are the rounding points.
TEST_CASE("Embedding backward on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    for (const auto& [grad, table] : {std::pair{DType::f64, DType::f64},
                                      {DType::f32, DType::f32},
                                      {DType::bf16, DType::f32},
                                      {DType::bf16, DType::bf16}}) {
      INFO(s.tokens << " tokens of " << s.vocabulary << " x " << s.d << ", " << name(grad)
                    << " into " << name(table));
      if (s.vocabulary * s.d > 3000000 && table == DType::f64)
        continue;  // keeps the host's share small
      const Twin ids({s.tokens}, DType::i32), dtable({s.vocabulary, s.d}, table),
          dy({s.tokens, s.d}, grad);
      fill_ids(ids.initial.view(), s, 1);
      fill_normal(dtable.initial.view().rows(0, std::min<std::int64_t>(s.vocabulary, 1024)), 2);
      fill_normal(dy.initial.view(), 3);
      require_cuda_matches_cpu(both, {&ids, &dtable, &dy}, {{&dtable, 0}}, [&](auto side) {
        return EmbeddingBackward{.dtable = side(dtable), .ids = side(ids), .dy = side(dy)};
      });
    }
  }
}

}  // namespace moesaic::test
