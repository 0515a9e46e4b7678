#include "core/nn/row_blocks.h"

#include "tests/support/catch.h"

namespace moesaic {

TEST_CASE("Row blocks: equal runs of whole rows, neither few nor large") {
  for (const Shape& extent : {Shape{1, 7},
                              Shape{63, 5},
                              Shape{64, 4096},
                              Shape{131, 32},
                              Shape{7168, 2304},
                              Shape{129280, 7168},
                              Shape{50257, 768},
                              Shape{128, 4, 96},
                              Shape{3, 200000}}) {
    INFO(to_string(extent));
    const RowBlocks blocks(extent);
    const std::int64_t row = extent.numel() / extent[0];
    CHECK(blocks.count * blocks.elements == extent.numel());
    CHECK(blocks.elements % row == 0);
    CHECK(blocks.count >= std::min<std::int64_t>(64, extent[0]));
    CHECK(blocks.elements <= std::max<std::int64_t>(row, 262144));
  }
  CHECK(RowBlocks({7168, 2304}).elements == 112 * 2304);
  CHECK(RowBlocks({640, 10}).elements == 100);
}

TEST_CASE("Row blocks: a vector is one, a prime number of rows falls into rows") {
  CHECK(RowBlocks({4096}).count == 1);
  CHECK(RowBlocks({4096}).elements == 4096);
  CHECK(RowBlocks({1009, 16}).count == 1009);
}

}  // namespace moesaic
