#include <algorithm>

#include <fmt/format.h>

#include "core/config/check_parts.h"
#include "core/config/check_topics.h"

namespace moesaic::config {
namespace {

using Keys = std::vector<std::string>;

class ModelChecker : public Checker {
 public:
  using Checker::Checker;

  void run() {
    attention_layers();
    mla();
    indexer();
    dense_layers();
    experts();
    expert_groups();
    balance();
    residual();
    rope_scaling();
  }

 private:
  /// `value` of `key` must be positive because of `reason`, which rests on `also`.
  void needs(const std::string& key, std::int64_t value, const std::string& reason, Keys also) {
    if (value > 0) return;
    also.insert(also.begin(), key);
    add(std::move(also),
        fmt::format("is required, because {}; allowed: an integer, at least 1", reason));
  }

  /// kda_layers and full_attn_layers name each of 1 … num_hidden_layers once.
  void attention_layers() {
    if (!model_.linear_attn_config) return;
    const LinearAttnConfig& linear = *model_.linear_attn_config;
    std::vector<int> named(static_cast<std::size_t>(model_.num_hidden_layers) + 1, 0);
    std::vector<std::int64_t> outside, twice, missing;
    for (const auto* layers : {&linear.kda_layers, &linear.full_attn_layers}) {
      for (const std::int64_t layer : *layers) {
        if (layer < 1 || layer > model_.num_hidden_layers)
          outside.push_back(layer);
        else if (++named[static_cast<std::size_t>(layer)] == 2)
          twice.push_back(layer);
      }
    }
    for (std::int64_t layer = 1; layer <= model_.num_hidden_layers; ++layer) {
      if (named[static_cast<std::size_t>(layer)] == 0) missing.push_back(layer);
    }
    std::string message;
    if (!outside.empty()) message += fmt::format("; outside: {}", shown(outside));
    if (!twice.empty()) message += fmt::format("; named twice: {}", shown(twice));
    if (!missing.empty()) message += fmt::format("; not named: {}", shown(missing));
    if (linear.a_log_entries && *linear.a_log_entries < linear.num_heads) too_few_a_log(linear);
    if (message.empty()) return;
    const std::string section = "model.linear_attn_config";
    add({section + ".kda_layers", section + ".full_attn_layers", "model.num_hidden_layers"},
        fmt::format(
            "kda_layers and full_attn_layers must together name each layer from 1 to {} once{}",
            model_.num_hidden_layers,
            message));
  }

  void too_few_a_log(const LinearAttnConfig& linear) {
    add({"model.linear_attn_config.a_log_entries", "model.linear_attn_config.num_heads"},
        fmt::format(
            "found {}; allowed: at least num_heads ({})", *linear.a_log_entries, linear.num_heads));
  }

  static std::string shown(const std::vector<std::int64_t>& layers) {
    constexpr std::size_t kShown = 12;
    const std::vector<std::int64_t> head(
        layers.begin(),
        layers.begin() + static_cast<std::ptrdiff_t>(std::min(kShown, layers.size())));
    return fmt::format("{}{}", fmt::join(head, ", "), layers.size() > kShown ? ", …" : "");
  }

  void mla() {
    if (full_attention_layers() == 0 && !has_mtp()) return;
    std::string reason = "all layers are full attention (there is no linear_attn_config)";
    if (full_attention_layers() == 0)
      reason = "the MTP module has full attention";
    else if (model_.linear_attn_config)
      reason = "full_attn_layers is not empty";
    const Keys also = {"model.linear_attn_config"};
    needs("model.num_attention_heads", model_.num_attention_heads, reason, also);
    needs("model.kv_lora_rank", model_.kv_lora_rank, reason, also);
    needs("model.v_head_dim", model_.v_head_dim, reason, also);
    if (model_.qk_nope_head_dim + model_.qk_rope_head_dim == 0)
      needs("model.qk_nope_head_dim", 0, reason, also);
    if (!model_.mla_use_nope && model_.qk_rope_head_dim % 2 != 0) {
      add({"model.qk_rope_head_dim", "model.mla_use_nope"},
          fmt::format("found {}; rotated channels come in pairs. Nearest valid: {}, {}",
                      model_.qk_rope_head_dim,
                      model_.qk_rope_head_dim - 1,
                      model_.qk_rope_head_dim + 1));
    }
  }

  void indexer() {
    if (!model_.indexer) return;
    if (full_attention_layers() == 0)
      add({"model.indexer", "model.linear_attn_config"},
          "there is no full-attention layer that could use it; remove the group");
    if (model_.indexer->key_sums == KeySumsChoice::float_atomics && config_.run.deterministic)
      add({"model.indexer.key_sums", "run.deterministic"},
          "float_atomics adds in any order, so that two runs differ; allowed: integer, or "
          "run.deterministic: false");
    const std::int64_t rope = model_.index_rope_dim();
    const std::int64_t width = model_.indexer->index_head_dim;
    const std::string key = "model.indexer.index_rope_head_dim";
    if (model_.mla_use_nope && model_.indexer->index_rope_head_dim.value_or(0) != 0) {
      add({key, "model.mla_use_nope"},
          "mla_use_nope is true, so nothing is rotated; allowed: 0 or null");
    }
    if (rope > width)
      add({key, "model.indexer.index_head_dim", "model.qk_rope_head_dim"},
          fmt::format("{} rotated channels do not fit into index_head_dim ({}); allowed: an even "
                      "integer, at most {}",
                      rope,
                      width,
                      width));
    else if (rope % 2 != 0)
      add({key, "model.qk_rope_head_dim"},
          fmt::format("found {}; rotated channels come in pairs. Nearest valid: {}, {}",
                      rope,
                      rope - 1,
                      rope + 1));
  }

