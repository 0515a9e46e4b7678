// In which order a rank uses its experts.
#include "core/train/tier_schedule.h"

#include <algorithm>
#include <map>

#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

using tiers::Visit;
using tiers::VisitKind;

std::vector<Visit> visits_of(const std::vector<std::string>& overrides) {
  const config::Config config = hybrid_config(overrides);
  Run run(config);
  return expert_visits(config, make_phases(config).front(), *run.model, MeshPosition());
}

}  // namespace

TEST_CASE(
    "without a pipeline each micro-batch passes all layers with experts, and the MTP module last") {
  const std::vector<Visit> visits =
      visits_of({"train.global_batch_size=2", "train.micro_batch_size=1"});
  const std::vector<Visit> expected{{0, VisitKind::forward, 0},
                                    {1, VisitKind::forward, 0},
                                    {2, VisitKind::forward, 0},
                                    {2, VisitKind::backward, 0},
                                    {1, VisitKind::backward, 0},
                                    {0, VisitKind::backward, 0},
                                    {0, VisitKind::forward, 1},
                                    {1, VisitKind::forward, 1},
                                    {2, VisitKind::forward, 1},
                                    {2, VisitKind::backward, 1},
                                    {1, VisitKind::backward, 1},
                                    {0, VisitKind::backward, 1},
                                    {2, VisitKind::update, 0},
                                    {1, VisitKind::update, 0},
                                    {0, VisitKind::update, 0}};
  CHECK(visits == expected);
}

TEST_CASE("a stage's visits follow its actions, chunk by chunk") {
  // Chunks 0 and 3 lie on stage 0 of a vee, 1 and 2 on stage 1; chunk 1 has no experts.
  const pipeline::Schedule schedule = pipeline::make_schedule(
      pipeline::Kind::zero_bubble, {.stages = 2, .chunks = 2, .micro_batches = 4});
  const std::vector<std::int32_t> layers{2, 0, 3, 1};
  for (int stage = 0; stage < 2; ++stage) {
    const std::int32_t here = 3;
    std::vector<Visit> visits = pipeline_visits(schedule, stage, layers);
    REQUIRE(visits.size() == static_cast<std::size_t>(here * (2 * 4 + 1)));
    // Updates come last, from the last layer to the first.
    for (std::int32_t l = 0; l < here; ++l)
      CHECK(visits[visits.size() - 1 - static_cast<std::size_t>(l)] ==
            (Visit{l, VisitKind::update, 0}));
    visits.resize(visits.size() - static_cast<std::size_t>(here));
    // Each layer is passed once each way for every micro-batch, forward first; layers of a chunk one after the other.
    std::map<std::pair<std::int32_t, std::int32_t>, std::vector<std::size_t>> at;
    for (std::size_t i = 0; i < visits.size(); ++i) {
      auto& positions = at[{visits[i].layer, visits[i].micro_batch}];
      CHECK((visits[i].kind == VisitKind::forward) == positions.empty());
      positions.push_back(i);
    }
    CHECK(at.size() == static_cast<std::size_t>(here * 4));
    for (std::int32_t m = 0; m < 4; ++m) {
      const std::int32_t first = 0, second = 1;
      CHECK(at[{second, m}][0] == at[{first, m}][0] + 1);
      CHECK(at[{first, m}][1] == at[{second, m}][1] + 1);
    }
  }
}

TEST_CASE("updates beside the next forward stay ahead of it and end before the first backward") {
  using tiers::step_visits;
  const auto visit = [](std::int32_t layer, VisitKind kind) { return Visit{layer, kind, 0}; };
  constexpr auto kForward = VisitKind::forward, kBackward = VisitKind::backward,
                 kUpdate = VisitKind::update;
  const auto beside = [](std::int32_t layers) {
    return with_updates_beside(
        step_visits(layers, 1, tiers::VisitOrder::horizontal, tiers::Updates::dense));
  };
  CHECK(beside(1) ==
        std::vector<Visit>{visit(0, kForward), visit(0, kBackward), visit(0, kUpdate)});
  CHECK(beside(5) == std::vector<Visit>{visit(0, kForward),
                                        visit(1, kUpdate),
                                        visit(2, kUpdate),
                                        visit(1, kForward),
                                        visit(3, kUpdate),
                                        visit(2, kForward),
                                        visit(4, kUpdate),
                                        visit(3, kForward),
                                        visit(4, kForward),
                                        visit(4, kBackward),
                                        visit(3, kBackward),
                                        visit(2, kBackward),
                                        visit(1, kBackward),
                                        visit(0, kBackward),
                                        visit(0, kUpdate)});
  // Any schedule: every layer has one update, before its first forward but for what the end of the step does.
  const pipeline::Schedule schedule = pipeline::make_schedule(
      pipeline::Kind::zero_bubble, {.stages = 2, .chunks = 2, .micro_batches = 4});
  for (int stage = 0; stage < 2; ++stage) {
    const std::vector<Visit> plain = pipeline_visits(schedule, stage, {2, 3, 3, 1});
    const std::vector<Visit> moved = with_updates_beside(plain);
    CHECK(moved.size() == plain.size());
    std::map<std::int32_t, int> updates;
    bool has_backward = false;
    for (std::size_t i = 0; i < moved.size(); ++i) {
      const Visit& v = moved[i];
      if (v.kind == kUpdate) {
        ++updates[v.layer];
        CHECK((!has_backward || i + 1 == moved.size()));
        continue;
      }
      has_backward = has_backward || v.kind == kBackward;
      if (v.layer > 0) CHECK(updates[v.layer] == 1);
    }
    for (const auto& [layer, count] : updates)
      CHECK(count == 1);
    CHECK(moved.back() == visit(0, kUpdate));
  }
}

