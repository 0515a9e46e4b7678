#include "memory/tiers/touch_log.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>

#include "memory/tiers/cache_simulation.h"
#include "memory/tiers/policy.h"
#include "tests/memory/tier_support.h"

namespace moesaic::test {
namespace {

using namespace tiers;
namespace fs = std::filesystem;

bool same(const TouchLog& a, const TouchLog& b) {
  if (a.entries.size() != b.entries.size()) return false;
  for (std::size_t i = 0; i < a.entries.size(); ++i) {
    const auto &x = a.entries[i], &y = b.entries[i];
    if (x.step != y.step || x.visit != y.visit || x.blocks != y.blocks) return false;
  }
  return a.layers == b.layers && a.experts == b.experts && a.expert_bytes == b.expert_bytes &&
         a.state_bytes == b.state_bytes && a.updates == b.updates;
}

TEST_CASE("touch log: what is written is read") {
  const TemporaryFolder folder("touch_log");
  fs::create_directories(folder.path());
  for (const Updates updates : {Updates::none, Updates::touched, Updates::dense}) {
    TouchOptions o{
        .layers = 3, .experts = 7, .top_k = 2, .tokens = 3, .micro_batches = 2, .steps = 3};
    o.updates = updates;
    o.expert_bytes = std::uint64_t{5} << 33;
    o.state_bytes = 12;
    const TouchLog log = draw_touch_log(o);
    CHECK(log.steps() == 3);
    CHECK(log.schedule().size() == (updates == Updates::none ? 12u : 15u));
    write_touch_log(folder.path() / "a.jsonl", log);
    CHECK(same(read_touch_log(folder.path() / "a.jsonl"), log));
  }
}

TEST_CASE("touch log: a log as a run writes it, with its counts, cut at the end") {
  const TemporaryFolder folder("touch_log_run");
  fs::create_directories(folder.path());
  const fs::path path = folder.path() / "run.jsonl";
  {
    TouchLogWriter writer(path, {.layers = 2, .experts = 3, .updates = Updates::touched});
    for (const std::int64_t step : {10, 11}) {
      writer.forward(step, {0, VisitKind::forward, 0}, {5, 0, 1});
      writer.forward(step, {1, VisitKind::forward, 0}, {0, 0, 0});
      writer.other(step, {1, VisitKind::backward, 0});
      writer.other(step, {0, VisitKind::backward, 0});
      writer.other(step, {0, VisitKind::update, 0});
    }
    writer.finish();
  }
  std::ifstream in(path);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  // Another log is replaced, nothing else is.
  const TouchLog head{.layers = 2, .experts = 3};
  const fs::path other = folder.path() / "config.yaml";
  std::ofstream(other) << "run: {}\n";
  CHECK_THROWS_AS(TouchLogWriter(other, head), UsageError);
  CHECK(fs::file_size(other) == 8);
  fs::copy_file(path, folder.path() / "again.jsonl");
  CHECK_NOTHROW(TouchLogWriter(folder.path() / "again.jsonl", head).finish());
  TouchLog log = read_touch_log(path);
  REQUIRE(log.entries.size() == 10);
  CHECK(log.first_step() == 10);
  CHECK(log.entries[0].blocks == std::vector<Block>{0, 2});
  CHECK(log.entries[1].blocks.empty());
  CHECK(log.entries[3].blocks == std::vector<Block>{2, 0});  // backward: descending
  CHECK(log.entries[4].blocks == std::vector<Block>{0, 2});
  CHECK(!log.last_step_was_cut);
  // Wherever the file ends, the steps before are there.
  const std::size_t second = text.find("{\"step\":11");
  for (std::size_t end = second; end < text.size() - 1; end += 7) {
    std::ofstream(path) << text.substr(0, end);
    log = read_touch_log(path);
    INFO(end);
    CHECK(log.steps() == 1);
    CHECK(log.last_step_was_cut == (end > second));
  }
}

TEST_CASE("touch log: an update that comes before its layer's forward is of the step before") {
  const TemporaryFolder folder("touch_log_beside");
  fs::create_directories(folder.path());
  const fs::path path = folder.path() / "run.jsonl";
  for (const Updates updates : {Updates::touched, Updates::dense}) {
    {
      TouchLogWriter writer(path, {.layers = 2, .experts = 3, .updates = updates});
      for (const std::int64_t step : {10, 11, 12}) {
        writer.forward(step, {0, VisitKind::forward, 0}, {5, 0, step - 10});
        writer.other(step, {1, VisitKind::update, 0});
        writer.forward(step, {1, VisitKind::forward, 0}, {12 - step, 1, 0});
        writer.other(step, {1, VisitKind::backward, 0});
        writer.other(step, {0, VisitKind::backward, 0});
        writer.other(step, {0, VisitKind::update, 0});
      }
      writer.finish();
    }
    const TouchLog log = read_touch_log(path);
    REQUIRE(log.steps() == 3);
    REQUIRE(log.schedule().size() == 6);
    const auto blocks = [&](std::size_t step, std::size_t visit) {
      return log.entries[6 * step + visit].blocks;
    };
    const bool all = updates == Updates::dense;
    const std::vector<Block> first{0, 1, 2}, second{3, 4, 5};
    CHECK(blocks(0, 1).empty());  // nothing was before
    CHECK(blocks(1, 1) == (all ? second : std::vector<Block>{3, 4}));
    CHECK(blocks(2, 1) == (all ? second : std::vector<Block>{3, 4}));
    CHECK(blocks(0, 5) == (all ? first : std::vector<Block>{0}));
    CHECK(blocks(1, 5) == (all ? first : std::vector<Block>{0, 2}));
    CHECK(blocks(2, 2) == std::vector<Block>{4});
    CHECK(blocks(2, 3) == std::vector<Block>{4});  // backward: of its own step
    // What a policy foresees of it, it uses.
    auto policy = make_sched_policy(std::make_unique<ScheduleForecast>(ScheduleForecast::Options{
        .step = log.schedule(), .layers = 2, .experts = 3, .updates = updates}));
    CHECK(simulate(log, *policy, {.slots = 6}).loads() == (all ? 6 : 4));
  }
}

TEST_CASE("touch log: what is none is refused with file and line") {
  const TemporaryFolder folder("touch_log_bad");
  fs::create_directories(folder.path());
  const fs::path path = folder.path() / "bad.jsonl";
  const std::string head =
      R"({"moesaic_touch_log":1,"layers":2,"experts":3,"expert_bytes":1,"state_bytes":0,"updates":"none"})"
      "\n";
  const std::string forward =
      R"({"step":1,"layer":0,"kind":"forward","micro_batch":0,"touched":[1]})"
      "\n";
  const auto refused =
      [&](const std::string& text, const std::string& place, const std::string& what) {
        std::ofstream(path) << text;
        const std::string message = message_of<InputError>([&] { read_touch_log(path); });
        INFO(message);
        CHECK(contains(message, path.string() + place));
        CHECK(contains(message, what));
      };
  CHECK_THROWS_AS(read_touch_log(folder.path() / "none"), InputError);
  refused("", "", "is empty");
  refused("step,layer\n1,2\n", ":1", "");
  refused("{\"loss\":1}\n", ":1", "is no touch log");
  refused(R"({"moesaic_touch_log":2})", ":1", "moesaic_touch_log");
  refused(head, "", "no whole step");
  refused(head +
              R"({"step":1,"layer":2,"kind":"forward","micro_batch":0,"touched":[]})"
              "\n" +
              forward,
          ":2",
          "layer");
  refused(head +
              R"({"step":1,"layer":0,"kind":"sideways","micro_batch":0,"touched":[]})"
              "\n" +
              forward,
          ":2",
          "forward, backward or update");
  refused(head +
              R"({"step":1,"layer":0,"kind":"forward","micro_batch":0,"touched":[3]})"
              "\n" +
              forward,
          ":2",
          "touched");
  refused(head +
              R"({"step":1,"layer":0,"kind":"forward","micro_batch":0,"touched":[1,2,1]})"
              "\n" +
              forward,
          ":2",
          "twice");
  refused(head +
              R"({"step":1,"layer":0,"kind":"forward","micro_batch":0,"tokens":[1,2]})"
              "\n" +
              forward,
          ":2",
          "2 numbers; one for each of the 3");
  refused(head +
              R"({"step":1,"layer":0,"kind":"forward","micro_batch":0})"
              "\n" +
              forward,
          ":2",
          "touched");
  refused(head + forward +
              R"({"step":0,"layer":0,"kind":"forward","micro_batch":0,"touched":[1]})"
              "\n",
          ":3",
          "step 0 after step 1");
  refused(head + forward +
              R"({"step":2,"layer":1,"kind":"forward","micro_batch":0,"touched":[1]})"
              "\n",
          ":3",
          "all alike");
  refused(head + forward + forward +
              R"({"step":2,"layer":0,"kind":"forward","micro_batch":0,"touched":[1]})"
              "\n" +
              R"({"step":3,"layer":0,"kind":"forward","micro_batch":0,"touched":[1]})"
              "\n",
          ":5",
          "step 2 had 1 visits, the first step 2");
}

TEST_CASE("touches: probabilities add up to the choices of a token, at most 1 each") {
  for (const double zipf : {0.0, 1.0, 3.0}) {
    std::vector<double> weights;
    for (int r = 0; r < 64; ++r)
      weights.push_back(std::pow(r + 1.0, -zipf));
    const auto q = choice_probabilities(weights, 8);
    CHECK(std::accumulate(q.begin(), q.end(), 0.0) == Approx(8));
    CHECK(std::is_sorted(q.rbegin(), q.rend()));
    CHECK(q.front() <= 1);
    CHECK(q.back() > 0);
  }
  CHECK(choice_probabilities({1, 1, 1}, 3) == std::vector<double>{1, 1, 1});
  // 512 tokens of 8 in 256, all alike: nearly all are used; 8 tokens: 1 - (1 - 1/32)^8.
  TouchOptions o{
      .layers = 4, .experts = 256, .top_k = 8, .tokens = 8, .micro_batches = 1, .steps = 10};
  double used = 0;
  for (const auto& e : draw_touch_log(o).entries)
    used += static_cast<double>(e.blocks.size());
  CHECK(used / (80 * 256) == Approx(1 - std::pow(31.0 / 32, 8)).epsilon(0.05));
}

}  // namespace
}  // namespace moesaic::test