  void dense_layers() {
    for (std::int64_t layer = 0; layer < model_.num_hidden_layers; ++layer) {
      if (model_.is_moe_layer(layer)) continue;
      return needs("model.intermediate_size",
                   model_.intermediate_size,
                   fmt::format("layer {} has a dense MLP", layer + 1),
                   {"model.num_experts", "model.first_k_dense_replace", "model.moe_layer_freq"});
    }
  }

  void experts() {
    if (model_.first_k_dense_replace > model_.num_hidden_layers) {
      add({"model.first_k_dense_replace", "model.num_hidden_layers"},
          fmt::format("found {}; allowed: at most num_hidden_layers ({})",
                      model_.first_k_dense_replace,
                      model_.num_hidden_layers));
    }
    if (model_.num_experts == 0) return;
    const std::string reason = fmt::format("num_experts is {}", model_.num_experts);
    needs(
        "model.num_experts_per_token", model_.num_experts_per_token, reason, {"model.num_experts"});
    needs(
        "model.moe_intermediate_size", model_.moe_intermediate_size, reason, {"model.num_experts"});
    if (model_.num_experts_per_token > model_.num_experts) {
      add({"model.num_experts_per_token", "model.num_experts"},
          fmt::format("found {}; allowed: at most num_experts ({})",
                      model_.num_experts_per_token,
                      model_.num_experts));
    }
  }

  void expert_groups() {
    const std::int64_t groups = model_.num_expert_group;
    if (model_.num_experts == 0 || groups == 1) return;
    if (model_.num_experts % groups != 0) {
      return add({"model.num_expert_group", "model.num_experts"},
                 fmt::format("{} does not divide num_experts ({}). Nearest valid: {}",
                             groups,
                             model_.num_experts,
                             near_divisors(model_.num_experts, groups)));
    }
    const std::int64_t per_group = model_.num_experts / groups;
    if (per_group < 2)
      add({"model.num_expert_group", "model.num_experts"},
          "a group's value is the sum of its two best experts, so it needs at least 2");
    if (model_.topk_group > groups) {
      add({"model.topk_group", "model.num_expert_group"},
          fmt::format(
              "found {}; allowed: at most num_expert_group ({})", model_.topk_group, groups));
    } else if (model_.num_experts_per_token > model_.topk_group * per_group) {
      add({"model.topk_group",
           "model.num_expert_group",
           "model.num_experts",
           "model.num_experts_per_token"},
          fmt::format("{} groups of {} experts hold fewer than num_experts_per_token ({})",
                      model_.topk_group,
                      per_group,
                      model_.num_experts_per_token));
    }
  }

  void balance() {
    const BalanceConfig& balance = model_.balance;
    if (model_.num_experts == 0) {
      if (balance.bias_rule != BiasRule::none || balance.aux_loss != AuxLoss::none)
        add({"model.balance", "model.num_experts"},
            "there are no experts to balance (num_experts is 0); remove the group");
      return;
    }
    const bool quantile =
        balance.bias_rule == BiasRule::quantile || balance.bias_rule == BiasRule::quantile_exact;
    if (!quantile) return;
    if (model_.num_experts_per_token + 1 > model_.num_experts) {
      add({"model.balance.bias_rule", "model.num_experts", "model.num_experts_per_token"},
          fmt::format("{} compares with the first expert that is not selected, so "
                      "num_experts_per_token ({}) must be below num_experts ({})",
                      name_of(balance.bias_rule),
                      model_.num_experts_per_token,
                      model_.num_experts));
    }
    if (model_.num_expert_group > 1) {
      add({"model.balance.bias_rule", "model.num_expert_group"},
          fmt::format("{} is defined without expert groups; allowed here: none, sign",
                      name_of(balance.bias_rule)));
    }
  }

  void residual() {
    const ResidualConfig& residual = model_.residual;
    const std::string key = "model.residual.attn_res_block_size";
    if (residual.type == ResidualType::plain) {
      if (residual.attn_res_block_size || residual.full)
        add({residual.full ? "model.residual.full" : key, "model.residual.type"},
            "is of use with residual.type: attention only");
      return;
    }
    if (!residual.full && !residual.attn_res_block_size)
      add({key, "model.residual.type", "model.residual.full"},
          "is required with residual.type: attention; write the layers per block, or full: true");
    if (residual.full && residual.attn_res_block_size)
      add({key, "model.residual.full"},
          "there are no blocks with full: true; remove one of the two keys");
  }

  void rope_scaling() {
    if (model_.rope_scaling && model_.mla_use_nope)
      add({"model.rope_scaling", "model.mla_use_nope"},
          "mla_use_nope is true, so there is no rotation to scale; remove the group");
  }
};

}  // namespace

void add_model_findings(const Config& config, std::vector<Finding>& findings) {
  ModelChecker(config, findings).run();
}

}  // namespace moesaic::config
