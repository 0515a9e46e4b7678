// Bytes that tiers take are those that were planned; what they do is counted, and logged for simulations.
#include <fstream>
#include <numeric>

#include "core/train/expert_updates.h"
#include "core/train/phases.h"
#include "core/train/tier_plan.h"
#include "core/train/tier_schedule.h"
#include "core/train/touch_recorder.h"
#include "kernels/backend.h"
#include "memory/tiers/cache_simulation.h"
#include "memory/tiers/scratch_file.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

using tiers::VisitKind;

constexpr std::int64_t kLayers = 3, kMembers = 6;

void declare(ParameterStore& store) {
  for (std::int64_t l = 0; l < kLayers; ++l) {
    const std::string prefix = "layers." + std::to_string(l) + ".experts.{}.";
    for (const auto& [name, rows] : {std::pair("w13", 32), std::pair("w2", 16)})
      store.declare({.name = prefix + name + ".weight",
                     .shape = {rows, 40},
                     .members = kMembers,
                     .init = {.a = 0.3},
                     .part = Part::routed_expert});
  }
}

std::size_t sum(const std::vector<MemoryUse>& uses) {
  return std::accumulate(uses.begin(), uses.end(), std::size_t{0}, [](auto n, const auto& use) {
    return n + use.bytes;
  });
}

config::Config offloading(const std::string& folder) {
  config::Config config;
  config.experts.offload = config::ExpertOffload::full;
  config.memory.file_path = folder;
  return config;
}

std::vector<TierGroup> groups_of(const config::Config& config) {
  ParameterStore store(kF32);
  declare(store);
  store.offload_experts(expert_tier_options(config, 0));
  store.seal_pretend(kCpu);
  return store.tier_groups(expert_tier_options(config, 0).state_kinds);
}

TEST_CASE("tier use: a store takes what was planned, and a pretended one says the same") {
  const TemporaryFolder folder("tier_use");
  config::Config config = offloading(folder.path().string());
  const auto groups = groups_of(config);
  REQUIRE(groups.size() == 2);
  CHECK(groups[0].name == "gate_up");
  for (const bool has_file : {false, true}) {
    TierLimits limits{.device = 300 << 10};
    if (has_file) limits.host = 600 << 10;
    if (has_file) limits.file = 10 << 20;
    const ExpertTierOptions options = plan_expert_tiers(config, groups, limits, 0);
    const auto parts = tier_parts(groups, options);
    CHECK((file_bytes(parts) > 0) == has_file);
    for (const bool pretend : {true, false}) {
      CAPTURE(has_file, pretend);
      ParameterStore store(kF32);
      declare(store);
      store.offload_experts(options);
      if (pretend) {
        store.seal_pretend(kCpu);
      } else {
        store.seal(kCpu);
      }
      const ExpertTiers& tiers = *store.tiers();
      // Tables are beside the caches and homes; gradients that are not there are read as one block of zeros.
      CHECK(sum(tiers.device_use()) ==
            device_bytes(parts) + slot_table_bytes(groups) + groups[0].gradient_bytes);
      CHECK(sum(tiers.host_use()) == host_bytes(parts) + slot_table_bytes(groups));
      CHECK(sum(tiers.host_use()) <= limits.host);
      CHECK(sum(tiers.file_use()) == file_bytes(parts));
      if (pretend || !has_file) continue;
      std::uintmax_t on_disk = 0;
      for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
        on_disk += entry.file_size();
      CHECK(on_disk == file_bytes(parts));
    }
  }
}

