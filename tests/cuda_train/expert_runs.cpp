// Experts in runs of a few on a GPU, as where not all fit: the bits of all at once.
#include "tests/support/device_tensors.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

struct Trained {
  std::vector<StepStats> stats;
  Snapshot state;
};

Trained train(const std::vector<std::string>& overrides, std::int64_t run_limit) {
  Run run(hybrid_config(overrides), nullptr, Stream::Mode::worker, kCuda, run_limit);
  Trained result;
  result.stats = run.steps(3);
  result.state = run.snapshot();
  return result;
}

void check_limits(const std::vector<std::string>& overrides) {
  const Trained whole = train(overrides, 0);
  for (const std::int64_t limit : {1, 2, 3}) {
    INFO(overrides.front() << " " << overrides.back() << ", runs of " << limit);
    const Trained parts = train(overrides, limit);
    CHECK(differences(parts.state, whole.state).empty());
    for (std::size_t i = 0; i < whole.stats.size(); ++i)
      CHECK(same_numbers(parts.stats[i], whole.stats[i]));
  }
}

// Wide enough for the kernels on tensor cores.
const std::vector<std::string> kTiled{
    "run.precision=bf16", "model.moe_intermediate_size=64", "model.routed_expert_hidden_size=64"};

std::vector<std::string> with(std::vector<std::string> overrides, const std::string& more) {
  overrides.push_back(more);
  return overrides;
}

}  // namespace

TEST_CASE("runs of experts on a GPU: a step has the bits of all experts at once", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const char* precision : {"run.precision=f64", "run.precision=f32", "run.precision=bf16"})
    check_limits({precision});
  check_limits(kTiled);
  check_limits(with(kTiled, "activations.recompute=[full]"));
  // A sum long enough that the backward pass of the gated unit is fused for any activation.
  check_limits({"run.precision=bf16",
                "model.moe_intermediate_size=64",
                "model.routed_expert_hidden_size=3072"});
}

TEST_CASE("runs of experts on a GPU: one wait per layer and micro-batch, beside the step's",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  Run run(hybrid_config({"run.precision=bf16"}), nullptr, Stream::Mode::worker, kCuda, 1);
  run.steps(2);
  const std::uint64_t before = host_waits();
  run.step();
  constexpr std::uint64_t kMicroBatches = 4;
  CHECK(host_waits() - before == 1 + kMicroBatches * run.model->moe_layers().size());
}

}  // namespace moesaic::test
