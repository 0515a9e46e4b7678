// Tokens that go to their experts in fp8: every layout trains the same model, close to the one with whole rows.
#include <cmath>

#include <fmt/format.h>

#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

config::Config fp8_config(const std::vector<std::string>& overrides) {
  std::vector<std::string> all{"dispatch.dtype=fp8", "train.global_batch_size=8"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return hybrid_config(all);
}

}  // namespace

TEST_CASE("fp8 dispatch: experts elsewhere see the rows that one rank rounds for itself") {
  for (const char* backward : {"activation", "fp8"}) {
    const std::string both = std::string("dispatch.backward_dtype=") + backward;
    Run one(fp8_config({both}));
    const auto wanted = one.steps(2);
    const Snapshot state = one.snapshot();
    for (const char* exchange : {"flat", "dense", "pair", "hierarchical"}) {
      INFO(both << ", " << exchange);
      const JobResult job = run_job(fp8_config({both,
                                                "parallel.ep=4",
                                                "comm.ranks_per_node=2",
                                                std::string("dispatch.exchange=") + exchange}),
                                    4,
                                    2);
      std::string worst;
      CHECK(largest_relative_error(job.states[0], state, worst) < 1e-9);
      INFO(worst);
      for (std::size_t i = 0; i < wanted.size(); ++i)
        CHECK(job.stats[i].loss == Approx(wanted[i].loss).epsilon(1e-12));
    }
  }
}

TEST_CASE("fp8 dispatch: the loss stays close to that of whole rows") {
  const auto losses = [](std::vector<std::string> overrides) {
    std::vector<double> all;
    overrides.insert(overrides.end(), {"run.precision=f32", "optimizer.lr=1e-3"});
    Run run(hybrid_config(overrides));
    for (const StepStats& stats : run.steps(20))
      all.push_back(stats.loss);
    return all;
  };
  const auto whole = losses({}), there = losses({"dispatch.dtype=fp8"}),
             both = losses({"dispatch.dtype=fp8", "dispatch.backward_dtype=fp8"});
  CHECK(whole.back() < 0.8 * whole.front());
  CHECK(there != whole);  // rounding is felt
  CHECK(both != there);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    INFO("step " << i + 1);
    CHECK(there[i] == Approx(whole[i]).epsilon(0.02));
    CHECK(both[i] == Approx(whole[i]).epsilon(0.02));
  }
}

TEST_CASE("fp8 dispatch: small buffers and checksums change no bit") {
  const std::vector<std::string> fp8{
      "parallel.ep=4", "dispatch.exchange=flat", "dispatch.backward_dtype=fp8"};
  const JobResult whole = run_job(fp8_config(fp8), 4, 2);
  for (const char* set : {"dispatch.buffer_factor=0.3", "dispatch.checksum=true"}) {
    INFO(set);
    auto overrides = fp8;
    overrides.emplace_back(set);
    const JobResult other = run_job(fp8_config(overrides), 4, 2);
    CHECK(differences(other.states[0], whole.states[0]).empty());
    CHECK(same_numbers(other.stats[1], whole.stats[1]));
  }
}

}  // namespace moesaic::test
