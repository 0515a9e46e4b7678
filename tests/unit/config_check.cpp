#include <algorithm>

#include "core/config/check.h"
#include "tests/support/catch.h"
#include "tests/unit/config_support.h"

using namespace config_tests;
namespace config = moesaic::config;

namespace {

const std::string kExperts =
    "model={num_experts: 8, num_experts_per_token: 2, moe_intermediate_size: 16}";

std::string report(std::vector<std::string> overrides) {
  return report_of(kTiny, overrides);
}

std::string report_with_experts(std::vector<std::string> overrides) {
  overrides.push_back(kExperts);
  return report_of(kTiny, overrides);
}

std::string linear(const std::string& kda, const std::string& full, const std::string& more = "") {
  return "model.linear_attn_config={num_heads: 2, head_dim: 8, kda_layers: " + kda +
         ", full_attn_layers: " + full + more + "}";
}

}  // namespace

TEST_CASE("config: each layer is KDA or full attention, once") {
  CHECK(report({linear("[1]", "[2]")}).empty());
  CHECK(report({linear("[1, 2]", "[]")}).empty());
  CHECK(contains(report({linear("[1]", "[]")}),
                 "must together name each layer from 1 to 2 once; not named: 2"));
  CHECK(contains(report({linear("[1, 2]", "[2]")}), "named twice: 2"));
  CHECK(contains(report({linear("[1, 3]", "[2]")}), "outside: 3"));
  CHECK(contains(report({linear("[0, 1]", "[2]")}), "kda_layers[0]: found 0: out of range"));
  CHECK(contains(report({linear("[1]", "[2]", ", a_log_entries: 1")}),
                 "a_log_entries: found 1; allowed: at least num_heads (2)"));
}

TEST_CASE("config: rules take the position of the key to blame") {
  const std::string text = kTiny + "log: {interval: 1}\n";
  CHECK(contains(report_of(text, {"train.micro_batch_size=3"}),
                 "t.yaml:12:39 train.global_batch_size: 4 is not divisible by micro_batch_size "
                 "(3). Nearest valid: 3, 6; or micro_batch_size 2, 4 (train.micro_batch_size is "
                 "set on the command line)"));
  CHECK(
      contains(report_with_experts({"parallel.ep=4", "parallel.dp=2"}),
               "parallel.ep: ep * etp (4) does not divide dp * cp * tp (2). Nearest valid ep: 2"));
  CHECK(contains(
      report({"model.kv_lora_rank=0"}),
      "command line: model.kv_lora_rank: is required, because all layers are full attention"));
}

TEST_CASE("config: a rule is silent where one of its keys could not be read") {
  const std::string text = report({"train.micro_batch_size=3x"});
  CHECK(contains(text, "train.micro_batch_size: found 3x"));
  CHECK_FALSE(contains(text, "divisible"));
}

TEST_CASE("config: attention sizes") {
  CHECK(
      contains(report({"model.num_attention_heads=0"}), "model.num_attention_heads: is required"));
  CHECK(contains(report({"model.v_head_dim=0"}), "model.v_head_dim: is required"));
  CHECK(contains(report({"model.qk_nope_head_dim=0", "model.qk_rope_head_dim=0"}),
                 "model.qk_nope_head_dim: is required"));
  CHECK(contains(report({"model.qk_rope_head_dim=3"}),
                 "rotated channels come in pairs. Nearest valid: 2, 4"));
  CHECK(report({"model.qk_rope_head_dim=3", "model.mla_use_nope=true"}).empty());
  CHECK(contains(report({"model.mla_use_nope=true", "model.rope_scaling={factor: 4}"}),
                 "there is no rotation to scale"));
}

TEST_CASE("config: indexer") {
  const std::string indexer = "model.indexer={index_n_heads: 2, index_head_dim: 8, index_topk: 4}";
  CHECK(report({indexer}).empty());
  CHECK(contains(report({indexer, "model.indexer.index_rope_head_dim=10"}),
                 "10 rotated channels do not fit into index_head_dim (8)"));
  CHECK(contains(report({indexer, "model.indexer.index_rope_head_dim=3"}), "come in pairs"));
  CHECK(
      contains(report({indexer, "model.indexer.index_rope_head_dim=4", "model.mla_use_nope=true"}),
               "nothing is rotated"));
  CHECK(contains(report({indexer, linear("[1, 2]", "[]")}),
                 "there is no full-attention layer that could use it"));
  CHECK(contains(report({"model.indexer={index_n_heads: 2}"}),
                 "model.indexer.index_topk: is required"));
}

