// Experts in runs of a few, as where not all fit on the device: training leaves the bits of all at once.
#include <cstring>
#include <map>

#include <fmt/format.h>

#include "kernels/ops/op.h"
#include "memory/stream.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

constexpr int kSteps = 2;

struct Trained {
  std::vector<StepStats> stats;
  Snapshot state;
};

using Overrides = std::vector<std::string>;

Trained train(const Overrides& overrides, int ranks, std::int64_t run_limit) {
  const config::Config config = hybrid_config(overrides);
  Trained result;
  if (ranks == 1) {
    Run run(config, nullptr, Stream::Mode::worker, kCpu, run_limit);
    result.stats = run.steps(kSteps);
    result.state = run.snapshot();
    return result;
  }
  std::mutex mutex;
  run_local_ranks(ranks, [&](Communicator& world) {
    Run run(config, &world, Stream::Mode::worker, kCpu, run_limit);
    const auto stats = run.steps(kSteps);
    run.add_to(result.state, mutex);
    if (world.rank() == 0) result.stats = stats;
  });
  return result;
}

void check_limits(const Overrides& overrides, int ranks, const std::vector<std::int64_t>& limits) {
  INFO(fmt::format("{}, {} ranks", fmt::join(overrides, " "), ranks));
  const Trained whole = train(overrides, ranks, 0);
  for (const std::int64_t limit : limits) {
    INFO("runs of " << limit);
    const Trained parts = train(overrides, ranks, limit);
    CHECK(differences(parts.state, whole.state).empty());
    REQUIRE(parts.stats.size() == whole.stats.size());
    for (std::size_t i = 0; i < whole.stats.size(); ++i)
      CHECK(same_numbers(parts.stats[i], whole.stats[i]));
  }
}

// How often each op ran.
class OpCounts : public OpObserver {
 public:
  void begin(const char* op) override { ++of[op]; }
  void end(const char*, const OpCost&) override {}
  std::map<std::string, int> of;
};

std::int64_t layers_with_experts(const Run& run) {
  return static_cast<std::int64_t>(run.model->moe_layers().size());
}

TEST_CASE("runs of experts: a step has the bits of all experts at once") {
  check_limits({}, 1, {1, 2, 3});
  for (const char* precision : {"run.precision=f32", "run.precision=bf16"}) {
    for (const char* set : {"model.routed_expert_hidden_size=null",
                            "activations.recompute=[full]",
                            "activations.recompute=[selective]",
                            "activations.recompute=[moe.xs,moe.u,moe.gate_up]"})
      check_limits({precision, set}, 1, {1, 3});
  }
  check_limits({"model.capacity_factor=0.8", "train.micro_batch_size=2"}, 1, {2});
  check_limits({"model.hidden_act=silu", "optimizer.name=muon"}, 1, {3});
}

TEST_CASE("runs of experts: experts on several ranks, in chunks and further passes") {
  const std::string ep = "parallel.ep=2", flat = "dispatch.exchange=flat";
  check_limits({ep, flat}, 2, {1, 3});
  check_limits({ep, "dispatch.exchange=dense"}, 2, {2});
  check_limits({ep, flat, "dispatch.overlap=true", "dispatch.chunks=3"}, 2, {2});
  check_limits({ep, flat, "dispatch.buffer_factor=0.3"}, 2, {1, 3});
  check_limits({ep, flat, "dispatch.buffer_factor=0.3", "activations.recompute=[full]"}, 2, {2});
  check_limits({"parallel.ep=2", "parallel.etp=2", flat}, 4, {1});
  check_limits({"parallel.etp=2"}, 2, {3});
}

TEST_CASE("runs of experts: pipelines, with backward split and not") {
  for (const char* schedule : {"1f1b", "zero_bubble"})
    check_limits({"parallel.pp=2", std::string("parallel.schedule=") + schedule}, 2, {1, 3});
}

// Every token chooses the first two experts.
void skewed(Run& run) {
  for (const auto& named : run.model->moe_layers()) {
    const TensorView bias = run.params->buffer(named.moe->bias());
    for (std::int64_t e = 0; e < 2; ++e)
      bias.as<double>()[e] = 4 - static_cast<double>(e);
  }
}

}  // namespace

TEST_CASE("runs of experts: experts without rows are passed over, at one wait per layer") {
  constexpr std::int64_t kMicroBatches = 4;
  for (const std::int64_t limit : {0, 1}) {
    INFO("runs of " << limit);
    Run run(hybrid_config(), nullptr, Stream::Mode::worker, kCpu, limit);
    run.step();  // the first one waits for more
    skewed(run);
    OpCounts counts;
    run.trainer->observe(&counts);
    const std::uint64_t before = host_waits();
    run.step();
    const std::int64_t layers = layers_with_experts(run), visits = layers * kMicroBatches;
    const std::int64_t runs = limit == 0 ? 1 : 2;
    CHECK(static_cast<std::int64_t>(host_waits() - before) == 1 + (limit == 0 ? 0 : visits));
    run.trainer->observe(nullptr);
    CHECK(counts.of["grouped_glu_forward"] == runs * visits);
    CHECK(counts.of["grouped_glu_backward"] == runs * visits);
    CHECK(counts.of["grouped_linear_backward_input"] == runs * visits);
    CHECK(counts.of["grouped_linear_backward_weight"] == 2 * runs * visits);
  }
}

TEST_CASE(
    "runs of experts: those without rows are passed over behind an exchange that does not count") {
  for (const char* exchange : {"dispatch.exchange=dense", "dispatch.exchange=flat"}) {
    std::map<int, int> runs;
    std::mutex mutex;
    run_local_ranks(2, [&](Communicator& world) {
      Run run(hybrid_config({"parallel.ep=2", exchange}), &world, Stream::Mode::worker, kCpu, 1);
      skewed(run);
      OpCounts counts;
      run.trainer->observe(&counts);
      run.step();
      run.trainer->observe(nullptr);
      const std::lock_guard lock(mutex);
      runs[world.rank()] = counts.of["grouped_linear_backward_weight"];
    });
    INFO(exchange);
    CHECK(runs[0] == 3 * 2 * 2 * 2);  // layers, micro-batches, matrices, experts
    CHECK(runs[1] == 0);              // the others'
  }
}

TEST_CASE("runs of experts: an exchange that counts costs no further wait") {
  std::map<std::int64_t, std::uint64_t> waits;
  for (const std::int64_t limit : {0, 1}) {
    std::mutex mutex;
    run_local_ranks(2, [&](Communicator& world) {
      Run run(hybrid_config({"parallel.ep=2", "dispatch.exchange=flat"}),
              &world,
              Stream::Mode::worker,
              kCpu,
              limit);
      run.step();
      world.all_gather_host("");
      const std::uint64_t before = host_waits();
      world.all_gather_host("");
      run.step();
      world.all_gather_host("");
      const std::lock_guard lock(mutex);
      waits[limit] = std::max(waits[limit], host_waits() - before);
    });
  }
  CHECK(waits[0] == waits[1]);
}

}  // namespace moesaic::test
