// Phases of a run: sequence length, the indexer's dense warm-up, frozen parameters and scaled learning rates.
#include "core/train/phases.h"

#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "core/model/from_config.h"
#include "core/nn/tape.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

std::string phases(const std::string& list) {
  return "train.phases=" + list;
}

/// Names in the snapshots whose bytes differ, weights and buffers only.
std::vector<std::string> changed_weights(const Snapshot& a, const Snapshot& b) {
  std::vector<std::string> names;
  for (const auto& [name, bytes] : a) {
    const bool is_state = name.compare(0, 10, "optimizer/") == 0 || name.compare(0, 4, "ema/") == 0;
    if (!is_state && b.at(name) != bytes) names.push_back(name);
  }
  return names;
}

std::vector<double> values(const Snapshot& s, const std::string& name) {
  std::vector<double> v(s.at(name).size() / 8);
  std::memcpy(v.data(), s.at(name).data(), s.at(name).size());
  return v;
}

}  // namespace

TEST_CASE("recomputation keeps the bits through the warm-up where selected keys are gathered") {
  const auto trained = [](const std::string& recompute) {
    Run run(hybrid_config({phases("[{until: 2, sparse_stage: warmup}, {until: 20}]"),
                           "model.indexer.attention_form=gather",
                           "activations.recompute=" + recompute}));
    run.steps(4);
    return run.snapshot();
  };
  const Snapshot saved = trained("none");
  for (const char* recompute : {"full", "selective", "[attn.o, attn.q_latent]"}) {
    INFO(recompute);
    CHECK(trained(recompute) == saved);
  }
}

TEST_CASE("the dense warm-up trains the indexer and nothing else, then everything trains") {
  for (const char* optimizer : {"optimizer.name=adamw", "optimizer.name=muon"}) {
    Run run(hybrid_config({optimizer,
                           phases("[{until: 3, sparse_stage: warmup}, {until: 20}]"),
                           "optimizer.qk_clip_tau=0.05",
                           "model.balance.aux_loss=global"}));
    const Snapshot start = run.snapshot();
    const auto warm = run.steps(3);
    CHECK(warm.back().indexer_kl < warm.front().indexer_kl);
    const Snapshot warmed = run.snapshot();
    const auto changed = changed_weights(start, warmed);
    CHECK(changed.size() == 5);
    for (const auto& name : changed) {
      INFO(name);
      CHECK(name.find("self_attn.indexer.") != std::string::npos);
    }
    for (std::size_t i = 0; i < run.params->params().size(); ++i) {
      const ParamId id{static_cast<std::int32_t>(i)};
      const bool is_indexer = run.params->params()[i].part == Part::indexer;
      INFO(run.params->params()[i].name);
      CHECK(run.params->gradient(id, 0).empty() != is_indexer);
    }
    run.step();
    const auto then = changed_weights(warmed, run.snapshot());
    CHECK(then.size() > run.params->params().size());  // experts count one by one
  }
}

TEST_CASE("warm-up is dense: what is selected does not matter to the loss") {
  const auto loss = [](const char* stage, const char* top_k) {
    Run run(hybrid_config({phases(std::string("[{until: 20, sparse_stage: ") + stage + "}]"),
                           std::string("model.indexer.index_topk=") + top_k}));
    return run.step().loss;
  };
  CHECK(loss("warmup", "3") == loss("warmup", "64"));
  CHECK(loss("warmup", "3") == Approx(loss("sparse", "64")).epsilon(1e-12));
  CHECK(loss("sparse", "3") != Approx(loss("sparse", "64")).epsilon(1e-9));
}

TEST_CASE("frozen parameters keep their bits, without gradient and optimizer state") {
  Run run(hybrid_config(
      {phases("[{until: 20, freeze: [model.embed_tokens.weight, \"model.layers.1.*\"]}]"),
       "optimizer.ema_decay=0.5"}));
  const Snapshot start = run.snapshot();
  run.steps(2);
  const Snapshot after = run.snapshot();
  for (const auto& name : changed_weights(start, after)) {
    INFO(name);
    CHECK(name != "model.embed_tokens.weight");
    CHECK(name.compare(0, 15, "model.layers.1.") != 0);
  }
  CHECK(changed_weights(start, after).size() > 40);
  for (const auto& [name, bytes] : after) {
    if (name.compare(0, 10, "optimizer/") != 0) continue;
    INFO(name);
    CHECK(name.find("model.layers.1.") == std::string::npos);
    CHECK(name.find("embed_tokens") == std::string::npos);
  }
  for (std::size_t i = 0; i < run.params->params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    const std::string& name = run.params->params()[i].name;
    const bool frozen =
        name == "model.embed_tokens.weight" || name.compare(0, 15, "model.layers.1.") == 0;
    INFO(name);
    CHECK(run.params->gradient(id, 0).empty() == frozen);
  }
}

