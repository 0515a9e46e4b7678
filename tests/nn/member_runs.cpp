// Members of a family in runs, as kernels get them.
#include "core/nn/parameter_store.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

struct Runs {
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;
  bool operator==(const Runs&) const = default;
};

struct Family {
  Family() : params(kF32) {
    storage = params.declare({.name = "experts.{}.w1.weight", .shape = {2, 3}, .members = 7});
    params.seal(kCpu);
    params.initialize(1);  // fills the tables of slots too
  }
  // Also that a run's slots are its members'.
  Runs weights(const MemberVisit& visit) {
    Stream stream(kCpu, "test", Stream::Mode::immediate);
    Runs result;
    params.weights_of_members(storage, visit, stream, [&](const MemberRun& run) {
      result.runs.emplace_back(run.begin, run.end);
      CHECK(run.slots.shape() == Shape{7, 2, 3});
      REQUIRE(run.slot_of_member.numel() == run.end - run.begin);
      for (std::int64_t m = run.begin; m < run.end; ++m)
        CHECK(run.slot_of_member.as<std::int32_t>()[m - run.begin] == m);
    });
    return result;
  }
  ParameterStore params;
  StorageId storage;
};

}  // namespace

TEST_CASE("members on the device are one run, with rows or not") {
  Family family;
  const std::vector<std::int64_t> rows{0, 2, 3, 0, 1, 1, 5};
  CHECK_FALSE(family.params.wants_member_rows());
  CHECK(family.weights({}) == Runs{{{0, 7}}});
  CHECK(family.weights({.rows = rows}) == Runs{{{0, 7}}});
}

TEST_CASE("limited runs are neighbours with rows, the last first in backward") {
  Family family;
  const std::vector<std::int64_t> rows{0, 2, 3, 0, 1, 1, 5}, none(7, 0);
  family.params.limit_runs(2);
  CHECK(family.params.wants_member_rows());
  CHECK(family.weights({}) == Runs{{{0, 2}, {2, 4}, {4, 6}, {6, 7}}});
  CHECK(family.weights({.rows = rows}) == Runs{{{1, 3}, {4, 6}, {6, 7}}});
  CHECK(family.weights({.kind = tiers::VisitKind::backward, .rows = rows}) ==
        Runs{{{6, 7}, {4, 6}, {1, 3}}});
  CHECK(family.weights({.rows = none}).runs.empty());
}

TEST_CASE("gradients are asked for while there are some") {
  Family family;
  Stream stream(kCpu, "test", Stream::Mode::immediate);
  int calls = 0;
  const auto ask = [&] {
    family.params.gradients_of_members(
        family.storage, {.kind = tiers::VisitKind::backward}, stream, [&](const MemberRun& run) {
          ++calls;
          CHECK(run.slots.data() == family.params.grad(family.storage).data());
        });
  };
  CHECK(family.params.has_gradient(family.storage));
  ask();
  CHECK(calls == 1);
  family.params.set_frozen(family.params.params_of(family.storage).front(), true);
  CHECK_FALSE(family.params.has_gradient(family.storage));
  CHECK_THROWS_AS(ask(), InternalError);
}

}  // namespace moesaic::test
