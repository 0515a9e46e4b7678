// parallel.order: vertical: every layer over all micro-batches. The same bits as micro-batch by micro-batch, in everything
// that is kept and everything that is reported.
#include <fmt/format.h>

#include "core/config/check.h"
#include "core/model/pipeline_plan.h"
#include "core/train/memory_plan.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

using Overrides = std::vector<std::string>;

constexpr int kSteps = 2;

Overrides with(Overrides all, const Overrides& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

struct Trained {
  std::vector<StepStats> stats;
  Snapshot state;
  double held_out = 0;
};

Trained train(const Overrides& overrides) {
  Run run(hybrid_config(overrides));
  Trained result;
  result.stats = run.steps(kSteps);
  result.state = run.snapshot();
  result.held_out = run.trainer->evaluate().loss;
  return result;
}

void check_equal(const std::vector<StepStats>& a, const std::vector<StepStats>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    CHECK(same_numbers(a[i], b[i]));
}

void check_same_bits(const Overrides& overrides) {
  std::string shown;
  for (const std::string& o : overrides)
    shown += o + " ";
  INFO(shown);
  const Trained horizontal = train(overrides);
  const Trained vertical = train(with(overrides, {"parallel.order=vertical"}));
  check_equal(horizontal.stats, vertical.stats);
  CHECK(differences(horizontal.state, vertical.state).empty());
  CHECK(horizontal.held_out == vertical.held_out);
}

}  // namespace

TEST_CASE("train: the vertical order has the bits of the horizontal one") {
  for (const char* precision : {"f64", "bf16"}) {
    for (const char* recompute : {"none", "selective", "full"}) {
      for (const int batch : {1, 4}) {
        check_same_bits({fmt::format("run.precision={}", precision),
                         fmt::format("activations.recompute={}", recompute),
                         fmt::format("train.global_batch_size={}", batch)});
      }
    }
  }
}

TEST_CASE("train: the vertical order with other models and rules") {
  check_same_bits({"run.precision=f32", "model.residual.attn_res_block_size=1"});
  check_same_bits({"run.precision=f32", "model.mtp.num_nextn_predict_layers=0"});
  check_same_bits({"run.precision=f32", "model.balance.bias_rule=quantile_exact"});
  check_same_bits({"run.precision=f32", "optimizer.name=muon", "optimizer.clip_grad_norm=0.1"});
  // With the table used twice its two gradients are added up in another order.
  const Overrides tied{"model.tie_word_embeddings=true", "train.global_batch_size=4"};
  const Trained horizontal = train(tied), vertical = train(with(tied, {"parallel.order=vertical"}));
  std::string worst;
  CHECK(largest_relative_error(horizontal.state, vertical.state, worst) < 1e-9);
}

TEST_CASE("train: the vertical order on several ranks") {
  for (const Overrides& layout : {Overrides{},
                                  Overrides{"parallel.ep=2"},
                                  Overrides{"parallel.tp=2"},
                                  Overrides{"parallel.cp=2"}}) {
    INFO((layout.empty() ? std::string("dp=2") : layout.front()));
    const Overrides all = with(
        {"run.precision=f32", "train.global_batch_size=8", "optimizer.clip_grad_norm=0.5"}, layout);
    const JobResult horizontal = run_job(hybrid_config(all), 2, kSteps),
                    vertical =
                        run_job(hybrid_config(with(all, {"parallel.order=vertical"})), 2, kSteps);
    check_equal(horizontal.stats, vertical.stats);
    for (std::size_t rank = 0; rank < 2; ++rank) {
      CHECK(differences(horizontal.states[rank], vertical.states[rank]).empty());
      CHECK(differences(horizontal.weights[rank], vertical.weights[rank]).empty());
    }
  }
}

TEST_CASE("train: the vertical order keeps the activations of all micro-batches") {
  const auto saved = [](const Overrides& overrides) {
    const config::Config config = hybrid_config(overrides);
    for (const MemoryUse& use : plan_memory(config, kCpu, kF32, {}, 1).parts) {
      if (use.tag == "saved activations") return use.bytes;
    }
    return std::size_t{0};
  };
  for (const char* recompute : {"activations.recompute=none", "activations.recompute=full"}) {
    const std::size_t one = saved({recompute}),
                      four = saved({recompute, "parallel.order=vertical"}),
                      eight = saved(
                          {recompute, "parallel.order=vertical", "train.global_batch_size=8"});
    // What follows the layers is kept of one micro-batch only.
    CHECK(four > one);
    CHECK(four < 4 * one + 4 * 64 * 32 * 4);
    CHECK(eight - four > 2 * (four - one) / 3);
  }
  // What is planned is what is allocated.
  const config::Config config = hybrid_config({"parallel.order=vertical"});
  Run run(config);
  const MemoryPlan plan = plan_memory(config, kCpu, run.params->precision(), {}, 1);
  for (const MemoryUse& use : plan.parts) {
    if (use.tag == "saved activations") CHECK(use.bytes == run.trainer->memory().slot);
    if (use.tag == "bundles between chunks") CHECK(use.bytes == run.trainer->memory().bundles);
  }
}

TEST_CASE("train: the vertical order and stages of a pipeline exclude each other") {
  const auto problems = config::findings(hybrid_config({"parallel.order=vertical"}));
  CHECK(problems.empty());
  std::string message;
  try {
    hybrid_config({"parallel.order=vertical", "parallel.pp=2"});
  } catch (const std::exception& e) {
    message = e.what();
  }
  CHECK(message.find("allowed: horizontal, or pp 1") != std::string::npos);
}

}  // namespace moesaic::test
