// The host enqueues a step and waits for it once, for what the step reports.
#include "memory/stream.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {

TEST_CASE("a step of training waits once for its stream") {
  for (const auto& overrides :
       {std::vector<std::string>{"optimizer.name=muon", "optimizer.qk_clip_tau=0.05"},
        std::vector<std::string>{"optimizer.ema_decay=0.9",
                                 "model.balance.bias_rule=quantile_exact",
                                 "train.micro_batch_size=2"},
        std::vector<std::string>{"activations.residual_offload=true",
                                 "activations.offload=[\"*\"]",
                                 "parallel.order=vertical"}}) {
    Run run(hybrid_config(overrides));
    run.steps(2);
    const std::uint64_t before = host_waits();
    run.steps(3);
    CHECK(host_waits() - before == 3);
  }
}

}  // namespace moesaic::test