TEST_CASE("config: experts and groups") {
  CHECK(report_with_experts({}).empty());
  CHECK(contains(report({"model.num_experts=8"}),
                 "model.num_experts_per_token: is required, because num_experts is 8"));
  CHECK(contains(
      report_of(kTiny,
                {"model={num_experts: 8, num_experts_per_token: 9, moe_intermediate_size: 16}"}),
      "found 9; allowed: at most num_experts (8)"));
  CHECK(contains(report_with_experts({"model.num_expert_group=3"}),
                 "3 does not divide num_experts (8). Nearest valid: 2, 4"));
  CHECK(contains(report_with_experts({"model.num_expert_group=8"}), "needs at least 2"));
  CHECK(contains(report_with_experts({"model.num_expert_group=2", "model.topk_group=3"}),
                 "found 3; allowed: at most num_expert_group (2)"));
  CHECK(contains(report_of(kTiny,
                           {"model={num_experts: 8, num_experts_per_token: 3, "
                            "moe_intermediate_size: 16, num_expert_group: 4}"}),
                 "1 groups of 2 experts hold fewer than num_experts_per_token (3)"));
  CHECK(contains(report_with_experts({"model.first_k_dense_replace=3"}),
                 "at most num_hidden_layers (2)"));
  CHECK(contains(report({"model.intermediate_size=0"}),
                 "model.intermediate_size: is required, because layer 1 has a dense MLP"));
}

TEST_CASE("config: balancing") {
  CHECK(report_with_experts({"model.balance.bias_rule=quantile"}).empty());
  CHECK(contains(report_of(kTiny,
                           {"model={num_experts: 2, num_experts_per_token: 2, "
                            "moe_intermediate_size: 16, balance: {bias_rule: quantile}}"}),
                 "num_experts_per_token (2) must be below num_experts (2)"));
  CHECK(contains(report_with_experts({"model.balance.bias_rule=quantile_exact",
                                      "model.num_expert_group=2",
                                      "model.topk_group=2"}),
                 "defined without expert groups"));
  CHECK(contains(report({"model.balance.bias_rule=sign"}), "there are no experts to balance"));
}

TEST_CASE("config: residuals") {
  CHECK(contains(report({"model.residual.type=attention"}),
                 "is required with residual.type: attention"));
  CHECK(report({"model.residual={type: attention, full: true}"}).empty());
  CHECK(contains(report({"model.residual={type: attention, full: true, attn_res_block_size: 1}"}),
                 "remove one of the two"));
  CHECK(contains(report({"model.residual.full=true"}),
                 "is of use with residual.type: attention only"));
}

