#pragma once
// Runs whose routers choose their first experts most, so that it matters on which ranks experts are.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "tests/train/run.h"

namespace moesaic::test {

inline void set(const TensorView& view, std::int64_t i, double value) {
  if (view.dtype() == DType::f64) {
    view.as<double>()[i] = value;
  } else {
    view.as<float>()[i] = static_cast<float>(value);
  }
}

// Experts of which the first ones are chosen most: the bias of expert e falls with log(e + 1), as popularity does by Zipf.
inline void skew_routers(Run& run) {
  for (const auto& named : run.model->moe_layers()) {
    const TensorView bias = run.params->buffer(named.moe->bias());
    run.trainer->stream().synchronize();
    for (std::int64_t e = 0; e < bias.numel(); ++e)
      set(bias, e, -0.1 * std::log(static_cast<double>(e + 1)));
  }
}

// The same with one more setting, in place of an earlier one of that key.
inline std::vector<std::string> with(std::vector<std::string> overrides,
                                     const std::string& setting) {
  const std::string key = setting.substr(0, setting.find('=') + 1);
  std::erase_if(overrides, [&](const std::string& o) { return o.starts_with(key); });
  overrides.push_back(setting);
  return overrides;
}

// No rule moves the bias back.
inline std::vector<std::string> skewed(const std::vector<std::string>& overrides) {
  std::vector<std::string> all{"model.balance.bias_rule=none",
                               "experts.place_decay=0.5",
                               "log.expert_every=1",
                               "train.global_batch_size=4"};
  for (const std::string& o : overrides)
    all = with(all, o);
  return all;
}

struct Placed {
  std::vector<StepStats> stats;
  Snapshot state;
};

inline Placed run_skewed(const std::vector<std::string>& overrides,
                         int ranks,
                         int steps,
                         const std::optional<Offload>& offload = {}) {
  Placed result;
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(hybrid_config(skewed(overrides)), &world, Stream::Mode::worker, kCpu, 0, offload);
    skew_routers(run);
    const auto stats = run.steps(steps);
    if (world.rank() == 0) result.stats = stats;
    run.add_to(result.state, mutex);
  });
  return result;
}

inline Snapshot without_places(Snapshot all) {
  std::erase_if(all, [](const auto& t) { return t.first.starts_with("buffer/optional/"); });
  return all;
}

inline double worst_rank(const StepStats& stats) {
  double worst = 0;
  for (const ExpertLoad& load : stats.experts)
    worst = std::max(worst, load.rank_max_over_mean.value_or(0));
  return worst;
}

// Up to step `until`, from the newest checkpoint in `folder` when there is one; leaves one of its last step there.
inline Placed live(const std::vector<std::string>& overrides,
                   int ranks,
                   int until,
                   const std::filesystem::path& folder,
                   const std::optional<Offload>& offload = {}) {
  Placed result;
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(hybrid_config(skewed(overrides)), &world, Stream::Mode::worker, kCpu, 0, offload);
    if (latest_checkpoint(folder)) {
      load_newest(run, folder);
    } else {
      skew_routers(run);
    }
    world.barrier();
    const auto stats = run.steps(until - static_cast<int>(run.trainer->steps_done()));
    if (world.rank() == 0) result.stats = stats;
    run.add_to(result.state, mutex);
    save_together(run, world, folder);
  });
  return result;
}

}  // namespace moesaic::test
