// The hybrid model learns; averages of the weights; experts without tokens.
#include <cmath>
#include <cstring>

#include "core/model/moe.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

std::vector<double> values(const Snapshot& s, const std::string& name) {
  std::vector<double> v(s.at(name).size() / 8);
  std::memcpy(v.data(), s.at(name).data(), s.at(name).size());
  return v;
}

}  // namespace

TEST_CASE("one batch is learnt by heart") {
  for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"}) {
    INFO(optimizer);
    Run run(hybrid_config({optimizer,
                           "run.precision=f32",
                           "train.global_batch_size=2",
                           "train.micro_batch_size=2",
                           "train.steps=400",
                           "optimizer.lr=1e-2",
                           "optimizer.weight_decay=0",
                           "optimizer.lr_schedule=cosine",
                           "optimizer.warmup_steps=10"}));
    double loss = 0, mtp = 0;
    int steps = 0;
    StateValues values = run.trainer->values();
    for (; steps < 400; ++steps) {
      const StepStats stats = run.step();
      REQUIRE_FALSE(stats.skipped);
      loss = stats.loss;
      mtp = stats.mtp_loss;
      if (loss < 0.05) break;
      // Back to the first batch: only the position, not the count of updates.
      values = run.trainer->values();
      values.integers["step"] = 0;
      run.trainer->load_values(values);
    }
    INFO("loss " << loss << ", MTP loss " << mtp << " after " << steps << " steps");
    CHECK(loss < 0.05);
    CHECK(mtp < 1.0);
  }
}

TEST_CASE("the average of the weights follows its recursion and starts at the first weights") {
  Run run(hybrid_config({"optimizer.ema_decay=0.75"}));
  std::map<std::string, std::vector<double>> mean;
  const std::vector<std::string> names{
      "model.norm.weight", "lm_head.weight", "model.layers.1.block_sparse_moe.experts.3.w2.weight"};
  for (int step = 0; step < 4; ++step) {
    run.step();
    const Snapshot s = run.snapshot();
    for (const auto& name : names) {
      const auto w = values(s, name), average = values(s, "ema/" + name);
      auto& m = mean[name];
      if (step == 0) m = w;
      double error = 0;
      for (std::size_t i = 0; i < w.size(); ++i) {
        if (step > 0) m[i] = 0.75 * m[i] + 0.25 * w[i];
        error = std::max(error, std::abs(m[i] - average[i]));
      }
      INFO(name << " after step " << step + 1);
      CHECK(error < 1e-14);
    }
  }
  std::size_t averages = 0, weights = 0;
  for (const auto& [name, bytes] : run.snapshot())
    averages += name.compare(0, 4, "ema/") == 0 ? 1 : 0;
  for (const ParameterSpec& spec : run.params->params())
    weights += static_cast<std::size_t>(std::max<std::int64_t>(1, spec.members));
  CHECK(averages == weights);
}

TEST_CASE(
    "untouched: skip leaves experts without tokens alone, dense moves them by momentum and weight "
    "decay") {
  for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"}) {
    for (const bool skips : {true, false}) {
      INFO(optimizer << (skips ? ", skip" : ", dense"));
      Run run(hybrid_config({optimizer,
                             skips ? "optimizer.untouched=skip" : "optimizer.untouched=dense",
                             "model.num_experts=64",
                             "train.global_batch_size=1",
                             "model.balance.bias_rule=none"}));
      const auto mixtures = run.model->moe_layers();
      int untouched = 0, touched = 0, returned = 0;
      std::vector<char> was_untouched(64, 0);
      run.steps(2);
      for (int step = 0; step < 3; ++step) {
        const Snapshot before = run.snapshot();
        run.step();
        const Snapshot after = run.snapshot();
        const auto* counts = run.params->buffer(mixtures[0].moe->counts()).as<std::int64_t>();
        for (std::size_t e = 0; e < 64; ++e) {
          const std::string name =
              "model.layers.1.block_sparse_moe.experts." + std::to_string(e) + ".w";
          bool all_same = true, all_moved = true;
          for (const auto& [tensor, bytes] : before) {
            if (tensor.find(name) == std::string::npos) continue;
            const bool same = after.at(tensor) == bytes;
            all_same = all_same && same;
            if (tensor.compare(0, 5, "model") == 0) all_moved = all_moved && !same;
          }
          const bool has_tokens = counts[e] != 0;
          INFO("expert " << e << " with " << counts[e] << " tokens");
          if (has_tokens || !skips) CHECK(all_moved);
          if (!has_tokens && skips) CHECK(all_same);
          returned += has_tokens && was_untouched[e] != 0 ? 1 : 0;
          was_untouched[e] = has_tokens ? 0 : 1;
          ++(has_tokens ? touched : untouched);
        }
      }
      CHECK(untouched > 0);
      CHECK(touched > 0);
      CHECK(returned > 0);
    }
  }
}

}  // namespace moesaic::test