TEST_CASE("freezing some parameters changes no bit of the others' gradients") {
  Run all(hybrid_config()),
      some(
          hybrid_config({phases("[{until: 20, freeze: [\"*.self_attn.*\", \"*.gate.weight\"]}]")}));
  CHECK(all.step().loss == some.step().loss);
  int compared = 0;
  for (std::size_t i = 0; i < all.params->params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    if (some.params->frozen(id)) continue;
    const TensorView a = all.params->gradient(id, 0), b = some.params->gradient(id, 0);
    INFO(all.params->params()[i].name);
    CHECK(std::memcmp(a.data(), b.data(), a.bytes()) == 0);
    ++compared;
  }
  CHECK(compared > 20);
}

TEST_CASE("learning rates are scaled by the last pattern that matches; 0 keeps the bits") {
  const auto update = [](const std::string& scales) {
    Run run(hybrid_config({phases("[{until: 20, lr_scale: " + scales + "}]"),
                           "optimizer.warmup_steps=0",
                           "optimizer.weight_decay=0"}));
    const Snapshot start = run.snapshot();
    run.step();
    const Snapshot after = run.snapshot();
    std::map<std::string, double> moved;
    for (const char* name : {"lm_head.weight",
                             "model.layers.0.self_attn.q_proj.weight",
                             "model.layers.0.mlp.up_proj.weight"}) {
      const auto a = values(start, name), b = values(after, name);
      double sum = 0;
      for (std::size_t i = 0; i < a.size(); ++i)
        sum += std::abs(b[i] - a[i]);
      moved[name] = sum;
    }
    return moved;
  };
  auto plain = update("[]"), scaled = update(
                                 "[{pattern: \"model.layers.0.*\", scale: 0.5}, {pattern: "
                                 "\"*.q_proj.weight\", scale: 0}]");
  REQUIRE(plain["lm_head.weight"] > 0);
  CHECK(scaled["lm_head.weight"] == plain["lm_head.weight"]);
  CHECK(scaled["model.layers.0.mlp.up_proj.weight"] ==
        Approx(0.5 * plain["model.layers.0.mlp.up_proj.weight"]).epsilon(1e-9));
  CHECK(scaled["model.layers.0.self_attn.q_proj.weight"] == 0);
}

TEST_CASE("a parameter released later starts with the bias corrections of a first update") {
  // AdamW's first update moves every element by about the learning rate; with the corrections of update 4 it would be
  // 0.1 / 0.34 x sqrt(0.185 / 0.05) of it.
  const auto first_move = [](const std::string& list, int steps_before) {
    Run run(hybrid_config({phases(list), "optimizer.warmup_steps=0", "optimizer.weight_decay=0"}));
    run.steps(steps_before);
    const auto before = values(run.snapshot(), "lm_head.weight");
    run.step();
    const auto after = values(run.snapshot(), "lm_head.weight");
    double largest = 0;
    for (std::size_t i = 0; i < before.size(); ++i)
      largest = std::max(largest, std::abs(after[i] - before[i]));
    return largest;
  };
  CHECK(first_move("[{until: 20}]", 0) == Approx(3e-3).epsilon(1e-3));
  CHECK(first_move("[{until: 3, freeze: [lm_head.weight]}, {until: 20}]", 3) ==
        Approx(3e-3).epsilon(1e-3));
}

TEST_CASE("steps in which a parameter was frozen do not count for its bias corrections") {
  Run run(
      hybrid_config({phases("[{until: 1}, {until: 4, freeze: [lm_head.weight]}, {until: 20}]")}));
  run.steps(5);
  const StateValues v = run.trainer->values();
  CHECK(v.integers.at("optimizer.updates") == 5);
  CHECK(v.integers.at("optimizer.updates_of.lm_head.weight") == 2);
  CHECK(v.integers.count("optimizer.updates_of.model.norm.weight") == 0);
}

TEST_CASE("any number of phases may freeze other parameters each") {
  // Phase p freezes vectors 0 to p: as many different numbers of updates as phases.
  constexpr int kPhases = 20;
  std::vector<std::string> names;
  {
    const Run any(hybrid_config());
    for (const ParameterSpec& spec : any.params->params()) {
      if (spec.shape.rank == 1) names.push_back(spec.name);
    }
  }
  REQUIRE(names.size() >= kPhases);
  std::string text = "[";
  for (int p = 0; p < kPhases; ++p) {
    std::string frozen;
    for (int i = 0; i <= p; ++i)
      frozen += (i > 0 ? ", \"" : "\"") + names.at(static_cast<std::size_t>(i)) + "\"";
    text += fmt::format("{{until: {}, freeze: [{}]}}, ", p + 1, frozen);
  }
  text += fmt::format("{{until: {}}}]", kPhases + 10);
  Run run(hybrid_config({phases(text), fmt::format("train.steps={}", kPhases + 10)}));
  run.steps(kPhases + 1);
  const StateValues v = run.trainer->values();
  CHECK(v.integers.at("optimizer.updates") == kPhases + 1);
  for (int i = 0; i < kPhases; ++i) {
    INFO(names[static_cast<std::size_t>(i)]);
    CHECK(v.integers.at("optimizer.updates_of." + names[static_cast<std::size_t>(i)]) == i + 1);
  }
}

