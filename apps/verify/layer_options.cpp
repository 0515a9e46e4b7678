#include "apps/verify/layer_options.h"

#include "core/base/error.h"

namespace moesaic::verify {
namespace {
std::int64_t int_or(const CaseRun& run, const std::string& path, std::int64_t fallback) {
  return run.cfg_has(path) ? run.cfg_int(path) : fallback;
}
}  // namespace

GluActivation glu_activation(const CaseRun& run, const std::string& at) {
  const std::string kind = run.cfg_text(at + "act");
  if (kind == "silu") return {GluKind::swiglu, 0, 0};
  if (kind != "situ") throw InputError("cfg '" + at + "act': '" + kind + "'; known are silu, situ");
  return {GluKind::situ, run.cfg_real(at + "situ_b1"), run.cfg_real(at + "situ_b2")};
}

KdaOptions kda_options(const CaseRun& run, const std::string& at, std::int64_t hidden, double eps) {
  KdaOptions o;
  o.hidden = hidden;
  o.heads = run.cfg_int(at + "kda_heads");
  o.head_dim = run.cfg_int(at + "kda_head_dim");
  o.conv_kernel = run.cfg_int(at + "conv");
  if (run.cfg_has(at + "g_min")) o.gate_lower_bound = run.cfg_real(at + "g_min");
  o.full_rank_gate = run.cfg_bool(at + "full_rank_gate");
  // The form with a full-rank gate stores a flat A_log.
  o.a_log_entries = o.full_rank_gate ? int_or(run, at + "A_log_stored", o.heads) : 0;
  o.eps = eps;
  return o;
}

MlaOptions mla_options(const CaseRun& run, const std::string& at, std::int64_t hidden) {
  MlaOptions o;
  o.hidden = hidden;
  o.heads = run.cfg_int(at + "heads");
  o.q_lora_rank = int_or(run, at + "q_lora", 0);
  o.kv_lora_rank = run.cfg_int(at + "kv_lora");
  o.qk_nope_dim = run.cfg_int(at + "qk_nope");
  o.qk_rope_dim = run.cfg_int(at + "qk_rope");
  o.v_dim = run.cfg_int(at + "v_dim");
  o.output_gate = run.cfg_bool(at + "gate");
  o.rope = run.cfg_has(at + "rope_theta");
  if (o.rope) o.rope_theta = run.cfg_real(at + "rope_theta");
  if (run.cfg_has(at + "rope_interleaved"))
    o.rope_interleaved = run.cfg_bool(at + "rope_interleaved");
  o.latent_eps = run.cfg_real(at + "latent_eps");
  return o;
}

IndexerOptions indexer_options(const CaseRun& run, const std::string& at) {
  IndexerOptions o;
  o.heads = run.cfg_int(at + "index_heads");
  o.head_dim = run.cfg_int(at + "index_dim");
  o.top_k = run.cfg_int(at + "index_topk");
  o.rope_dim = run.cfg_int(at + "index_rope");
  o.norm_eps = run.cfg_real(at + "index_eps");
  return o;
}

MoeOptions moe_options(const CaseRun& run, const std::string& at, std::int64_t hidden, double eps) {
  MoeOptions o;
  o.hidden = hidden;
  o.experts = run.cfg_int(at + "experts");
  o.top_k = run.cfg_int(at + "top_k");
  o.inner = run.cfg_int(at + "inter");
  o.latent = int_or(run, at + "latent", 0);
  o.shared_inner = o.inner * run.cfg_int(at + "shared");
  o.activation = glu_activation(run, at);
  o.num_groups = static_cast<int>(int_or(run, at + "n_group", 1));
  o.topk_groups = static_cast<int>(int_or(run, at + "topk_group", 1));
  o.renormalize = run.cfg_bool(at + "renorm");
  o.route_scale = run.cfg_real(at + "route_scale");
  o.capacity = int_or(run, at + "capacity", 0);
  if (o.capacity > 0)
    o.drop_policy =
        run.cfg_text(at + "drop_policy") == "position" ? DropPolicy::position : DropPolicy::prob;
  o.eps = eps;
  return o;
}

}  // namespace moesaic::verify