TEST_CASE("tier use: calls are counted by storage, and logged as bench cache-sim reads it") {
  const TemporaryFolder folder("touch_recorder");
  std::filesystem::create_directories(folder.path());
  const auto path = folder.path() / "touches.jsonl";
  config::Config config = offloading("");
  const auto groups = groups_of(config);
  TierLimits limits;
  limits.least_slots = true;
  ParameterStore store(kF32);
  declare(store);
  store.offload_experts(plan_expert_tiers(config, groups, limits, 0));
  store.seal(kCpu);
  store.initialize(1);
  ExpertTiers& tiers = *store.tiers();
  BackendOwner owner({.scratch_bytes = 1 << 16});
  const auto visit = [&](std::size_t layer, VisitKind kind, std::vector<std::int64_t> rows) {
    for (const TierGroup& g : groups)
      tiers.weights(g.storages[layer], {.kind = kind, .rows = rows}, owner.stream(), [](auto&) {});
  };
  const TierCounters start = tiers.counters_of(groups[0].storages[0]);
  {
    TouchRecorder recorder(tiers, path, tiers::Updates::dense);
    for (const std::int64_t step : {5, 6}) {
      visit(0, VisitKind::forward, {2, 0, 1, 0, 0, 0});
      visit(0, VisitKind::forward, {1, 0, 0, 0, 3, 0});  // another part of it
      visit(1, VisitKind::forward, {});
      visit(2, VisitKind::forward, {0, 0, 0, 0, 0, 1});
      for (const std::size_t layer : {2, 1, 0})
        visit(layer, VisitKind::backward, {1, 1, 1, 1, 1, 1});
      recorder.end_step(step);
    }
  }
  visit(0, VisitKind::forward, {1, 1, 1, 1, 1, 1});  // nobody listens
  owner.stream().synchronize();
  const auto log = tiers::read_touch_log(path);
  CHECK(log.layers == kLayers);
  CHECK(log.experts == kMembers);
  CHECK(log.expert_bytes == 48 * 40 * 4);
  CHECK(log.state_bytes == 48 * 40 * 8);
  CHECK(log.steps() == 2);
  REQUIRE(log.entries.size() == 2 * 9);
  CHECK(log.entries[0].blocks == std::vector<tiers::Block>{0, 2, 4});
  CHECK(log.entries[1].blocks.size() == kMembers);
  CHECK(log.entries[2].blocks == std::vector<tiers::Block>{17});
  CHECK(log.entries[5].blocks == std::vector<tiers::Block>{4, 2, 0});  // backward, as in forward
  CHECK(log.entries[6].visit.kind == VisitKind::update);
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  std::getline(in, line);
  CHECK(line.find("\"tokens\":[3,0,1,0,3,0]") != std::string::npos);

  // Layer 0: in two steps 2 + 2 + 6 uses of each matrix, and 6 at the end.
  TierCounters first;
  for (const TierGroup& g : groups)
    first += tiers.counters_of(g.storages[0]);
  CHECK(first.cache.uses - 2 * start.cache.uses == 2 * (2 * (2 + 2 + 6) + 6));
  CHECK(first.cache.bytes_up > 0);
  TierCounters all, by_storage;
  for (const TierCounters& c : tiers.counters())
    all += c;
  for (const TierGroup& g : groups)
    for (const StorageId id : g.storages)
      by_storage += tiers.counters_of(id);
  CHECK(by_storage.cache.uses == all.cache.uses);
  CHECK(by_storage.cache.hits == all.cache.hits);
  CHECK(by_storage.cache.bytes_up == all.cache.bytes_up);
  CHECK(by_storage.cache.bytes_down == all.cache.bytes_down);
}

TEST_CASE("tier use: a log has the updates where the run made them") {
  const TemporaryFolder folder("touches_beside");
  std::filesystem::create_directories(folder.path());
  const auto path = folder.path() / "touches.jsonl";
  constexpr Offload kTight{.on_device = 0.3};
  for (const char* untouched : {"dense", "lazy", "skip"}) {
    INFO(untouched);
    const config::Config config = hybrid_config({"train.global_batch_size=2",
                                                 "train.micro_batch_size=1",
                                                 std::string("optimizer.untouched=") + untouched,
                                                 "optimizer.name=adamw"});
    Run run(config, nullptr, Stream::Mode::worker, kCpu, 0, kTight);
    const bool beside = ExpertUpdates::can_run_beside(*run.params, *run.optimizer);
    CHECK(beside == (std::string(untouched) != "skip"));
    const auto updates =
        std::string(untouched) == "dense" ? tiers::Updates::dense : tiers::Updates::touched;
    {
      TouchRecorder recorder(*run.params->tiers(), path, updates, beside);
      for (int step = 1; step <= 3; ++step) {
        run.step();
        recorder.end_step(step);
        // What looks at experts between steps makes updates early; the log is of steps that are all alike.
        if (step == 2) run.snapshot();
      }
    }
    const auto log = tiers::read_touch_log(path);
    CHECK(log.steps() == 3);
    const auto visits =
        expert_visits(config, make_phases(config).front(), *run.model, run.params->position());
    CHECK(log.schedule() == (beside ? with_updates_beside(visits) : visits));
    // An update moves what its step used, all of it or none where there was none.
    for (const auto& entry : log.entries) {
      if (entry.visit.kind != VisitKind::update) continue;
      const bool is_first = entry.step == 1 && beside && entry.visit.layer > 0;
      CHECK(entry.blocks.empty() == is_first);
    }
  }
}

}  // namespace
}  // namespace moesaic::test