TEST_CASE("every parameter can be frozen while all others are trained") {
  std::vector<std::string> names;
  {
    const Run any(hybrid_config());
    for (const ParameterSpec& spec : any.params->params()) {
      config::TrainConfig train;
      train.phases.emplace_back();
      train.phases.back().freeze = {spec.name};
      if (phase_findings(*any.params, train).empty()) names.push_back(spec.name);
    }
  }
  REQUIRE(names.size() > 40);  // all but those that share a matrix
  std::string text = "[";
  for (std::size_t p = 0; p < names.size(); ++p)
    text += fmt::format("{}{{until: {}, freeze: [\"{}\"]}}", p > 0 ? ", " : "", p + 1, names[p]);
  const auto steps = static_cast<int>(names.size());
  Run run(hybrid_config({phases(text + "]"), fmt::format("train.steps={}", steps)}));
  for (const std::string& name : names) {
    const Snapshot before = run.snapshot();
    const StepStats stats = run.step();
    INFO(name);
    CHECK(std::isfinite(stats.loss));
    const Snapshot after = run.snapshot();
    std::string stored = name;  // of a family, its first member
    if (const auto at = stored.find("{}"); at != std::string::npos) stored.replace(at, 2, "0");
    CHECK(before.at(stored) == after.at(stored));
  }
}

TEST_CASE("a router's bias stands still where its name is frozen") {
  Run run(hybrid_config(
      {phases("[{until: 20, freeze: [\"model.layers.1.block_sparse_moe.gate.*\"]}]")}));
  const Snapshot start = run.snapshot();
  run.step();
  const auto changed = changed_weights(start, run.snapshot());
  const auto has = [&](const std::string& name) {
    return std::find(changed.begin(), changed.end(), name) != changed.end();
  };
  CHECK_FALSE(has("model.layers.1.block_sparse_moe.gate.e_score_correction_bias"));
  CHECK(has("model.layers.2.block_sparse_moe.gate.e_score_correction_bias"));
}

TEST_CASE("the sequence length changes between phases, on any number of ranks alike") {
  const std::vector<std::string> overrides{
      phases("[{until: 2, sequence_length: 32}, {until: 4, sequence_length: 128, lr: 1e-3, "
             "lr_schedule: constant}, {until: 20}]"),
      "model.balance.bias_rule=quantile_exact"};
  const JobResult one = run_job(hybrid_config(overrides), 1, 6),
                  two = run_job(hybrid_config(overrides), 2, 6);
  const std::int64_t tokens[] = {128, 128, 512, 512, 256, 256};
  for (std::size_t i = 0; i < 6; ++i) {
    CHECK(one.stats[i].tokens == tokens[i]);
    CHECK(two.stats[i].tokens == tokens[i]);
    CHECK(two.stats[i].loss == Approx(one.stats[i].loss).epsilon(1e-10));
  }
  CHECK(one.stats[2].learning_rate == 1e-3);
  CHECK(one.stats[4].learning_rate == 3e-3);
}

TEST_CASE("a capacity factor keeps its meaning when the sequence length changes") {
  const auto first_loss = [](const std::vector<std::string>& overrides) {
    return Run(hybrid_config(overrides)).step().loss;
  };
  const std::string factor = "model.capacity_factor=0.5";
  CHECK(first_loss({factor, "data.sequence_length=128"}) ==
        first_loss({factor, phases("[{until: 20, sequence_length: 128}]")}));
  CHECK(first_loss({factor, "data.sequence_length=128"}) !=
        first_loss({"data.sequence_length=128"}));
}

TEST_CASE("phases resolve what the run says") {
  const auto list = make_phases(
      hybrid_config({phases("[{until: 5, sequence_length: 32, freeze: [\"*.mlp.*\"]}, {until: 20, "
                            "lr: 1e-3, lr_schedule: cosine, warmup_steps: 2}]")}));
  REQUIRE(list.size() == 2);
  CHECK(list[1].begin == 5);
  CHECK(list[1].sequence_length == 64);
  CHECK(&phase_of(list, 5) == &list[0]);
  CHECK(&phase_of(list, 6) == &list[1]);
  CHECK(list[0].learning_rate(1) == Approx(1e-3));  // the run's warm-up over 3 steps
  CHECK(list[1].learning_rate(6) == Approx(5e-4));  // its own, over 2
  CHECK(list[1].learning_rate(7) == Approx(1e-3));
  CHECK(list[1].learning_rate(20) == Approx(0).margin(1e-12));
}

}  // namespace moesaic::test