TEST_CASE("config: data, schedule, phases") {
  CHECK(report({"data.train=[{path: a, weight: 0.999999}, {path: b, weight: 1e-6}]"}).empty());
  CHECK(contains(report({"data.train=[{path: a, weight: 1}, b]"}), "data.train[1]: has no weight"));
  CHECK(contains(report({"data.train=[{path: a, weight: 0}]"}), "data.train[0].weight: found 0"));
  CHECK(contains(report({"data.train=[{weight: 1}]"}), "data.train[0].path: is required"));
  CHECK(contains(report({"data.train={path: a, weigth: 1}"}),
                 "data.train.weigth: unknown key; did you mean data.train.weight?"));
  CHECK(contains(report({"data.train=[{path: a, format: megatrom}]"}), "did you mean megatron?"));
  CHECK(contains(report({"data.valid=[{path: a, weight: 1}]"}), "not drawn by weight"));
  CHECK(contains(report({"data.end_of_text=256"}), "below model.vocab_size"));
  CHECK(contains(report({"model.vocab_size=255", "data.format=bytes_text"}),
                 "bytes_text has 256 different tokens"));
  CHECK(contains(report({"data.sequence_length=5000"}),
                 "at most model.max_position_embeddings (4096)"));
  CHECK(
      report({"data.sequence_length=5000",
              "train.phases=[{until: 5, sequence_length: 64}, {until: 10, sequence_length: 128}]"})
          .empty());
  CHECK(contains(report({"data.sequence_length=5000",
                         "train.phases=[{until: 5, sequence_length: 64}, {until: 10}]"}),
                 "at most model.max_position_embeddings (4096)"));
  CHECK(contains(report({"train.eval_every=2"}), "there is nothing to evaluate on"));
  CHECK(contains(report({"optimizer.lr_min=1"}),
                 "optimizer.lr_min: found 1; allowed: at most lr (0.001)"));
  CHECK(contains(report({"optimizer.warmup_steps=11"}), "at most train.steps (10)"));
  CHECK(contains(
      report({"optimizer.lr_schedule=wsd", "optimizer.warmup_steps=4", "optimizer.decay_steps=7"}),
      "allowed: at most 6"));
  CHECK(contains(
      report({"train.phases=[{until: 5}, {until: 5}]"}),
      "train.phases[1].until: found 5; phases end one after the other; allowed: more than 5"));
  CHECK(contains(report({"train.phases=[{until: 5}]"}),
                 "the last phase ends with the run; allowed: train.steps (10)"));
  CHECK(contains(report({"train.phases=[{until: 10, sparse_stage: warmup}]"}),
                 "train.phases[0].sparse_stage: there is no model.indexer"));
  CHECK(contains(report({"train.phases=[{until: 10, sequence_length: 5000}]"}),
                 "train.phases[0].sequence_length: found 5000"));
  CHECK(contains(report({"train.phases=[{until: 10, lr_min: 1}]"}),
                 "train.phases[0].lr_min: lr_min is above lr"));
  CHECK(contains(report({"parallel.dp=3"}),
                 "4 is not divisible by micro_batch_size * parallel.dp (3). Nearest valid: 3, 6"));
  CHECK(contains(report({"activations.recompute=[full, a]"}), "'full' stands alone"));
  CHECK(contains(report({"activations.recompute=['!a']"}), "write them behind full"));
  CHECK(!contains(report({"activations.recompute=[full, '!a']"}), "activations.recompute"));
}

TEST_CASE("config: sums in any order need a run that may differ from the next") {
  const std::string indexer = "model.indexer={index_n_heads: 2, index_head_dim: 8, index_topk: 4";
  CHECK(report_of_override(indexer + ", attention_form: gather}").empty());
  CHECK(contains(report_of_override(indexer + ", key_sums: float_atomics}"),
                 "model.indexer.key_sums: float_atomics adds in any order"));
  CHECK(report_of(kTiny, {indexer + ", key_sums: float_atomics}", "run.deterministic=false"})
            .empty());
}

TEST_CASE("config: helpers of the model section") {
  const config::Config c =
      config::load_config_text(
          kTiny, "t", {kExperts, linear("[2]", "[1]"), "model.first_k_dense_replace=1"})
          .config;
  CHECK_FALSE(c.model.is_kda_layer(0));
  CHECK(c.model.is_kda_layer(1));
  CHECK_FALSE(c.model.is_moe_layer(0));
  CHECK(c.model.is_moe_layer(1));
  CHECK(c.model.linear_attn_config->stored_a_log() == 2);
  CHECK(c.model.index_rope_dim() == 0);
}

TEST_CASE("config: what can be planned but not trained") {
  const config::Config plain = config::load_config_text(kTiny, "t").config;
  CHECK(config::check(plain).empty());
  CHECK(config::untrainable(plain).empty());
  const config::Config yarn =
      config::load_config_text(kTiny, "t", {"model.rope_scaling={factor: 4}"}).config;
  REQUIRE(config::untrainable(yarn).size() == 1);
  CHECK(config::untrainable(yarn)[0].key == "model.rope_scaling");
}

TEST_CASE("config: context parallelism cuts the tokens of a micro-batch into equal pieces") {
  CHECK(report({"parallel.cp=4"}).empty());
  CHECK(report({"parallel.cp=16", "parallel.tp=2"}).empty());
  CHECK(
      contains(report({"parallel.cp=3"}),
               "parallel.cp: 3 does not cut the 64 tokens of a micro-batch (data.sequence_length x "
               "train.micro_batch_size) into equal pieces. Nearest valid: 2, 4"));
  CHECK(contains(report({"parallel.cp=64", "parallel.tp=2"}), "32 for each of 2 ranks along tp"));
  // The whole micro-batch is cut, not each of its sequences.
  CHECK(report({"parallel.cp=3", "data.sequence_length=32", "train.micro_batch_size=3"}).empty() ==
        report({"data.sequence_length=32", "train.micro_batch_size=3"}).empty());
  CHECK(
      contains(report({"parallel.cp=32", linear("[1]", "[2]")}),
               "pieces of 2 tokens are shorter than the 3 that "
               "model.linear_attn_config.short_conv_kernel_size reaches back. Nearest valid: 16"));
  CHECK(contains(
      report({"parallel.cp=4", "train.phases=[{until: 5}, {until: 10, sequence_length: 30}]"}),
      "4 does not cut the 30 tokens of a micro-batch (train.phases[1].sequence_length"));
}

