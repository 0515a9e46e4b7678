#include "core/model/from_config.h"

#include <algorithm>
#include <map>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/config/nearest.h"
#include "core/model/model.h"

namespace moesaic {
namespace {

GluActivation activation(const config::ModelConfig& model) {
  GluActivation a;
  a.kind = model.hidden_act == config::HiddenAct::situ ? GluKind::situ : GluKind::swiglu;
  a.beta1 = model.activation_situ_beta;
  a.beta2 = model.activation_situ_linear_beta;
  return a;
}

KdaOptions kda_options(const config::ModelConfig& model) {
  KdaOptions o;
  if (!model.linear_attn_config) return o;
  const config::LinearAttnConfig& linear = *model.linear_attn_config;
  o.hidden = model.hidden_size;
  o.heads = linear.num_heads;
  o.head_dim = linear.head_dim;
  o.conv_kernel = linear.short_conv_kernel_size;
  o.gate_lower_bound = linear.gate_lower_bound;
  o.full_rank_gate = linear.use_full_rank_gate;
  // Kimi-K3 stores a vector, padded or not; Kimi-Linear [1, 1, heads, 1].
  const bool is_vector =
      linear.a_log_entries || linear.use_full_rank_gate || linear.gate_lower_bound;
  o.a_log_entries = is_vector ? linear.stored_a_log() : 0;
  o.eps = model.rms_norm_eps;
  o.init_std = model.initializer_range;
  return o;
}

SparseForm sparse_form(config::AttentionForm form) {
  switch (form) {
    case config::AttentionForm::masked:
      return SparseForm::masked;
    case config::AttentionForm::gather:
      return SparseForm::gather;
    case config::AttentionForm::automatic:
      break;
  }
  return SparseForm::automatic;
}

MlaOptions mla_options(const config::ModelConfig& model) {
  MlaOptions o;
  o.hidden = model.hidden_size;
  o.heads = model.num_attention_heads;
  o.q_lora_rank = model.q_lora_rank.value_or(0);
  o.kv_lora_rank = model.kv_lora_rank;
  o.qk_nope_dim = model.qk_nope_head_dim;
  o.qk_rope_dim = model.qk_rope_head_dim;
  o.v_dim = model.v_head_dim;
  o.output_gate = model.mla_use_output_gate;
  o.rope = !model.mla_use_nope;
  o.rope_theta = model.rope_theta;
  o.rope_interleaved = model.rope_interleaved;
  o.latent_eps = model.latent_norm_eps;
  o.init_std = model.initializer_range;
  if (model.indexer) {
    o.indexer = IndexerOptions{.heads = model.indexer->index_n_heads,
                               .head_dim = model.indexer->index_head_dim,
                               .top_k = model.indexer->index_topk,
                               .rope_dim = model.index_rope_dim(),
                               .norm_eps = model.indexer->index_norm_eps,
                               .kl_weight = model.indexer->kl_weight,
                               .form = sparse_form(model.indexer->attention_form),
                               .gather_beyond = model.indexer->gather_beyond,
                               .key_sums = model.indexer->key_sums == config::KeySumsChoice::integer
                                               ? KeySums::integer
                                               : KeySums::float_atomics};
  }
  return o;
}

BiasRule bias_rule(config::BiasRule rule) {
  switch (rule) {
    case config::BiasRule::none:
      return BiasRule::none;
    case config::BiasRule::sign:
      return BiasRule::sign;
    case config::BiasRule::quantile:
      return BiasRule::quantile;
    case config::BiasRule::quantile_exact:
      return BiasRule::quantile_exact;
  }
  return BiasRule::none;
}

AuxLoss aux_loss(config::AuxLoss loss) {
  switch (loss) {
    case config::AuxLoss::none:
      return AuxLoss::none;
    case config::AuxLoss::switch_loss:
      return AuxLoss::switch_;
    case config::AuxLoss::sequence:
      return AuxLoss::sequence;
    case config::AuxLoss::global:
      return AuxLoss::global;
  }
  return AuxLoss::none;
}

RowFormat row_format(config::DispatchDtype dtype) {
  return dtype == config::DispatchDtype::fp8 ? RowFormat::fp8 : RowFormat::plain;
}

MoeOptions moe_options(const config::ModelConfig& model, const config::DispatchConfig& dispatch) {
  MoeOptions o;
  if (model.num_experts == 0) return o;
  o.hidden = model.hidden_size;
  o.experts = model.num_experts;
  o.top_k = model.num_experts_per_token;
  o.inner = model.moe_intermediate_size;
  o.latent = model.routed_expert_hidden_size.value_or(0);
  o.latent_norm = model.latent_moe_use_norm;
  o.shared_inner = model.num_shared_experts * model.moe_intermediate_size;
  o.activation = activation(model);
  o.score = model.moe_router_activation_func == config::RouterFunc::softmax ? RouterScore::softmax
                                                                            : RouterScore::sigmoid;
  o.num_groups = static_cast<int>(model.num_expert_group);
  o.topk_groups = static_cast<int>(model.topk_group);
  o.renormalize = model.moe_renormalize;
  o.route_scale = model.routed_scaling_factor;
  o.capacity_factor = model.capacity_factor.value_or(0);
  o.drop_policy = model.capacity_policy == config::CapacityPolicy::position ? DropPolicy::position
                                                                            : DropPolicy::prob;
  o.bias_rule = bias_rule(model.balance.bias_rule);
  o.sign_gamma = model.balance.sign_gamma;
  o.histogram_bins = model.balance.histogram_bins;
  o.aux_loss = aux_loss(model.balance.aux_loss);
  o.aux_weight = model.balance.aux_loss_weight;
  o.z_weight = model.balance.z_loss_weight;
  o.rows = row_format(dispatch.dtype);
  o.gradient_rows = row_format(dispatch.backward_dtype);
  o.eps = model.rms_norm_eps;
  o.init_std = model.initializer_range;
  return o;
}

}  // namespace

ModelOptions model_options(const config::Config& config) {
  const config::ModelConfig& model = config.model;
  const config::TrainConfig& train = config.train;
  ModelOptions o;
  o.hidden = model.hidden_size;
  o.vocabulary = model.vocab_size;
  for (std::int64_t l = 0; l < model.num_hidden_layers; ++l)
    o.layers.push_back({model.is_kda_layer(l), model.is_moe_layer(l)});
  o.kda = kda_options(model);
  o.mla = mla_options(model);
  o.dense = {
      model.hidden_size, model.intermediate_size, activation(model), model.initializer_range};
  o.moe = moe_options(model, config.dispatch);
  o.moe.place = config.experts.place_every > 0;
  o.moe.replicas = config.experts.replicas;
  o.residual = model.residual.type == config::ResidualType::attention ? ResidualKind::attention
                                                                      : ResidualKind::plain;
  o.attn_res_block = model.residual.attn_res_block_size.value_or(0);
  o.attn_res_full = model.residual.full;
  o.eps = model.rms_norm_eps;
  o.init_std = model.initializer_range;
  o.tie_embeddings = model.tie_word_embeddings;
  o.mtp = model.mtp.num_nextn_predict_layers > 0;
  o.mtp_post_norm = model.mtp.mtp_hidden == config::MtpHidden::post_norm;
  o.mtp_weight = model.mtp.loss_weight;
  // Kimi-K3's checkpoint holds a vision tower beside the language model.
  o.name_prefix = model.model_type == "kimi_k3" ? "language_model." : "";
  o.head_chunk_rows = train.head_chunk_rows;
  return o;
}

MeshConfig mesh_config(const config::ParallelConfig& parallel) {
  const auto degree = [](std::int64_t n) { return static_cast<int>(n); };
  return {.pp = degree(parallel.pp),
          .dp = degree(parallel.dp.value_or(0)),
          .cp = degree(parallel.cp),
          .tp = degree(parallel.tp),
          .ep = degree(parallel.ep),
          .etp = degree(parallel.etp)};
}

RecomputePolicy recompute_policy(const config::ActivationsConfig& activations) {
  const auto& words = activations.recompute;
  const RecomputePolicy::Offload offload{.residuals = activations.residual_offload,
                                         .patterns = activations.offload};
  if (words.size() == 1 && words.front() == "none") return {.offload = offload};
  RecomputePolicy policy{.offload = offload};
  for (const std::string& word : words) {
    if (word == "full") {
      policy.all = true;
    } else if (word == "selective") {
      policy.cheap = true;
    } else if (word.starts_with('!')) {
      policy.kept.push_back(word.substr(1));
    } else {
      policy.patterns.push_back(word);
    }
  }
  return policy;
}

std::vector<config::Finding> recompute_findings(Model& model,
                                                const config::ActivationsConfig& activations,
                                                const Bounds& bounds) {
  const RecomputePolicy policy = recompute_policy(activations);
  if (policy.patterns.empty() && policy.kept.empty() && policy.offload.patterns.empty()) return {};
  model.plan(bounds, RecomputePolicy());
  const std::vector<std::string> names = model.activation_names(), chosen = model.chosen_names();
  std::vector<config::Finding> all;
  // What cannot be, then what is not there.
  const auto choice_of = [&](const std::string& pattern) {
    return std::find_if(
        chosen.begin(), chosen.end(), [&](const auto& name) { return glob_match(pattern, name); });
  };
  for (const std::string& pattern : policy.patterns) {
    const auto choice = choice_of(pattern);
    if (choice == chosen.end()) continue;
    all.push_back(
        {{"activations.recompute"},
         fmt::format("'{}' names '{}', which a step chooses: it must be saved, or backward could "
                     "choose otherwise than forward. Remove it, or write a pattern without it",
                     pattern,
                     *choice)});
  }
  const auto check = [&](const char* key, const std::string& pattern) {
    if (choice_of(pattern) != chosen.end()) return;
    if (std::any_of(names.begin(), names.end(), [&](const auto& name) {
          return glob_match(pattern, name);
        }))
      return;
    const std::string near = config::nearest(pattern, names);
    all.push_back({{key},
                   fmt::format("no activation of this model matches '{}'; {}",
                               pattern,
                               near.empty() ? fmt::format("there are {}", fmt::join(names, ", "))
                                            : fmt::format("did you mean {}?", near))});
  };
  for (const auto* patterns : {&policy.patterns, &policy.kept})
    for (const std::string& pattern : *patterns)
      check("activations.recompute", pattern);
  for (const std::string& pattern : policy.offload.patterns)
    check("activations.offload", pattern);
  return all;
}

namespace {

Precision types_of(config::PrecisionChoice choice, bool on_gpu) {
  switch (choice) {
    case config::PrecisionChoice::automatic:
      return on_gpu ? kBf16 : kF32;
    case config::PrecisionChoice::f64:
      return kF64;
    case config::PrecisionChoice::f32:
      return kF32;
    case config::PrecisionChoice::bf16:
      return kBf16;
  }
  return kF32;
}

}  // namespace

Precision precision_of(const config::Config& config, bool on_gpu) {
  Precision precision = types_of(config.run.precision, on_gpu);
  precision.split_masters = config.optimizer.master == config::MasterWeights::split;
  if (precision.split_masters && precision.compute != DType::bf16) {
    throw UsageError(
        fmt::format("optimizer.master: split needs weights in bf16, and this run computes in {}{}; "
                    "set run.precision: bf16, or "
                    "optimizer.master: f32",
                    name(precision.compute),
                    config.run.precision == config::PrecisionChoice::automatic
                        ? " (run.precision: auto without a GPU)"
                        : ""));
  }
  return precision;
}

namespace {

bool matches_any_parameter(const ParameterStore& params, const std::string& pattern) {
  const auto specs = params.params();
  return std::any_of(specs.begin(), specs.end(), [&](const ParameterSpec& s) {
    return glob_match(pattern, s.name);
  });
}

config::Finding unmatched(const std::string& key, const std::string& pattern) {
  return {
      {key},
      fmt::format("the pattern '{}' matches no parameter; names look like "
                  "model.layers.0.self_attn.o_proj.weight or "
                  "model.layers.1.block_sparse_moe.experts.{{}}.w1.weight, * stands for any text",
                  pattern)};
}

// The first storage that holds both frozen and trained parameters, as a pair of names; empty names
// = none.
std::pair<std::string, std::string> mixed_storage(const ParameterStore& params,
                                                  const std::vector<bool>& frozen) {
  std::map<std::int32_t, std::size_t> first_of_storage;
  for (std::size_t i = 0; i < frozen.size(); ++i) {
    const auto [it, is_new] =
        first_of_storage.try_emplace(params.storage_of({static_cast<std::int32_t>(i)}).index, i);
    if (is_new || frozen[it->second] == frozen[i]) continue;
    const std::size_t held = frozen[i] ? i : it->second, moving = frozen[i] ? it->second : i;
    return {params.params()[held].name, params.params()[moving].name};
  }
  return {};
}

}  // namespace

bool is_frozen(const ParameterSpec& spec, std::span<const std::string> freeze, bool dense_warmup) {
  if (dense_warmup && spec.part != Part::indexer) return true;
  return std::any_of(freeze.begin(), freeze.end(), [&](const auto& pattern) {
    return glob_match(pattern, spec.name);
  });
}

std::vector<bool> frozen_parameters(const ParameterStore& params,
                                    const config::PhaseConfig& phase) {
  const bool warmup = phase.sparse_stage == config::SparseStage::warmup;
  std::vector<bool> frozen;
  for (const ParameterSpec& spec : params.params())
    frozen.push_back(is_frozen(spec, phase.freeze, warmup));
  return frozen;
}

std::vector<config::Finding> phase_findings(const ParameterStore& params,
                                            const config::TrainConfig& train) {
  std::vector<config::Finding> all;
  for (std::size_t i = 0; i < train.phases.size(); ++i) {
    const config::PhaseConfig& phase = train.phases[i];
    const std::string key = fmt::format("train.phases[{}]", i);
    for (const auto& pattern : phase.freeze) {
      if (!matches_any_parameter(params, pattern))
        all.push_back(unmatched(key + ".freeze", pattern));
    }
    for (std::size_t j = 0; j < phase.lr_scale.size(); ++j) {
      const std::string& pattern = phase.lr_scale[j].pattern;
      if (!matches_any_parameter(params, pattern))
        all.push_back(unmatched(fmt::format("{}.lr_scale[{}].pattern", key, j), pattern));
    }
    const std::vector<bool> frozen = frozen_parameters(params, phase);
    if (std::find(frozen.begin(), frozen.end(), false) == frozen.end()) {
      all.push_back(
          {{key + ".freeze", key}, "nothing is left to train in this phase; remove a pattern"});
    }
    if (const auto [held, moving] = mixed_storage(params, frozen); !held.empty()) {
      all.push_back(
          {{key + ".freeze"},
           fmt::format(
               "'{}' is frozen and '{}' is not, but they lie in one matrix; freeze both or neither",
               held,
               moving)});
    }
  }
  return all;
}

}  // namespace moesaic
