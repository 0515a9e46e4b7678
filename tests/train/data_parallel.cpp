// The same steps on one, two and four ranks and under other cuts into micro-batches: equal up to the order of sums, and
// replicas equal to the bit.
#include <cmath>

#include <fmt/format.h>

#include "core/base/error.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

constexpr int kSteps = 5;

void check_close(double got, double want, const char* what) {
  INFO(what << ": " << got << " against " << want);
  CHECK(std::abs(got - want) <= 1e-11 * std::abs(want));
}

void check_agrees(const JobResult& got, const JobResult& want) {
  REQUIRE(got.stats.size() == want.stats.size());
  for (std::size_t i = 0; i < want.stats.size(); ++i) {
    const StepStats &a = got.stats[i], &b = want.stats[i];
    INFO("step " << b.step);
    check_close(a.loss, b.loss, "loss");
    check_close(a.mtp_loss, b.mtp_loss, "MTP loss");
    check_close(a.indexer_kl, b.indexer_kl, "indexer KL");
    check_close(a.balance_loss, b.balance_loss, "balance loss");
    check_close(a.router_z, b.router_z, "router z");
    check_close(a.grad_norm, b.grad_norm, "gradient norm");
    CHECK(a.learning_rate == b.learning_rate);
    CHECK(a.tokens == b.tokens);
    REQUIRE(a.experts.size() == b.experts.size());
    for (std::size_t l = 0; l < a.experts.size(); ++l) {
      CHECK(a.experts[l].max_over_mean == b.experts[l].max_over_mean);
      CHECK(a.experts[l].dead_experts == b.experts[l].dead_experts);
    }
  }
  std::string worst;
  const double error = largest_relative_error(got.states[0], want.states[0], worst);
  INFO("worst tensor: " << worst);
  CHECK(error < 1e-9);
  for (const Snapshot& replica : got.states)
    CHECK(differences(replica, got.states[0]).empty());
  for (const Snapshot& replica : got.weights)
    CHECK(differences(replica, got.weights[0]).empty());
}

void check_layouts(const std::vector<std::string>& overrides) {
  const auto config = [&](const char* micro) {
    auto all = overrides;
    all.push_back(std::string("train.micro_batch_size=") + micro);
    return hybrid_config(all);
  };
  const JobResult one = run_job(config("1"), 1, kSteps);
  REQUIRE(one.stats.back().loss < one.stats.front().loss);
  for (const int ranks : {2, 4}) {
    INFO(ranks << " ranks");
    check_agrees(run_job(config("1"), ranks, kSteps), one);
  }
  {
    INFO("one micro-batch of four");
    check_agrees(run_job(config("4"), 1, kSteps), one);
  }
  INFO("two ranks, one micro-batch of two each");
  check_agrees(run_job(config("2"), 2, kSteps), one);
}

}  // namespace

TEST_CASE("data parallel: AdamW, quantile balancing, average of the weights") {
  check_layouts({"optimizer.ema_decay=0.9",
                 "model.balance.aux_loss=sequence",
                 "model.balance.aux_loss_weight=0.01"});
}

TEST_CASE("data parallel: Muon with QK-clip, exact quantile, global auxiliary loss") {
  check_layouts({"optimizer.name=muon",
                 "optimizer.qk_clip_tau=0.05",
                 "model.balance.bias_rule=quantile_exact",
                 "model.balance.aux_loss=global",
                 "model.balance.aux_loss_weight=0.01"});
}

TEST_CASE(
    "data parallel: sign rule, untouched experts skipped, MTP after the final norm, rotation") {
  check_layouts({"model.balance.bias_rule=sign",
                 "optimizer.untouched=skip",
                 "model.mtp.mtp_hidden=post_norm",
                 "model.mla_use_nope=false",
                 "model.num_experts=32"});
}

TEST_CASE("data parallel: losses and capacities of a micro-batch do not depend on the ranks") {
  const auto config = hybrid_config({"model.balance.aux_loss=switch",
                                     "model.balance.aux_loss_weight=0.01",
                                     "model.capacity_factor=0.8"});
  const JobResult one = run_job(config, 1, kSteps);
  CHECK(one.stats[0].balance_loss > 0);
  CHECK(one.stats[0].loss != run_job(hybrid_config(), 1, 1).stats[0].loss);  // tokens were dropped
  for (const int ranks : {2, 4}) {
    INFO(ranks << " ranks");
    check_agrees(run_job(config, ranks, kSteps), one);
  }
}

TEST_CASE("QK-clip acts in the layouts under test") {
  const auto with = run_job(hybrid_config({"optimizer.qk_clip_tau=0.05"}), 1, 1),
             without = run_job(hybrid_config(), 1, 1);
  const std::string changed = differences(with.states[0], without.states[0]);
  INFO(changed);
  CHECK(changed.find("q_b_proj.weight") != std::string::npos);
  CHECK(changed.find("kv_b_proj.weight") != std::string::npos);
  CHECK(changed.find("optimizer/") == std::string::npos);
}