TEST_CASE(
    "config: activations.piece_tokens cuts micro-batches into equal pieces, or says why not") {
  const auto found = [](int tokens, std::vector<std::string> more) {
    more.push_back("activations.piece_tokens=" + std::to_string(tokens));
    return report(more);
  };
  for (const int tokens : {0, 1, 16, 20, 64, 1000})
    CHECK(found(tokens, {}).empty());
  CHECK(contains(found(50, {"data.sequence_length=97"}),
                 "activations.piece_tokens: found 50; the 97 tokens of a micro-batch cannot be cut "
                 "into equal pieces of at most so many and at least half as many tokens. Nearest "
                 "valid: 1, 97"));
  CHECK(contains(found(5, {"parallel.tp=2", "data.sequence_length=66"}),
                 "that divide among 2 ranks along tp. Nearest valid: 2, 6"));
  CHECK(contains(found(2, {linear("[1]", "[2]")}), "pieces of 2 tokens are shorter than the 3"));
  CHECK(contains(found(16, {"parallel.cp=2"}),
                 "activations.piece_tokens: the ranks along cp (2) work off pieces side by side"));
  CHECK(contains(found(16, {"parallel.pp=2"}), "the stages of a pipeline (2)"));
  for (const char* loss : {"switch", "sequence"}) {
    const std::string aux = std::string("model.balance.aux_loss=") + loss;
    CHECK(contains(found(16, {aux}), std::string("the auxiliary loss '") + loss + "'"));
    CHECK_FALSE(contains(found(64, {aux}), "the auxiliary loss"));
  }
  CHECK_FALSE(contains(found(16, {"model.balance.aux_loss=global"}), "the auxiliary loss"));
  CHECK(contains(found(16, {"model.capacity_factor=1.5"}), "compete for an expert's places"));
  // Every phase has a length of its own.
  CHECK(contains(
      found(16,
            {"train.phases=[{until: 5}, {until: 10, sequence_length: 31, micro_batch_size: 1}]"}),
      "the 31 tokens of a micro-batch"));
}

TEST_CASE("config: what tensor parallelism splits must divide") {
  CHECK(report({"parallel.tp=1", "parallel.etp=1"}).empty());
  const std::string found = report({"parallel.tp=3"});
  CHECK(contains(found,
                 "parallel.tp: 3 does not divide model.num_attention_heads (2). Nearest valid: 2"));
  CHECK(contains(found, "parallel.tp: 3 does not divide data.sequence_length"));
  CHECK(contains(report({"parallel.tp=2", "model.vocab_size=257"}),
                 "parallel.tp: 2 does not divide model.vocab_size (257). Nearest valid: 1, 257; or "
                 "model.vocab_size: 258"));
}

TEST_CASE("config: keys of pipelines") {
  CHECK(report({"parallel.pp=2"}).empty());
  CHECK(report({"parallel.pp=2", "parallel.schedule=interleaved", "parallel.layers=[1,1,0,0]"})
            .empty());
  CHECK(contains(report({"parallel.chunks=2"}),
                 "parallel.chunks: is of use with parallel.pp above 1 only"));
  CHECK(contains(report({"parallel.layers=[1,1]"}),
                 "parallel.layers: is of use with parallel.pp above 1 only"));
  CHECK(contains(report({"parallel.schedule=dualpipe"}), "one of: 1f1b, interleaved"));
  CHECK(contains(report({"parallel.chunks=0"}), "parallel.chunks: found 0"));
  const config::Config two = config::load_config_text(kTiny, "t", {"parallel.pp=2"}).config;
  CHECK(config::untrainable(two).empty());
  CHECK(two.parallel.chunks_per_stage() == 1);
  config::Config interleaved = two;
  interleaved.parallel.schedule = config::PipelineSchedule::interleaved;
  CHECK(interleaved.parallel.chunks_per_stage() == 2);
}

