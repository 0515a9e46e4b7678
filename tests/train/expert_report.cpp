// What a step reports about experts: exact counts of the whole batch and the range of the routers' bias.
#include <algorithm>

#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

const std::vector<std::string> kSettings{
    "log.expert_every=2", "log.detail_every=3", "model.balance.bias_rule=quantile"};

// The largest and the least value of a router's bias as it lies in the store.
std::pair<double, double> bias_range(Run& run, std::size_t layer) {
  run.trainer->stream().synchronize();
  const TensorView bias = run.params->buffer(run.model->moe_layers()[layer].moe->bias());
  REQUIRE(bias.dtype() == DType::f32);
  const auto [least, most] = std::minmax_element(bias.as<float>(), bias.as<float>() + bias.numel());
  return {*least, *most};
}

}  // namespace

TEST_CASE("counts per expert come in the steps that report them, add up, and fit the figures") {
  auto settings = kSettings;
  settings.push_back("run.precision=f32");
  const auto config = hybrid_config(settings);
  Run run(config);
  for (int step = 1; step <= 6; ++step) {
    const StepStats stats = run.step();
    const bool reports = step % 2 == 0 || step % 3 == 0;
    INFO("step " << step);
    REQUIRE(stats.experts.size() == run.model->moe_layers().size());
    for (std::size_t l = 0; l < stats.experts.size(); ++l) {
      const ExpertLoad& load = stats.experts[l];
      CHECK(load.max_over_mean >= 1);
      CHECK(load.entropy > 0);
      CHECK(load.entropy <= 1 + 1e-12);
      REQUIRE(load.tokens.empty() == !reports);
      REQUIRE(load.bias_min.has_value() == reports);
      if (!reports) continue;
      std::int64_t sum = 0;
      for (const std::int64_t n : load.tokens)
        sum += n;
      CHECK(sum == stats.tokens * config.model.num_experts_per_token);
      CHECK(static_cast<double>(*std::max_element(load.tokens.begin(), load.tokens.end())) ==
            Approx(load.max_over_mean * static_cast<double>(sum) /
                   static_cast<double>(load.tokens.size())));
      CHECK(std::pair(*load.bias_min, *load.bias_max) == bias_range(run, l));
      CHECK(*load.bias_max > 0);
    }
  }
}

TEST_CASE("two ranks report the counts of both") {
  const auto config = hybrid_config(kSettings);
  Run one(config);
  const auto alone = one.steps(2);
  const JobResult two = run_job(config, 2, 2);
  REQUIRE(two.stats.size() == 2);
  for (std::size_t l = 0; l < alone[1].experts.size(); ++l) {
    CHECK(alone[1].experts[l].tokens == two.stats[1].experts[l].tokens);
    CHECK(alone[1].experts[l].bias_min == two.stats[1].experts[l].bias_min);
  }
}

}  // namespace moesaic::test
