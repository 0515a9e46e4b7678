// Offloaded experts in training on a GPU, with as few slots as caches can have: every slot is taken again while the kernels of
// the expert before may still run. Small, for it runs under compute-sanitizer too (scripts/gpu_sanitize.sh).
#include "tests/support/device_tensors.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

Snapshot train(const std::optional<Offload>& offload, std::vector<StepStats>& stats) {
  // Wide enough for the kernels on tensor cores.
  Run run(hybrid_config({"run.precision=bf16",
                         "model.moe_intermediate_size=64",
                         "model.routed_expert_hidden_size=64",
                         "train.global_batch_size=2"}),
          nullptr,
          Stream::Mode::worker,
          kCuda,
          0,
          offload);
  stats = run.steps(2);
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

}  // namespace moesaic::test
