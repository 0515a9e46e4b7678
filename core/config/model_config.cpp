#include "core/config/model_config.h"

#include <algorithm>

#include "core/config/fields.h"

namespace moesaic::config {
namespace {

// Bounds that no real model meets, and below which products of three sizes stay exact in 64 bits.
constexpr double kMaxWidth = 1 << 20;
constexpr double kMaxLayers = 1 << 14;
constexpr double kMaxVocab = 1 << 30;

}  // namespace

void LinearAttnConfig::describe(Fields<LinearAttnConfig>& f) {
  using S = LinearAttnConfig;
  f("kda_layers",
    &S::kda_layers,
    "Numbers of the Kimi Delta Attention layers, counted from 1. Together with full_attn_layers "
    "they name every layer once.")
      .between(1, kMaxLayers)
      .example("[1, 2, 3, 5, 6, 7]");
  f("full_attn_layers",
    &S::full_attn_layers,
    "Numbers of the full-attention (MLA) layers, counted from 1.")
      .between(1, kMaxLayers)
      .example("[4, 8]");
  f("num_heads", &S::num_heads, "Heads of a KDA layer.")
      .required()
      .between(1, kMaxWidth)
      .example("32");
  f("head_dim", &S::head_dim, "Channels per KDA head, for queries, keys and values alike.")
      .required()
      .between(1, kMaxWidth)
      .example("128");
  f("short_conv_kernel_size",
    &S::short_conv_kernel_size,
    "Taps of the causal convolution after the q, k and v projections.")
      .between(1, 16);
  f("gate_lower_bound",
    &S::gate_lower_bound,
    "Lower bound of the log decay, g = bound * sigmoid(exp(A) (z + b)) (Kimi-K3: -5). null = "
    "softplus gate without a bound (Kimi-Linear).")
      .below(0)
      .at_least(-80)
      .example("-5");
  f("use_full_rank_gate",
    &S::use_full_rank_gate,
    "Output gate by one full matrix (Kimi-K3) instead of two of rank head_dim (Kimi-Linear).");
  f("a_log_entries",
    &S::a_log_entries,
    "Entries of A_log stored per layer; those beyond num_heads are padding (Kimi-K3 stores 128 for "
    "96 heads).")
      .between(1, kMaxWidth)
      .default_is("null (num_heads)");
}

void RopeScalingConfig::describe(Fields<RopeScalingConfig>& f) {
  using S = RopeScalingConfig;
  f("type", &S::type, "Kind of context extension.").also({"rope_type"});
  f("factor", &S::factor, "Extension of the context: max positions / original positions.")
      .required()
      .at_least(1);
  f("original_max_position_embeddings",
    &S::original_max_position_embeddings,
    "Positions of the model before the extension.")
      .at_least(1);
  f("beta_fast",
    &S::beta_fast,
    "Turns within the original context above which a channel pair is not interpolated.")
      .above(0);
  f("beta_slow",
    &S::beta_slow,
    "Turns within the original context below which a channel pair is fully interpolated.")
      .above(0);
  f("mscale", &S::mscale, "Strength of the correction of the attention temperature.").at_least(0);
  f("mscale_all_dim",
    &S::mscale_all_dim,
    "Strength of the correction that acts on the softmax scale.")
      .at_least(0);
}

void IndexerConfig::describe(Fields<IndexerConfig>& f) {
  using S = IndexerConfig;
  f("index_n_heads", &S::index_n_heads, "Heads of the lightning indexer.")
      .required()
      .between(1, kMaxWidth)
      .example("64");
  f("index_head_dim", &S::index_head_dim, "Channels per indexer head.")
      .required()
      .between(1, kMaxWidth)
      .example("128");
  f("index_topk", &S::index_topk, "Keys that each query attends to.")
      .required()
      .between(1, kMaxVocab)
      .example("2048");
  f("index_rope_head_dim",
    &S::index_rope_head_dim,
    "Channels of an indexer head that are rotated by position.")
      .between(0, kMaxWidth)
      .default_is("null (0 with mla_use_nope, else qk_rope_head_dim)");
  f("index_norm_eps", &S::index_norm_eps, "Epsilon of the LayerNorm of the indexer's keys.")
      .above(0);
  f("kl_weight",
    &S::kl_weight,
    "Weight of the indexer's objective KL(attention || softmax of index scores), mean over tokens.")
      .at_least(0);
  f("attention_form",
    &S::attention_form,
    "How attention over the selected keys is computed; results differ by rounding. masked: all "
    "keys "
    "and values of every head, with a mask. gather: the selected rows of the latent alone. auto: "
    "gather in sequences of more than gather_beyond tokens.");
  f("gather_beyond",
    &S::gather_beyond,
    "Tokens of a sequence beyond which attention_form: auto gathers.")
      .at_least(0);
  f("key_sums",
    &S::key_sums,
    "How gather's backward adds up the gradients of keys. integer: as scaled 64-bit integers, the "
    "same bits in every run. float_atomics: on a GPU, in any order; needs run.deterministic: "
    "false.");
}

void BalanceConfig::describe(Fields<BalanceConfig>& f) {
  using S = BalanceConfig;
  f("bias_rule",
    &S::bias_rule,
    "Rule that moves the selection bias of the experts after each step: by a fixed amount (sign), "
    "or to the quantile that balances the step's tokens (from a histogram, or exactly).");
  f("sign_gamma", &S::sign_gamma, "Step of the sign rule.").above(0);
  f("histogram_bins", &S::histogram_bins, "Bins per expert of the quantile rule's histogram.")
      .between(2, kMaxWidth);
  f("aux_loss",
    &S::aux_loss,
    "Auxiliary load-balancing loss: none, switch (shares of a micro-batch, as published, so "
    "the value depends on train.micro_batch_size), sequence (per document), global (with the "
    "counts "
    "of the previous step).");
  f("aux_loss_weight", &S::aux_loss_weight, "Weight of aux_loss.")
      .at_least(0)
      .also({"router_aux_loss_coef", "aux_loss_alpha"});
  f("z_loss_weight",
    &S::z_loss_weight,
    "Weight of the mean squared log-sum-exp of the router logits.")
      .at_least(0)
      .also({"router_z_loss_coef"});
}

void ResidualConfig::describe(Fields<ResidualConfig>& f) {
  using S = ResidualConfig;
  f("type",
    &S::type,
    "plain: x + sublayer(x). attention: the input of each sublayer is a softmax mix of earlier "
    "outputs.");
  f("attn_res_block_size",
    &S::attn_res_block_size,
    "Transformer layers per block of attention residuals (Kimi-K3: 12).")
      .between(1, kMaxLayers)
      .example("12");
  f("full", &S::full, "Attention residuals over every earlier sublayer instead of over blocks.");
}

void MtpConfig::describe(Fields<MtpConfig>& f) {
  using S = MtpConfig;
  f("num_nextn_predict_layers",
    &S::num_nextn_predict_layers,
    "Multi-token-prediction modules after the trunk.")
      .between(0, 1)
      .example("1");
  f("mtp_hidden",
    &S::mtp_hidden,
    "Trunk output that the module reads: before or after the final norm.");
  f("loss_weight", &S::loss_weight, "Weight of the multi-token-prediction loss.").at_least(0);
}

namespace {

void describe_trunk(Fields<ModelConfig>& f) {
  using S = ModelConfig;
  f("model_type",
    &S::model_type,
    "Family name in the published config.json; kept for export, chooses nothing here.")
      .example("kimi_linear");
  f("hidden_size", &S::hidden_size, "Width of the hidden state.")
      .required()
      .between(1, kMaxWidth)
      .example("2304");
  f("num_hidden_layers",
    &S::num_hidden_layers,
    "Transformer layers, multi-token-prediction modules not counted.")
      .required()
      .between(1, kMaxLayers)
      .also({"num_layers", "n_layers", "n_layer"})
      .example("27");
  f("vocab_size", &S::vocab_size, "Rows of the embedding table and of the head.")
      .required()
      .between(1, kMaxVocab)
      .example("163840");
  f("max_position_embeddings",
    &S::max_position_embeddings,
    "Longest context the model is meant for.")
      .between(1, kMaxVocab);
  f("tie_word_embeddings", &S::tie_word_embeddings, "The head uses the embedding table.");
  f("rms_norm_eps",
    &S::rms_norm_eps,
    "Epsilon of the RMS norms over the hidden size, of the KDA output norm, the latent MoE norm "
    "and the residual mixes.")
      .above(0);
  f("latent_norm_eps",
    &S::latent_norm_eps,
    "Epsilon of the norms of MLA's query and key-value latents.")
      .above(0);
  f("initializer_range",
    &S::initializer_range,
    "Standard deviation of the initial matrices (truncated normal).")
      .above(0);
  f("hidden_act", &S::hidden_act, "Activation of gated MLPs: silu (SwiGLU) or situ (SiTU-GLU).");
  f("activation_situ_beta", &S::activation_situ_beta, "Bound of the gate branch of SiTU-GLU.")
      .above(0);
  f("activation_situ_linear_beta",
    &S::activation_situ_linear_beta,
    "Bound of the linear branch of SiTU-GLU.")
      .above(0);
  f("intermediate_size",
    &S::intermediate_size,
    "Inner width of the dense MLP (layers without experts).")
      .between(0, kMaxWidth)
      .also({"dense_intermediate_size"})
      .example("9216");
}

void describe_attention(Fields<ModelConfig>& f) {
  using S = ModelConfig;
  f("linear_attn_config",
    &S::linear_attn_config,
    "Kimi Delta Attention and which layers use it. Absent: every layer is full attention.");
  f("num_attention_heads", &S::num_attention_heads, "Heads of a full-attention (MLA) layer.")
      .between(0, kMaxWidth)
      .example("32");
  f("q_lora_rank",
    &S::q_lora_rank,
    "Width of the query latent. null = queries straight from the hidden state.")
      .between(1, kMaxWidth)
      .example("1536");
  f("kv_lora_rank", &S::kv_lora_rank, "Width of the key-value latent.")
      .between(0, kMaxWidth)
      .example("512");
  f("qk_nope_head_dim",
    &S::qk_nope_head_dim,
    "Query and key channels per head that are never rotated.")
      .between(0, kMaxWidth)
      .example("128");
  f("qk_rope_head_dim",
    &S::qk_rope_head_dim,
    "Channels of the key part that all heads share; rotated by position unless mla_use_nope.")
      .between(0, kMaxWidth)
      .example("64");
  f("v_head_dim", &S::v_head_dim, "Value channels per head.").between(0, kMaxWidth).example("128");
  f("mla_use_nope",
    &S::mla_use_nope,
    "No rotation anywhere (Kimi); the shared key part stays as ordinary channels.");
  f("mla_use_output_gate",
    &S::mla_use_output_gate,
    "Sigmoid gate on the attention output (Kimi-K3).");
  f("rope_theta", &S::rope_theta, "Base of the rotation frequencies.").above(1);
  f("rope_interleaved",
    &S::rope_interleaved,
    "Rotated pairs are channels (0,1), (2,3), … (true) or (j, j + half) (false). The indexer "
    "always uses halves.")
      .also({"rope_interleave"});
  f("rope_scaling",
    &S::rope_scaling,
    "Context extension by YaRN. Such a model can be planned; training it is refused.");
  f("indexer",
    &S::indexer,
    "Top-k sparse attention in the full-attention layers. Absent: dense attention.");
}

void describe_experts(Fields<ModelConfig>& f) {
  using S = ModelConfig;
  f("num_experts", &S::num_experts, "Routed experts per MoE layer; 0 = dense MLP in every layer.")
      .between(0, kMaxWidth)
      .also({"n_routed_experts", "num_local_experts", "moe_num_experts"})
      .example("256");
  f("num_experts_per_token",
    &S::num_experts_per_token,
    "Experts that each token is sent to (top-k).")
      .between(0, kMaxWidth)
      .also({"num_experts_per_tok", "moe_topk", "moe_top_k"})
      .example("8");
  f("num_shared_experts",
    &S::num_shared_experts,
    "Experts that every token passes, stored as one MLP of num_shared_experts * "
    "moe_intermediate_size.")
      .between(0, 1024)
      .also({"n_shared_experts"})
      .example("1");
  f("moe_intermediate_size", &S::moe_intermediate_size, "Inner width of one expert.")
      .between(0, kMaxWidth)
      .example("1024");
  f("routed_expert_hidden_size",
    &S::routed_expert_hidden_size,
    "Latent width in which the routed experts work (LatentMoE). null = they work at hidden_size.")
      .between(1, kMaxWidth)
      .example("3584");
  f("latent_moe_use_norm",
    &S::latent_moe_use_norm,
    "RMS norm on the summed expert output before it leaves the latent space.");
  f("moe_renormalize",
    &S::moe_renormalize,
    "Router weights of the selected experts are divided by their sum.")
      .also({"norm_topk_prob"});
  f("moe_router_activation_func",
    &S::moe_router_activation_func,
    "Router score of an expert: sigmoid of its logit, or softmax over all.")
      .also({"scoring_func", "router_activation_func"});
  f("routed_scaling_factor", &S::routed_scaling_factor, "Factor on the routed part of the output.")
      .above(0);
  f("first_k_dense_replace",
    &S::first_k_dense_replace,
    "Number of first layers with a dense MLP instead of experts.")
      .between(0, kMaxLayers)
      .example("1");
  f("moe_layer_freq",
    &S::moe_layer_freq,
    "After the first dense layers, every so-many-th layer has experts (layer index from 0 "
    "divisible by it).")
      .between(1, kMaxLayers);
  f("num_expert_group",
    &S::num_expert_group,
    "Groups of experts for group-limited selection; 1 = no groups.")
      .between(1, kMaxWidth)
      .also({"n_group"});
  f("topk_group", &S::topk_group, "Groups that a token may select from.").between(1, kMaxWidth);
  f("capacity_factor",
    &S::capacity_factor,
    "Tokens an expert keeps, as a multiple of the balanced load; the rest is dropped. It "
    "counts per micro-batch, so what is dropped depends on train.micro_batch_size. null = nothing "
    "is "
    "dropped.")
      .above(0)
      .example("1.25");
  f("capacity_policy",
    &S::capacity_policy,
    "Which tokens a full expert keeps: those with the largest router weight (prob) or the first "
    "(position).");
}

}  // namespace

void ModelConfig::describe(Fields<ModelConfig>& f) {
  using S = ModelConfig;
  describe_trunk(f);
  describe_attention(f);
  describe_experts(f);
  f("balance", &S::balance, "How the load of the experts is kept even.");
  f("residual", &S::residual, "Residual connections.");
  f("mtp", &S::mtp, "Multi-token prediction.");
}

bool ModelConfig::is_kda_layer(std::int64_t layer) const {
  if (!linear_attn_config) return false;
  const auto& layers = linear_attn_config->kda_layers;
  return std::find(layers.begin(), layers.end(), layer + 1) != layers.end();
}

bool ModelConfig::is_moe_layer(std::int64_t layer) const {
  return num_experts > 0 && layer >= first_k_dense_replace && layer % moe_layer_freq == 0;
}

std::int64_t ModelConfig::index_rope_dim() const {
  if (!indexer || mla_use_nope) return 0;
  return indexer->index_rope_head_dim.value_or(qk_rope_head_dim);
}

}  // namespace moesaic::config
