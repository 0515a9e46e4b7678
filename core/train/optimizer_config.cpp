#include "core/train/optimizer_config.h"

namespace moesaic {

OptimizerOptions optimizer_options(const config::OptimizerConfig& c) {
  OptimizerOptions o;
  o.muon = c.name == config::OptimizerName::muon;
  o.beta1 = c.beta1;
  o.beta2 = c.beta2;
  o.eps = c.eps;
  o.weight_decay = c.weight_decay;
  o.clip_grad_norm = c.clip_grad_norm;
  o.muon_momentum = c.muon_momentum;
  o.muon_nesterov = c.muon_nesterov;
  o.muon_per_head = c.muon_per_head;
  o.ns_steps = static_cast<int>(c.ns_steps);
  o.bf16_products.reset();
  if (c.ns_products != config::MuonProducts::automatic)
    o.bf16_products = c.ns_products == config::MuonProducts::bf16;
  o.qk_clip_tau = c.qk_clip_tau;
  o.ema_decay = c.ema_decay;
  o.skip_untouched = c.untouched == config::Untouched::skip;
  o.lazy_untouched = c.untouched == config::Untouched::lazy;
  return o;
}

std::optional<StateSharding> state_sharding(const config::Config& config, Model& model) {
  if (config.parallel.zero == 0) return std::nullopt;
  StateSharding sharding;
  sharding.whole_matrices = config.optimizer.name == config::OptimizerName::muon;
  if (config.optimizer.qk_clip_tau) {
    for (const MlaAttention* layer : model.mla_layers())
      sharding.together.emplace_back(layer->query_matrix(), layer->key_value_matrix());
  }
  return sharding;
}

}  // namespace moesaic
