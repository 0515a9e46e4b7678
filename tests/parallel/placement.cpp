#include "parallel/placement.h"

#include <set>

#include "tests/support/catch.h"

namespace moesaic {
namespace {

TEST_CASE("the blocks of all ranks tile the tensor") {
  MeshConfig c;
  c.ep = 2;
  c.etp = 2;
  const auto layout = std::make_shared<MeshLayout>(c, 8);
  const Shape global{6, 8, 3};
  const Placement experts{{{Axis::ep, 0}, {Axis::etp, 1}}, AxisFamily::expert};
  REQUIRE(experts.gradient_axes() == std::vector<Axis>{Axis::edp});
  std::set<std::pair<std::int64_t, std::int64_t>> offsets;
  for (int r = 0; r < 8; ++r) {
    const auto b = local_block("experts.w", global, experts, {layout, r});
    REQUIRE(b.extent == Shape{3, 4, 3});
    REQUIRE(b.offset ==
            Shape{3 * layout->coordinate(Axis::ep, r), 4 * layout->coordinate(Axis::etp, r), 0});
    offsets.insert({b.offset[0], b.offset[1]});
  }
  REQUIRE(offsets.size() == 4);
  // Two axes on one dimension: the first is the outer one.
  const Placement nested{{{Axis::ep, 1}, {Axis::etp, 1}}, AxisFamily::expert};
  const auto b = local_block("w", global, nested, {layout, 2});  // ep 1, etp 0
  REQUIRE((b.offset[1] == 4 && b.extent[1] == 2));
  const auto whole = local_block("norm", global, {}, {layout, 5});
  REQUIRE((whole.extent == global && whole.offset == Shape{0, 0, 0}));
}

TEST_CASE("splits that do not divide are the user's error, impossible ones ours") {
  MeshConfig c;
  c.tp = 4;
  const auto layout = std::make_shared<MeshLayout>(c, 4);
  REQUIRE_THROWS_WITH(
      local_block("attn.o", {6, 8}, {{{Axis::tp, 0}}}, {layout, 0}),
      "attn.o [6, 8]: parallel.tp = 4 does not divide the 6 elements of dimension 0");
  REQUIRE_THROWS_AS(local_block("attn.o", {6, 8}, {{{Axis::tp, 0}}}, {layout, 0}), UsageError);
  REQUIRE_THROWS_AS(local_block("attn.o", {6, 8}, {{{Axis::tp, 2}}}, {layout, 0}), InternalError);
  REQUIRE_THROWS_AS(local_block("attn.o", {16, 8}, {{{Axis::tp, 0}, {Axis::tp, 1}}}, {layout, 0}),
                    InternalError);
}

TEST_CASE("flat shards cover everything once") {
  for (const std::int64_t n : {0, 1, 3, 7, 1000}) {
    std::int64_t at = 0;
    for (int i = 0; i < 4; ++i) {
      const auto r = flat_shard(n, i, 4);
      REQUIRE(r.begin == at);
      REQUIRE((r.end - r.begin == n / 4 || r.end - r.begin == n / 4 + 1));
      at = r.end;
    }
    REQUIRE(at == n);
  }
  REQUIRE_THROWS_AS(flat_shard(10, 4, 4), InternalError);
}

}  // namespace
}  // namespace moesaic