TEST_CASE("config: offload of experts") {
  const auto offload = [](std::vector<std::string> more, const char* what = "full") {
    more.insert(more.begin(), {kExperts, std::string("experts.offload=") + what});
    return report(more);
  };
  CHECK(offload({}).empty());
  CHECK(offload({"experts.policy=static", "experts.device_cache=24GiB"}, "states").empty());
  CHECK(offload({"memory.device_budget=72GiB",
                 "memory.host_budget=100GiB",
                 "memory.file_budget=1TiB",
                 "memory.file_path=/scratch",
                 "memory.verify_reads=false",
                 "experts.touch_log=touches.jsonl"})
            .empty());
  // Off and on again with the same budgets.
  CHECK(offload({"memory.device_budget=72GiB", "memory.host_budget=1GiB"}, "none").empty());
  CHECK(contains(offload({"memory.file_budget=1TiB", "memory.host_budget=1GiB"}),
                 "memory.file_budget: needs memory.file_path"));
  CHECK(contains(offload({"memory.file_path=/scratch"}),
                 "memory.file_path: needs memory.file_budget"));
  CHECK(contains(offload({"memory.file_budget=1TiB", "memory.file_path=/scratch"}),
                 "memory.file_budget: the file holds what memory.host_budget does not"));
  CHECK(contains(offload({"experts.device_cache=2GiB", "memory.device_budget=1GiB"}),
                 "experts.device_cache: found 2147483648; allowed: at most memory.device_budget "
                 "(1073741824), or null"));
  CHECK(contains(offload({"experts.touch_log=a"}, "states"),
                 "experts.touch_log: is of use with experts.offload: full only"));
  CHECK(offload({"experts.place_every=10"}).empty());
  CHECK(contains(offload({"experts.place_every=10", "experts.replicas=1"}),
                 "experts.replicas: offloaded experts have no copies on other ranks yet"));
  CHECK(offload({"optimizer.name=muon", "parallel.etp=2"}).empty());
  CHECK(contains(report({"experts.offload=full"}), "experts.offload: there are no experts"));
  CHECK(contains(offload({"memory.host_budget=0"}), "memory.host_budget: found 0"));
  CHECK(contains(offload({"experts.policy=lfu"}), "one of: sched, lru, static, random"));
}

TEST_CASE("config: updates of experts in the backward") {
  const auto early = [](std::vector<std::string> more) {
    for (const std::string one : {"experts.offload=full",
                                  "experts.update=in_backward",
                                  "optimizer.clip_grad_norm=0",
                                  "parallel.order=vertical"}) {
      const std::string key = one.substr(0, one.find('=') + 1);
      if (std::none_of(more.begin(), more.end(), [&](const auto& m) { return m.starts_with(key); }))
        more.push_back(one);
    }
    more.push_back(kExperts);
    return report(more);
  };
  CHECK(early({}).empty());
  CHECK(early({"optimizer.untouched=lazy", "optimizer.name=muon"}).empty());
  // With one micro-batch a step both orders are the same, and without dp nobody knows how many there are.
  CHECK(early({"parallel.order=horizontal"}).empty());
  CHECK(early({"parallel.order=horizontal",
               "parallel.dp=2",
               "train.global_batch_size=2",
               "train.micro_batch_size=1"})
            .empty());
  CHECK(contains(early({"experts.offload=states"}),
                 "experts.update: in_backward is for experts whose gradients are offloaded, and "
                 "experts.offload is states; allowed: after_step, or offload: full"));
  CHECK(contains(early({"optimizer.clip_grad_norm=0.5"}),
                 "and optimizer.clip_grad_norm is 0.5; allowed: after_step, or clip_grad_norm: 0"));
  CHECK(
      contains(early({"optimizer.untouched=skip"}),
               "which optimizer.untouched: skip reads; allowed: after_step, or untouched: dense"));
  CHECK(contains(early({"parallel.order=horizontal", "parallel.pp=2"}),
                 "and parallel.pp is 2; allowed: after_step, or pp: 1 and order: vertical"));
  CHECK(contains(early({"parallel.order=horizontal",
                        "parallel.dp=2",
                        "train.global_batch_size=8",
                        "train.micro_batch_size=1"}),
                 "experts.update: in_backward needs the losses of all micro-batches before the "
                 "first gradient is final, and parallel.order is horizontal with 4 micro-batches"));
  CHECK(contains(early({"experts.update=early"}), "one of: after_step, in_backward"));
}
