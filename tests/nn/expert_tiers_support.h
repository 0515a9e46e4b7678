#pragma once
// Three layers of offloaded experts without a model.
#include <array>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "core/nn/expert_tiers.h"
#include "tests/memory/tier_support.h"

namespace moesaic::test {

inline constexpr std::int64_t kLayers = 3, kMembers = 6, kInner = 4, kWidth = 6;

struct Experts {
  explicit Experts(const Precision& precision, MeshPosition position = {})
      : store(precision, std::move(position)) {
    store.declare({.name = "norm", .shape = {kWidth}, .init = {.kind = InitialKind::ones}});
    const bool split = store.position().extent(Axis::ep) > 1;
    const Placement placement{
        split ? std::vector<Placement::Split>{{Axis::ep, 0}} : std::vector<Placement::Split>{},
        AxisFamily::expert};
    for (std::int64_t l = 0; l < kLayers; ++l) {
      const std::string prefix = "layers." + std::to_string(l) + ".experts.";
      const auto spec = [&](const char* name, std::int64_t rows, std::int64_t cols) {
        return ParameterSpec{.name = prefix + "{}." + name + ".weight",
                             .shape = {rows, cols},
                             .members = kMembers,
                             .placement = placement,
                             .init = {.a = 0.3},
                             .part = Part::routed_expert,
                             .matrix = true};
      };
      const std::int64_t here = kMembers / store.position().extent(Axis::ep);
      const StorageId w13 =
          store.declare_storage(prefix + "w13", here, 2 * kInner, kWidth, StoredAs::compute);
      store.declare(spec("w1", kInner, kWidth), w13, 0);
      store.declare(spec("w3", kInner, kWidth), w13, kInner);
      storages.push_back({w13, store.declare(spec("w2", kWidth, kInner))});
    }
  }
  ParameterStore store;
  std::vector<std::array<StorageId, 2>> storages;  // by layer: gate_up, down
};

/// How the steps of a test are run.
struct Run {
  Precision precision = kF32;
  bool weights = true;
  TierPolicy policy = TierPolicy::sched;
  std::uint64_t seed = 0;
  std::int64_t slots = 3;      // of each cache; weights of "down" have one more
  std::int64_t in_file = 0;    // of weights and states
  std::int64_t on_device = 0;  // of each kind, beside the slots
  Stream::Mode mode = Stream::Mode::worker;
  bool schedule = true;
  tiers::Updates updates = tiers::Updates::dense;
};

inline ExpertTierOptions options_of(const Run& run, const std::filesystem::path& folder) {
  ExpertTierOptions o;
  o.weights = run.weights;
  o.policy = run.policy;
  o.seed = run.seed;
  o.state_kinds = {"m", "v"};
  o.folder = folder;
  o.stream_mode = run.mode;
  o.io = tiers::IoKind::threads;
  o.poison = true;
  const std::int64_t here = run.weights ? run.on_device : 0, slots = run.on_device + run.slots;
  TierGroupOptions g{.weight_slots = slots,
                     .gradient_slots = slots,
                     .state_slots = slots,
                     .weights_in_file = run.weights ? run.in_file : 0,
                     .states_in_file = run.in_file,
                     .weights_on_device = here,
                     .gradients_on_device = here,
                     .states_on_device = run.on_device,
                     .staging_slots = 2};
  o.groups = {g, g};
  if (slots < kLayers * kMembers) ++o.groups[1].weight_slots;
  o.groups[1].staging_slots = 3;
  return o;
}

}  // namespace moesaic::test