TEST_CASE("updates beside the next forward are spread over the micro-batches of a layer") {
  using tiers::Updates;
  using tiers::VisitOrder;
  constexpr std::int32_t kLayers = 5, kMicroBatches = 4;
  std::vector<Visit> step;
  for (std::int32_t l = 0; l < kLayers; ++l)
    for (std::int32_t m = 0; m < kMicroBatches; ++m)
      step.push_back({l, VisitKind::forward, m});
  for (std::int32_t l = kLayers; l-- > 0;)
    for (std::int32_t m = 0; m < kMicroBatches; ++m)
      step.push_back({l, VisitKind::backward, m});
  CHECK(update_parts(step) == kMicroBatches);
  CHECK(update_parts(tiers::step_visits(3, 4, VisitOrder::horizontal, Updates::dense)) == 1);
  CHECK(update_parts({}) == 1);

  const UpdatePace pace{.layers = kLayers, .parts = kMicroBatches};
  std::int32_t done = updates_due::at_once(pace);
  CHECK(done == kMicroBatches);
  std::int32_t most = 0;
  for (const Visit& v : step) {
    // Never more than the forward before it has taken: nothing is made in a hurry.
    if (v.kind == VisitKind::forward) CHECK(updates_due::before(v, pace) <= done);
    const std::int32_t due = updates_due::after(v, pace);
    CHECK(due >= done);
    most = std::max(most, due - done);
    done = due;
    if (v.kind == VisitKind::backward) CHECK(done == kLayers * kMicroBatches);
  }
  // The first layer takes those of two: its own were made at once.
  CHECK(most == 2);

  // A layer's update is where its first part is, once.
  std::vector<std::pair<std::int32_t, Visit>> updates;  // after which forward
  Visit last{};
  for (const Visit& v : with_updates_beside(step)) {
    if (v.kind == VisitKind::update)
      updates.emplace_back(v.layer, last);
    else
      last = v;
  }
  const auto forward = [](std::int32_t l, std::int32_t m) {
    return Visit{l, VisitKind::forward, m};
  };
  CHECK(updates == std::vector<std::pair<std::int32_t, Visit>>{
                       {1, forward(0, 0)},
                       {2, forward(0, 2)},
                       {3, forward(1, 0)},
                       {4, forward(2, 0)},
                       {0, Visit{0, VisitKind::backward, kMicroBatches - 1}}});
}

TEST_CASE("updates in the backward come right behind the last one of their layer") {
  // Two chunks of a layer each, and two micro-batches; the last one turns them round at once.
  const pipeline::Schedule schedule =
      pipeline::make_schedule(pipeline::Kind::vertical,
                              {.stages = 1, .chunks = 2, .micro_batches = 2, .turns_at_end = true});
  constexpr auto kForward = VisitKind::forward, kBackward = VisitKind::backward,
                 kUpdate = VisitKind::update;
  CHECK(with_updates_in_backward(pipeline_visits(schedule, 0, {1, 1})) ==
        std::vector<Visit>{{0, kForward, 0},
                           {0, kForward, 1},
                           {1, kForward, 0},
                           {1, kBackward, 0},
                           {1, kForward, 1},
                           {1, kBackward, 1},
                           {1, kUpdate, 0},
                           {0, kBackward, 0},
                           {0, kBackward, 1},
                           {0, kUpdate, 0}});
}

}  // namespace moesaic::test
