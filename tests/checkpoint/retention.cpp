#include "core/checkpoint/retention.h"

#include "tests/checkpoint/support.h"

namespace moesaic {
namespace {

using Steps = std::vector<std::int64_t>;

TEST_CASE("keep_last with 0, 1, k - 1, k and k + 1 checkpoints") {
  const Steps all{10, 20, 30, 40};
  const auto first = [&](std::size_t n) {
    return Steps(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(n));
  };
  const std::int64_t k = 3;
  REQUIRE(steps_to_delete(first(0), 99, k, 0).empty());
  REQUIRE(steps_to_delete(first(1), 10, k, 0).empty());
  REQUIRE(steps_to_delete(first(2), 20, k, 0).empty());
  REQUIRE(steps_to_delete(first(3), 30, k, 0).empty());
  REQUIRE(steps_to_delete(first(4), 40, k, 0) == Steps{10});
  REQUIRE(steps_to_delete(all, 40, 1, 0) == Steps{10, 20, 30});
  REQUIRE(steps_to_delete(all, 40, 0, 0).empty());
  REQUIRE(steps_to_delete(all, 40, INT64_MAX, 0).empty());
}

TEST_CASE("keep_every and the checkpoint just saved stay") {
  REQUIRE(steps_to_delete(Steps{0, 50, 100, 150, 200, 250, 300}, 300, 2, 100) == Steps{50, 150});
  REQUIRE(steps_to_delete(Steps{30, 10, 20}, 30, 1, 0) == Steps{10, 20});  // any order
  // Continued from an older step: the new one is not the newest by number, and still stays.
  REQUIRE(steps_to_delete(Steps{100, 200, 300, 120}, 120, 2, 0) == Steps{100});
  REQUIRE_THROWS_AS(steps_to_delete(Steps{1}, 1, -1, 0), InternalError);
}

TEST_CASE("saving deletes by the rule, and nothing that is no checkpoint") {
  const test::TemporaryFolder dir;
  const auto root = dir.path() / "checkpoints";
  std::filesystem::create_directories(root / "step-00000001");  // no manifest
  test::write_file(root / "notes.txt", "mine");
  for (std::int64_t step = 10; step <= 60; step += 10) {
    test::save_small(root, step, 2, 30);
    const auto list = list_checkpoints(root);
    REQUIRE(list.back().step == step);
    REQUIRE(list.size() >= std::min<std::size_t>(2, static_cast<std::size_t>(step / 10)));
  }
  Steps steps;
  for (const auto& c : list_checkpoints(root))
    steps.push_back(c.step);
  REQUIRE(steps == Steps{30, 50, 60});
  REQUIRE(std::filesystem::exists(root / "step-00000001"));
  REQUIRE(test::read_file(root / "notes.txt") == "mine");
  for (const auto& entry : std::filesystem::directory_iterator(root)) {
    REQUIRE_FALSE(entry.path().filename().string().starts_with(".tmp-"));
  }
}

TEST_CASE("a rule that an interrupted save did not come to is applied by itself") {
  const test::TemporaryFolder dir;
  for (std::int64_t step = 10; step <= 50; step += 10)
    test::save_small(dir.path(), step, 0, 0);
  const auto steps = [&] {
    Steps list;
    for (const auto& c : list_checkpoints(dir.path()))
      list.push_back(c.step);
    return list;
  };
  apply_retention(dir.path(), 50, 0, 0);
  REQUIRE(steps() == Steps{10, 20, 30, 40, 50});
  apply_retention(dir.path(), 50, 2, 20);
  REQUIRE(steps() == Steps{20, 40, 50});
  apply_retention(dir.path(), 20, 1, 0);  // the one that a run goes on from stays
  REQUIRE(steps() == Steps{20, 50});
  apply_retention(dir.path() / "none", 20, 1, 0);
}

}  // namespace
}  // namespace moesaic
