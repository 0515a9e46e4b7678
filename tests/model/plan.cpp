#include "core/model/plan.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "core/config/load.h"
#include "core/model/from_config.h"
#include "core/model/moe.h"
#include "tests/support/catch.h"

using namespace moesaic;

namespace {

config::Config shipped(const std::string& name, const std::vector<std::string>& overrides = {}) {
  return config::load_config(MOESAIC_SOURCE_DIR "/configs/" + name + ".yaml", overrides).config;
}

std::int64_t part_flops(const ModelPlan& plan, const std::string& part) {
  for (const FlopsPlan& f : plan.flops) {
    if (f.part == part) return f.flops;
  }
  return -1;
}

ParameterCount part_count(const ModelPlan& plan, Part part) {
  for (const PartPlan& p : plan.parts) {
    if (p.part == part) return p.parameters;
  }
  return {};
}

}  // namespace

TEST_CASE("plan: parameter totals of the published models") {
  struct Row {
    const char* name;
    std::int64_t total, active;
  };
  // SPEC 11; the active count of the hybrid is that of Kimi-K3 plus 24 indexers.
  const Row row = GENERATE(Row{"kimi_linear_48b", 49'122'681'728, 3'106'972'544},
                           Row{"kimi_k3", 2'779'484'478'208, 104'189'614'848},
                           Row{"deepseek_v32", 671'877'944'064, 37'477'143'296},
                           Row{"hybrid_sparse_2p8t", 2'779'819'504'384, 104'524'641'024});
  CAPTURE(row.name);
  const ModelPlan plan = make_plan(shipped(row.name));
  CHECK(plan.model.all == row.total);
  CHECK(plan.model.active == row.active);
  std::int64_t by_part = 0, by_layer = 0;
  for (const PartPlan& part : plan.parts)
    by_part += part.parameters.all;
  for (const LayerPlan& layer : plan.layers)
    by_layer += layer.parameters.all;
  CHECK(by_part == row.total);
  CHECK(by_layer < row.total);
}

TEST_CASE("plan: every shipped configuration answers in under a second and finds no problem") {
  const std::string name =
      GENERATE("quickstart", "kimi_linear_48b", "kimi_k3", "deepseek_v32", "hybrid_sparse_2p8t");
  CAPTURE(name);
  const config::Config config = shipped(name);
  const auto begin = std::chrono::steady_clock::now();
  const ModelPlan plan = make_plan(config);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  CHECK(seconds.count() < 1.0);
  CHECK(plan.findings.empty());
  CHECK(plan.activation_bytes.value_or(0) > 0);
}

TEST_CASE("plan: layers of Kimi-K3") {
  const ModelPlan plan = make_plan(shipped("kimi_k3"));
  REQUIRE(plan.layers.size() == 93);
  CHECK(plan.layers[0].attention == "KDA");
  CHECK(plan.layers[0].mixer == "dense MLP");
  CHECK(plan.layers[3].attention == "MLA");
  CHECK(plan.layers[3].mixer == "MoE");
  CHECK(std::count_if(plan.layers.begin(), plan.layers.end(), [](const LayerPlan& l) {
          return l.attention == "KDA";
        }) == 69);
  // 92 MoE layers x 896 experts x 3 x 3584 x 3072, of which 16 of 896 are active.
  CHECK(part_count(plan, Part::routed_expert).all == std::int64_t{92} * 896 * 3 * 3584 * 3072);
  CHECK(part_count(plan, Part::routed_expert).active == std::int64_t{92} * 16 * 3 * 3584 * 3072);
  CHECK(part_count(plan, Part::embedding).active == 0);
  CHECK(plan.mtp.all == 0);
}

TEST_CASE("plan: the MTP module is listed apart") {
  const ModelPlan with = make_plan(shipped("deepseek_v32"));
  const ModelPlan without =
      make_plan(shipped("deepseek_v32", {"model.mtp.num_nextn_predict_layers=0"}));
  CHECK(with.mtp.all > 10'000'000'000);
  CHECK(without.mtp.all == 0);
  CHECK(with.model.all == without.model.all);
  CHECK(with.forward_flops == without.forward_flops);
  CHECK(with.mtp_flops.has_value());
  CHECK(with.bytes.weights > without.bytes.weights);
}

TEST_CASE("plan: operations per token as in the tables of the specification") {
  const auto giga = [](const char* name, const char* length) {
    const ModelPlan plan =
        make_plan(shipped(name, {std::string("data.sequence_length=") + length}));
    CHECK(plan.training_flops == 3 * plan.forward_flops);
    return static_cast<double>(plan.forward_flops) / 1e9;
  };
  CHECK(giga("kimi_linear_48b", "8192") == Approx(6.9).margin(0.05));
  CHECK(giga("kimi_linear_48b", "131072") == Approx(15.7).margin(0.05));
  CHECK(giga("kimi_k3", "8192") == Approx(215.3).margin(0.05));
  CHECK(giga("kimi_k3", "1048576") == Approx(982.4).margin(0.05));
  CHECK(giga("deepseek_v32", "8192") == Approx(113.9).margin(0.05));
  CHECK(giga("deepseek_v32", "131072") == Approx(175.8).margin(0.05));
  const ModelPlan k3 = make_plan(shipped("kimi_k3"));
  // SPEC 1.9: 69 layers x 96 heads x 139,264; SPEC 2.3: 24 layers x 30,720 T.
  CHECK(part_flops(k3, "KDA core") == std::int64_t{69} * 96 * 139'264);
  CHECK(part_flops(k3, "attention core, dense") == std::int64_t{24} * 30'720 * 8192);
}

TEST_CASE("plan: bytes per parameter by precision and optimizer") {
  const auto bytes =
      [](const std::vector<std::string>& overrides, const std::string& optimizer, DType stored_as) {
        const ModelPlan plan = make_plan(shipped("quickstart", overrides));
        for (const ByteClass& c : plan.byte_classes) {
          if (c.optimizer == optimizer && c.stored_as == stored_as) return c.per_parameter();
        }
        return std::int64_t{-1};
      };
  CHECK(bytes({"run.precision=bf16"}, "Muon", DType::bf16) == 14);
  CHECK(bytes({"run.precision=bf16", "optimizer.name=adamw"}, "AdamW", DType::bf16) == 18);
  CHECK(bytes({"run.precision=bf16"}, "AdamW", DType::f32) == 16);
  CHECK(bytes({"run.precision=bf16", "optimizer.master=split"}, "Muon", DType::bf16) == 12);
  CHECK(bytes({"run.precision=bf16", "optimizer.master=split", "optimizer.name=adamw"},
              "AdamW",
              DType::bf16) == 16);
  CHECK(bytes({"run.precision=bf16", "optimizer.master=split"}, "AdamW", DType::f32) == 16);
  CHECK(bytes({"run.precision=f32"}, "Muon", DType::f32) == 12);
  CHECK(bytes({"run.precision=f64"}, "AdamW", DType::f64) == 32);
  CHECK(bytes({"run.precision=f32", "optimizer.ema_decay=0.999"}, "Muon", DType::f32) == 16);
}

TEST_CASE("plan: frozen parameters have no gradient and no optimizer state") {
  const ModelPlan plan =
      make_plan(shipped("quickstart",
                        {"train.phases=[{until: 200, sparse_stage: warmup}, {until: 500, "
                         "sequence_length: 512, freeze: [\"*embed_tokens*\"]}]"}));
  REQUIRE(plan.phases.size() == 2);
  const std::int64_t indexer = part_count(plan, Part::indexer).all,
                     embedding = part_count(plan, Part::embedding).all;
  CHECK(plan.phases[0].trained == indexer);
  CHECK(plan.phases[0].gradient_bytes == 4 * indexer);
  CHECK(plan.phases[0].dense_warmup);
  CHECK(plan.phases[1].begin == 200);
  CHECK(plan.phases[1].frozen == embedding);
  CHECK(plan.phases[1].activation_bytes.value() > plan.phases[0].activation_bytes.value());
  // The embedding is trained in no phase, so nothing but its weight is ever held.
  const auto frozen = std::find_if(plan.byte_classes.begin(),
                                   plan.byte_classes.end(),
                                   [](const ByteClass& c) { return c.optimizer == "frozen"; });
  REQUIRE(frozen != plan.byte_classes.end());
  CHECK(frozen->parameters == embedding);
  CHECK(frozen->per_parameter() == 4);
  std::int64_t trainable = 0;
  for (const ByteClass& c : plan.byte_classes)
    trainable += c.optimizer == "frozen" ? 0 : c.parameters;
  CHECK(plan.bytes.gradients == 4 * trainable);
}

TEST_CASE("plan: phases that cannot work are findings") {
  const auto finding = [](const std::string& phase) {
    const ModelPlan plan =
        make_plan(shipped("quickstart", {"train.phases=[{until: 500, " + phase + "}]"}));
    return plan.findings.empty()
               ? std::string()
               : plan.findings.front().keys.front() + ": " + plan.findings.front().message;
  };
  CHECK(finding("freeze: [\"*o_proj*\"]").empty());
  CHECK(finding("freeze: [\"*o_prj*\"]")
            .find("train.phases[0].freeze: the pattern '*o_prj*' matches no parameter") == 0);
  CHECK(finding("freeze: [\"*\"]").find("nothing is left to train") != std::string::npos);
  CHECK(finding("freeze: [\"*gate_proj.weight\"]").find("lie in one matrix") != std::string::npos);
  CHECK(finding("lr_scale: [{pattern: none, scale: 2}]")
            .find("train.phases[0].lr_scale[0].pattern") == 0);
}

TEST_CASE("plan: recomputing keeps fewer bytes") {
  const auto kept = [](const char* words) {
    return make_plan(shipped("quickstart", {std::string("activations.recompute=") + words}))
        .activation_bytes.value();
  };
  CHECK(kept("full") < kept("[\"moe.*_up\"]"));
  CHECK(kept("[\"moe.*_up\"]") < kept("none"));
}

TEST_CASE("plan: sizes beyond 64 bits are refused, not wrapped") {
  CHECK_THROWS_AS(make_plan(shipped("quickstart",
                                    {"model.num_experts=1048576",
                                     "model.moe_intermediate_size=1048576",
                                     "model.routed_expert_hidden_size=1048576"})),
                  UsageError);
}

TEST_CASE(
    "a pattern of activations.recompute that matches nothing is found, with the nearest name") {
  const auto messages = [](const std::string& words) {
    std::vector<std::string> all;
    for (const config::Finding& f :
         make_plan(shipped("quickstart", {"activations.recompute=" + words})).findings)
      all.push_back(f.keys.front() + ": " + f.message);
    return all;
  };
  CHECK(messages("[moe.gate_up, \"attn*\"]").empty());
  CHECK(messages("[full]").empty());
  // What is chosen must be saved; found beside other problems, not instead of them.
  const auto chosen = messages("[moe.gateup, moe.topk, \"moe.*\"]");
  REQUIRE(chosen.size() == 3);
  CHECK(chosen[0].find(
            "activations.recompute: 'moe.topk' names 'moe.topk', which a step chooses") == 0);
  CHECK(chosen[1].find("'moe.*' names 'moe.") != std::string::npos);
  CHECK(chosen[2].find("matches 'moe.gateup'") != std::string::npos);
  const auto typo = messages("[moe.gate_up, moe.gateup, \"zzz.*\"]");
  REQUIRE(typo.size() == 2);
  CHECK(typo[0] ==
        "activations.recompute: no activation of this model matches 'moe.gateup'; did you mean "
        "moe.gate_up?");
  CHECK(typo[1].find("'zzz.*'; there are embedding, ") != std::string::npos);
}

TEST_CASE("model options: choices that depend on several keys") {
  const auto options = [](const char* name, const std::vector<std::string>& overrides = {}) {
    const config::Config c = shipped(name, overrides);
    return model_options(c);
  };
  CHECK(options("kimi_linear_48b").kda.a_log_entries == 0);
  CHECK(options("kimi_k3").kda.a_log_entries == 128);
  CHECK(options("quickstart").kda.a_log_entries == 5);
  CHECK(options("kimi_k3").name_prefix == "language_model.");
  CHECK(options("deepseek_v32").name_prefix.empty());
  CHECK(options("deepseek_v32").mla.rope);
  CHECK(options("deepseek_v32").mla.indexer->rope_dim == 64);
  CHECK_FALSE(options("hybrid_sparse_2p8t").mla.rope);
  CHECK(options("hybrid_sparse_2p8t").mla.indexer->rope_dim == 0);
  CHECK(capacity_of(options("quickstart").moe, 1000) == 0);
  const MoeOptions limited = options("quickstart", {"model.capacity_factor=1.3"}).moe;
  CHECK(capacity_of(limited, 1000) == 325);  // ceil(1.3 * 1000 * 4 / 16)
  CHECK(capacity_of(limited, 1001) == 326);
  CHECK(recompute_policy({.recompute = {"full"}}).all);
  CHECK_FALSE(recompute_policy({.recompute = {"none"}}).matches("none"));
  CHECK(recompute_policy({.recompute = {"attn.*"}}).matches("attn.q"));
}
