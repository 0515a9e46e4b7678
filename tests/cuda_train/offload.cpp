// Offloaded experts in training on a GPU, with as few slots as caches can have: every slot is taken again while the kernels of
// the expert before may still run. Small, for it runs under compute-sanitizer too (scripts/gpu_sanitize.sh).
#include "tests/support/device_tensors.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

Snapshot train(const std::optional<Offload>& offload,
               std::vector<StepStats>& stats,
               int steps = 2,
               const std::vector<std::string>& more = {}) {
  // Wide enough for the kernels on tensor cores.
  std::vector<std::string> overrides{"run.precision=bf16",
                                     "model.moe_intermediate_size=64",
                                     "model.routed_expert_hidden_size=64",
                                     "train.global_batch_size=2"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  Run run(hybrid_config(overrides), nullptr, Stream::Mode::worker, kCuda, 0, offload);
  stats = run.steps(steps);
  return run.snapshot();
}

}  // namespace

TEST_CASE("offloaded training on a GPU with the fewest slots: the bits of everything on the device",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  std::vector<StepStats> whole, few;
  const Snapshot wanted = train({}, whole);
  CHECK(differences(train(Offload{.on_device = 0, .in_file = 0.3}, few), wanted).empty());
  for (std::size_t i = 0; i < whole.size(); ++i)
    CHECK(same_numbers(few[i], whole[i]));
}

TEST_CASE("offloaded training on a GPU: experts without tokens that wait for their updates",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"}) {
    const std::vector<std::string> settings{optimizer,
                                            "optimizer.master=split",
                                            "optimizer.untouched=lazy",
                                            "data.sequence_length=16",
                                            "model.num_experts=32"};
    std::vector<StepStats> whole, lazy;
    const Snapshot wanted = train({}, whole, 4, settings);
    CHECK(differences(train(Offload{.in_file = 0.3}, lazy, 4, settings), wanted).empty());
    std::int64_t replays = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      CHECK(same_numbers(lazy[i], whole[i]));
      replays += lazy[i].replays.value_or(ExpertReplays{}).members;
    }
    CHECK(replays > 0);
  }
}

TEST_CASE("offloaded training on a GPU: updates in the backward, gradients in the fewest slots",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"}) {
    const std::vector<std::string> late{optimizer,
                                        "optimizer.master=split",
                                        "optimizer.clip_grad_norm=0",
                                        "parallel.order=vertical"};
    std::vector<std::string> early = late;
    early.insert(early.end(), {"experts.offload=full", "experts.update=in_backward"});
    std::vector<StepStats> whole, found;
    const Snapshot wanted = train({}, whole, 3, late);
    for (const double on_device : {0.0, 0.6}) {
      CHECK(differences(train(Offload{.on_device = on_device, .in_file = 0.3}, found, 3, early),
                        wanted)
                .empty());
      for (std::size_t i = 0; i < whole.size(); ++i)
        CHECK(same_numbers(found[i], whole[i]));
    }
  }
}

}  // namespace moesaic::test
