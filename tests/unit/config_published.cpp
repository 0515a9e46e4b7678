#include "tests/support/catch.h"
#include "tests/unit/config_support.h"

using namespace config_tests;
namespace config = moesaic::config;

namespace {

config::Config shipped(const std::string& name) {
  return config::load_config(std::string(MOESAIC_SOURCE_DIR) + "/configs/" + name + ".yaml").config;
}

std::int64_t kda_parameters(const config::ModelConfig& m) {
  const auto& l = *m.linear_attn_config;
  const std::int64_t d = m.hidden_size, K = l.head_dim, H = l.num_heads, P = H * K;
  const std::int64_t gate = l.use_full_rank_gate ? P * d : K * d + P * K;
  return 4 * P * d + 3 * P * l.short_conv_kernel_size + K * d + P * K + H * d + l.stored_a_log() +
         P + K + gate;
}

std::int64_t mla_parameters(const config::ModelConfig& m) {
  const std::int64_t d = m.hidden_size, H = m.num_attention_heads, c = m.kv_lora_rank;
  const std::int64_t qk = m.qk_nope_head_dim + m.qk_rope_head_dim, q = m.q_lora_rank.value_or(0);
  std::int64_t n = d * (c + m.qk_rope_head_dim) + c + H * (m.qk_nope_head_dim + m.v_head_dim) * c +
                   d * H * m.v_head_dim;
  n += q > 0 ? d * q + q + q * H * qk : d * H * qk;
  if (m.mla_use_output_gate) n += d * H * m.v_head_dim;
  if (m.indexer) {
    const std::int64_t heads = m.indexer->index_n_heads, width = m.indexer->index_head_dim;
    n += (q > 0 ? q : d) * heads * width + d * width + 2 * width + d * heads;
  }
  return n;
}

std::int64_t mlp_parameters(const config::ModelConfig& m, std::int64_t layer, bool active) {
  const std::int64_t d = m.hidden_size, f = m.moe_intermediate_size,
                     latent = m.routed_expert_hidden_size.value_or(0);
  if (!m.is_moe_layer(layer)) return 3 * d * m.intermediate_size;
  const std::int64_t experts = active ? m.num_experts_per_token : m.num_experts;
  return m.num_experts * (d + 1) + 3 * d * f * m.num_shared_experts +
         (latent > 0 ? 2 * d * latent + latent : 0) + experts * 3 * (latent > 0 ? latent : d) * f;
}

/// The formula of the specification's parameter table; active: without the experts that a token
/// does not pass and without the input embedding.
std::int64_t parameters(const config::ModelConfig& m, bool active) {
  const std::int64_t d = m.hidden_size;
  std::int64_t n = (active ? 1 : 2) * m.vocab_size * d + d;
  for (std::int64_t layer = 0; layer < m.num_hidden_layers; ++layer) {
    n += 2 * d + (m.is_kda_layer(layer) ? kda_parameters(m) : mla_parameters(m)) +
         mlp_parameters(m, layer, active);
  }
  if (m.residual.type == config::ResidualType::attention) n += 4 * d * m.num_hidden_layers + 2 * d;
  return n;
}

}  // namespace

TEST_CASE("config: the shipped configurations have the published parameter counts") {
  CHECK(parameters(shipped("kimi_linear_48b").model, false) == 49'122'681'728);
  CHECK(parameters(shipped("kimi_k3").model, false) == 2'779'484'478'208);
  CHECK(parameters(shipped("kimi_k3").model, true) == 104'189'614'848);
  CHECK(parameters(shipped("deepseek_v32").model, false) == 671'877'944'064);
  CHECK(parameters(shipped("hybrid_sparse_2p8t").model, false) == 2'779'819'504'384);
}

TEST_CASE("config: the shipped configurations say what they are for") {
  const config::Config k3 = shipped("kimi_k3");
  CHECK(k3.model.linear_attn_config->kda_layers.size() == 69);
  CHECK(k3.model.linear_attn_config->full_attn_layers.size() == 24);
  CHECK(k3.model.hidden_act == config::HiddenAct::situ);
  const config::Config hybrid = shipped("hybrid_sparse_2p8t");
  CHECK(hybrid.model.indexer->index_topk == 2048);
  CHECK(hybrid.model.max_position_embeddings == 1'048'576);
  CHECK(hybrid.model.index_rope_dim() == 0);
  CHECK(shipped("deepseek_v32").model.index_rope_dim() == 64);
  const config::Config quick = shipped("quickstart");
  CHECK(quick.model.is_kda_layer(2));
  CHECK_FALSE(quick.model.is_kda_layer(3));
  CHECK(quick.model.indexer->index_topk == 64);
  CHECK(parameters(quick.model, true) > 1'000'000);
  CHECK(parameters(quick.model, true) < 2'000'000);
}

TEST_CASE("config: the shipped configurations survive their effective form") {
  for (const char* name :
       {"kimi_linear_48b", "kimi_k3", "deepseek_v32", "hybrid_sparse_2p8t", "quickstart"}) {
    const config::LoadedConfig first =
        config::load_config(std::string(MOESAIC_SOURCE_DIR) + "/configs/" + name + ".yaml");
    const config::LoadedConfig second =
        config::load_config_text(config::effective_yaml(first), "e.yaml");
    CHECK(parameters(first.config.model, true) == parameters(second.config.model, true));
  }
}