TEST_CASE("two runs, immediate streams and other threads give the same bits") {
  for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"}) {
    const std::vector<std::string> f32{optimizer, "run.precision=f32", "train.micro_batch_size=2"};
    auto threads = f32;
    threads.push_back("run.threads=2");
    const JobResult first = run_job(hybrid_config(f32), 2, 3);
    const auto check_same = [&](const JobResult& other, const char* what) {
      INFO(what);
      CHECK(differences(other.states[0], first.states[0]).empty());
      CHECK(differences(other.states[1], first.states[0]).empty());
      for (std::size_t i = 0; i < first.stats.size(); ++i)
        CHECK(same_numbers(other.stats[i], first.stats[i]));
    };
    check_same(run_job(hybrid_config(f32), 2, 3), "again");
    check_same(run_job(hybrid_config(f32), 2, 3, Stream::Mode::immediate), "immediate streams");
    check_same(run_job(hybrid_config(threads), 2, 3), "two threads");
  }
}

TEST_CASE("bf16 replicas stay equal to the bit") {
  const JobResult job = run_job(hybrid_config({"run.precision=bf16", "optimizer.name=muon"}), 2, 3);
  CHECK(differences(job.states[0], job.states[1]).empty());
  CHECK(differences(job.weights[0], job.weights[1]).empty());
  CHECK(std::isfinite(job.stats.back().loss));
}

TEST_CASE("recomputation changes no bit of training") {
  const JobResult saved = run_job(hybrid_config({"run.precision=f32"}), 1, 3);
  const JobResult replayed =
      run_job(hybrid_config({"run.precision=f32", "activations.recompute=full"}), 1, 3);
  CHECK(differences(saved.states[0], replayed.states[0]).empty());
}

TEST_CASE("evaluation: alike on every number of ranks, and without effect on training") {
  double alone = 0;
  std::int64_t tokens = 0;
  {
    Run run(hybrid_config({"train.eval_batches=2"})),
        undisturbed(hybrid_config({"train.eval_batches=2"}));
    run.steps(2);
    undisturbed.steps(2);
    const Snapshot before = run.snapshot();
    const EvalStats first = run.trainer->evaluate(), second = run.trainer->evaluate();
    CHECK(first.loss == second.loss);
    CHECK(first.predicted_tokens > 400);
    CHECK(first.predicted_tokens <= 8 * 64);
    CHECK(differences(before, run.snapshot()).empty());
    CHECK(same_numbers(run.step(), undisturbed.step()));
    CHECK(differences(undisturbed.snapshot(), run.snapshot()).empty());
    alone = first.loss;
    tokens = first.predicted_tokens;
  }
  run_local_ranks(2, [&](Communicator& world) {
    Run run(hybrid_config({"train.eval_batches=2"}), &world);
    run.steps(2);
    const EvalStats stats = run.trainer->evaluate();
    if (world.rank() != 0) return;
    CHECK(stats.loss == Approx(alone).epsilon(1e-10));
    CHECK(stats.predicted_tokens == tokens);
  });
}

TEST_CASE("evaluation takes every window, whatever the micro-batch and the ranks") {
  const auto stats = [](std::int64_t micro, bool whole, Communicator* world) {
    Run run(hybrid_config({fmt::format("train.micro_batch_size={}", micro),
                           fmt::format("train.global_batch_size={}", 2 * micro),
                           "train.eval_batches=1"}),
            world);
    return run.trainer->evaluate(whole);
  };
  const EvalStats alone = stats(1, true, nullptr);
  const EvalStats by_three = stats(3, true, nullptr), by_seven = stats(7, true, nullptr);
  CHECK(by_three.predicted_tokens == alone.predicted_tokens);
  CHECK(by_seven.predicted_tokens == alone.predicted_tokens);
  CHECK(by_three.loss == Approx(alone.loss).epsilon(1e-10));
  CHECK(by_seven.loss == Approx(alone.loss).epsilon(1e-10));
  run_local_ranks(2, [&](Communicator& world) {
    const EvalStats shared = stats(3, true, &world);
    CHECK(shared.predicted_tokens == alone.predicted_tokens);
    CHECK(shared.loss == by_three.loss);  // the same batches: the same bits
  });
}

TEST_CASE("batches that do not divide among the ranks are refused") {
  const auto message = [](int ranks, const std::vector<std::string>& overrides) -> std::string {
    try {
      run_job(hybrid_config(overrides), ranks, 1);
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  };
  CHECK(message(3, {}).find("Nearest valid: 3, 6") != std::string::npos);
  CHECK(message(2, {"train.global_batch_size=6", "train.micro_batch_size=2"})
            .find("Nearest valid: 4, 8") != std::string::npos);
  CHECK(message(2, {"parallel.dp=1"}).find("parallel.dp") != std::string::npos);
  CHECK(message(4, {}).empty());
}

}  // namespace moesaic::test
