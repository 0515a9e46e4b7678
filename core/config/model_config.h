#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/config/enums.h"

// The model, with the names of the published config.json files. What each key means stands in its
// field list (model_config.cpp) and is printed by `moesaic explain model.KEY`.
namespace moesaic::config {

template <class S>
class Fields;

/// Kimi Delta Attention layers and the split of the layers into KDA and full attention.
struct LinearAttnConfig {
  std::vector<std::int64_t> kda_layers;        ///< one-based
  std::vector<std::int64_t> full_attn_layers;  ///< one-based
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t short_conv_kernel_size = 4;
  std::optional<double> gate_lower_bound;  ///< empty = softplus gate
  bool use_full_rank_gate = false;
  std::optional<std::int64_t>
      a_log_entries;  ///< stored entries of A_log per layer; empty = num_heads
  static void describe(Fields<LinearAttnConfig>& f);

  std::int64_t stored_a_log() const { return a_log_entries.value_or(num_heads); }
};

struct RopeScalingConfig {
  RopeScalingType type = RopeScalingType::yarn;
  double factor = 1;
  std::int64_t original_max_position_embeddings = 4096;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 1;
  static void describe(Fields<RopeScalingConfig>& f);
};

/// Top-k sparse attention with a lightning indexer, in all full-attention layers.
struct IndexerConfig {
  std::int64_t index_n_heads = 0;
  std::int64_t index_head_dim = 0;
  std::int64_t index_topk = 0;
  std::optional<std::int64_t>
      index_rope_head_dim;  ///< empty = qk_rope_head_dim, or 0 with mla_use_nope
  double index_norm_eps = 1e-6;
  double kl_weight = 1.0;
  AttentionForm attention_form = AttentionForm::automatic;
  std::int64_t gather_beyond = 65536;
  KeySumsChoice key_sums = KeySumsChoice::integer;
  static void describe(Fields<IndexerConfig>& f);
};

struct BalanceConfig {
  BiasRule bias_rule = BiasRule::none;
  double sign_gamma = 1e-3;
  std::int64_t histogram_bins = 1001;
  AuxLoss aux_loss = AuxLoss::none;
  double aux_loss_weight = 1e-4;
  double z_loss_weight = 0;
  static void describe(Fields<BalanceConfig>& f);
};

struct ResidualConfig {
  ResidualType type = ResidualType::plain;
  std::optional<std::int64_t> attn_res_block_size;  ///< transformer layers per block
  bool full = false;                                ///< every sublayer is a source
  static void describe(Fields<ResidualConfig>& f);
};

struct MtpConfig {
  std::int64_t num_nextn_predict_layers = 0;
  MtpHidden mtp_hidden = MtpHidden::pre_norm;
  double loss_weight = 0.3;
  static void describe(Fields<MtpConfig>& f);
};

struct ModelConfig {
  std::string model_type = "kimi_linear";
  std::int64_t hidden_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t vocab_size = 0;
  std::int64_t max_position_embeddings = 4096;
  bool tie_word_embeddings = false;
  double rms_norm_eps = 1e-5;
  double latent_norm_eps = 1e-6;
  double initializer_range = 0.02;
  HiddenAct hidden_act = HiddenAct::silu;
  double activation_situ_beta = 4;
  double activation_situ_linear_beta = 25;
  std::int64_t intermediate_size = 0;

  std::optional<LinearAttnConfig> linear_attn_config;  ///< empty = every layer is full attention

  std::int64_t num_attention_heads = 0;
  std::optional<std::int64_t> q_lora_rank;  ///< empty = queries straight from the hidden state
  std::int64_t kv_lora_rank = 0;
  std::int64_t qk_nope_head_dim = 0;
  std::int64_t qk_rope_head_dim = 0;
  std::int64_t v_head_dim = 0;
  bool mla_use_nope = false;
  bool mla_use_output_gate = false;
  double rope_theta = 10000;
  bool rope_interleaved = true;
  std::optional<RopeScalingConfig> rope_scaling;
  std::optional<IndexerConfig> indexer;  ///< empty = dense attention

  std::int64_t num_experts = 0;  ///< 0 = every layer has a dense MLP
  std::int64_t num_experts_per_token = 0;
  std::int64_t num_shared_experts = 0;
  std::int64_t moe_intermediate_size = 0;
  std::optional<std::int64_t> routed_expert_hidden_size;  ///< latent width; empty = plain form
  bool latent_moe_use_norm = true;
  bool moe_renormalize = true;
  RouterFunc moe_router_activation_func = RouterFunc::sigmoid;
  double routed_scaling_factor = 1.0;
  std::int64_t first_k_dense_replace = 0;
  std::int64_t moe_layer_freq = 1;
  std::int64_t num_expert_group = 1;
  std::int64_t topk_group = 1;
  std::optional<double> capacity_factor;  ///< empty = no token is dropped
  CapacityPolicy capacity_policy = CapacityPolicy::prob;

  BalanceConfig balance;
  ResidualConfig residual;
  MtpConfig mtp;
  static void describe(Fields<ModelConfig>& f);

  /// Whether the layer (from 0) is a KDA layer; all others are full (MLA, dense or sparse)
  /// attention.
  bool is_kda_layer(std::int64_t layer) const;
  /// Whether the layer (from 0) has experts; all others have a dense MLP of width
  /// intermediate_size.
  bool is_moe_layer(std::int64_t layer) const;
  /// Rotary channels of the indexer's queries and keys.
  std::int64_t index_rope_dim() const;
};

}  // namespace moesaic::config
