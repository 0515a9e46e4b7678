#include "core/config/check.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/config/check_offload.h"
#include "core/config/check_pieces.h"

namespace moesaic::config {
namespace {

using Keys = std::vector<std::string>;

constexpr std::int64_t kMostToSearch = 1 << 20;  // for a number that would fit

class Checker {
 public:
  explicit Checker(const Config& config) : config_(config), model_(config.model) {}

  std::vector<Finding> run() {
    attention_layers();
    mla();
    indexer();
    dense_layers();
    experts();
    expert_groups();
    balance();
    residual();
    rope_scaling();
    data();
    batch();
    phases();
    optimizer();
    parallel();
    pipeline();
    dispatch();
    activations();
    add_offload_findings(config_, findings_);
    add_piece_findings(config_, findings_);
    return std::move(findings_);
  }

 private:
  void add(Keys keys, std::string message) {
    findings_.push_back({std::move(keys), std::move(message)});
  }

  /// `value` of `key` must be positive because of `reason`, which rests on `also`.
  void needs(const std::string& key, std::int64_t value, const std::string& reason, Keys also) {
    if (value > 0) return;
    also.insert(also.begin(), key);
    add(std::move(also),
        fmt::format("is required, because {}; allowed: an integer, at least 1", reason));
  }

  std::int64_t full_attention_layers() const {
    return model_.linear_attn_config
               ? static_cast<std::int64_t>(model_.linear_attn_config->full_attn_layers.size())
               : model_.num_hidden_layers;
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

  bool has_mtp() const { return model_.mtp.num_nextn_predict_layers > 0; }

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

  /// The divisors of n next to x: "4, 8".
  static std::string near_divisors(std::int64_t n, std::int64_t x) {
    std::int64_t below = std::min(x, n), above = x;
    while (n % below != 0)
      --below;
    while (above <= n && n % above != 0)
      ++above;
    return above <= n ? fmt::format("{}, {}", below, above) : fmt::format("{}", below);
  }

  /// ". Nearest valid ep: 2": for so many ranks of a stage.
  std::string nearest_ep(std::int64_t ranks) const {
    const std::int64_t etp = config_.parallel.etp, share = ranks / etp;
    if (ranks % etp != 0 || share > kMostToSearch || model_.num_experts < 1) return "";
    return fmt::format(". Nearest valid ep: {}",
                       near_divisors(std::gcd(share, model_.num_experts), config_.parallel.ep));
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

  void data() {
    if (config_.data.format == DataFormat::bytes_text && model_.vocab_size < 256) {
      add({"model.vocab_size", "data.format"},
          fmt::format(
              "found {}; data.format bytes_text has 256 different tokens; allowed: at least 256",
              model_.vocab_size));
    }
    if (config_.data.end_of_text && *config_.data.end_of_text >= model_.vocab_size) {
      add({"data.end_of_text", "model.vocab_size"},
          fmt::format("found {}; allowed: below model.vocab_size ({})",
                      *config_.data.end_of_text,
                      model_.vocab_size));
    }
    weights();
    if (uses_data_length() && config_.data.sequence_length > model_.max_position_embeddings) {
      add({"data.sequence_length", "model.max_position_embeddings"},
          fmt::format("found {}; allowed: at most model.max_position_embeddings ({})",
                      config_.data.sequence_length,
                      model_.max_position_embeddings));
    }
    if (config_.train.eval_every > 0 && config_.data.valid.empty()) {
      add({"train.eval_every", "data.valid"},
          "there is nothing to evaluate on; set data.valid, or eval_every: 0");
    }
  }

  /// A blend has a weight for every entry; held-out data has none.
  void weights() {
    const auto& train = config_.data.train;
    const auto has_weight = [](const DataFileConfig& file) { return file.weight.has_value(); };
    const bool blend = std::any_of(train.begin(), train.end(), has_weight);
    for (std::size_t i = 0; blend && i < train.size(); ++i) {
      if (!train[i].weight)
        add({fmt::format("data.train[{}]", i), "data.train"},
            fmt::format(
                "has no weight, but others have; give every entry one: {{path: {}, weight: 1}}",
                train[i].path));
    }
    for (std::size_t i = 0; i < config_.data.valid.size(); ++i) {
      if (config_.data.valid[i].weight)
        add({fmt::format("data.valid[{}].weight", i), "data.valid"},
            "held-out data is not drawn by weight; remove it");
    }
  }

  /// A number that derive_steps() could not find is 0 here, and has been complained about.
  void batch() {
    batch("train.", config_.train.global_batch_size, config_.train.micro_batch_size);
    for (std::size_t i = 0; i < config_.train.phases.size(); ++i) {
      const PhaseConfig& phase = config_.train.phases[i];
      if (!phase.global_batch_size && !phase.micro_batch_size &&
          !(phase.sequence_length && config_.train.global_batch_tokens))
        continue;
      const std::int64_t length = phase.sequence_length.value_or(config_.data.sequence_length);
      batch(fmt::format("train.phases[{}].", i),
            config_.train.global_batch_tokens
                ? *config_.train.global_batch_tokens / std::max<std::int64_t>(1, length)
                : phase.global_batch_size.value_or(config_.train.global_batch_size),
            phase.micro_batch_size.value_or(config_.train.micro_batch_size));
    }
  }

  /// "; or micro_batch_size 2, 4".
  std::string nearest_micro(std::int64_t batch, std::int64_t micro) const {
    const std::int64_t ranks = config_.parallel.dp.value_or(1), share = batch / ranks;
    if (batch % ranks != 0 || share < 1 || share > kMostToSearch) return "";
    return fmt::format("; or micro_batch_size {}", near_divisors(share, micro));
  }

  void batch(const std::string& section, std::int64_t batch, std::int64_t micro) {
    const std::int64_t unit = micro * config_.parallel.dp.value_or(1);
    if (unit < 1 || batch % unit == 0) return;
    const std::int64_t below = batch / unit * unit;
    const std::string near =
        below > 0 ? fmt::format("{}, {}", below, below + unit) : fmt::format("{}", below + unit);
    const std::string by =
        config_.parallel.dp ? "micro_batch_size * parallel.dp" : "micro_batch_size";
    add({section + "global_batch_size", section + "micro_batch_size", "parallel.dp"},
        fmt::format("{} is not divisible by {} ({}). Nearest valid: {}{}",
                    batch,
                    by,
                    unit,
                    near,
                    nearest_micro(batch, micro)));
  }

  void phases() {
    const std::vector<PhaseConfig>& phases = config_.train.phases;
    std::int64_t before = 0;
    for (std::size_t i = 0; i < phases.size(); ++i) {
      const std::string key = fmt::format("train.phases[{}]", i);
      const PhaseConfig& phase = phases[i];
      if (phase.until < 1) return;
      if (phase.until <= before)
        add({key + ".until", "train.phases"},
            fmt::format("found {}; phases end one after the other; allowed: more than {}",
                        phase.until,
                        before));
      before = phase.until;
      if (phase.sequence_length.value_or(1) > model_.max_position_embeddings) {
        add({key + ".sequence_length", "model.max_position_embeddings"},
            fmt::format("found {}; allowed: at most model.max_position_embeddings ({})",
                        *phase.sequence_length,
                        model_.max_position_embeddings));
      }
      if (phase.sparse_stage == SparseStage::warmup && !model_.indexer)
        add({key + ".sparse_stage", "model.indexer"},
            "there is no model.indexer to warm up; allowed: sparse");
      const std::int64_t length = phase.until - (i == 0 ? 0 : phases[i - 1].until);
      const OptimizerConfig& optimizer = config_.optimizer;
      if (phase.warmup_steps && !phase.lr_schedule)
        add({key + ".warmup_steps"},
            "belongs to a schedule of the phase's own; give lr_schedule in this phase too");
      if (phase.lr_schedule && length > 0) {
        const std::int64_t warmup = phase.warmup_steps.value_or(0);
        if (warmup > length)
          add({key + ".warmup_steps"},
              fmt::format("found {}; allowed: at most the phase's {} steps", warmup, length));
        else if (*phase.lr_schedule == LrSchedule::wsd && warmup + optimizer.decay_steps > length)
          add({key + ".lr_schedule", "optimizer.decay_steps"},
              fmt::format(
                  "warm-up ({}) and optimizer.decay_steps ({}) do not fit the phase's {} steps",
                  warmup,
                  optimizer.decay_steps,
                  length));
      }
      if (phase.lr_min.value_or(config_.optimizer.lr_min) > phase.lr.value_or(config_.optimizer.lr))
        add({key + (phase.lr_min ? ".lr_min" : ".lr"), "optimizer.lr", "optimizer.lr_min"},
            "lr_min is above lr in this phase");
    }
    if (!phases.empty() && config_.train.steps > 0 && before != config_.train.steps) {
      add({fmt::format("train.phases[{}].until", phases.size() - 1), "train.steps", "train.phases"},
          fmt::format("found {}; the last phase ends with the run; allowed: train.steps ({})",
                      before,
                      config_.train.steps));
    }
  }

  void optimizer() {
    const OptimizerConfig& optimizer = config_.optimizer;
    const std::int64_t steps = config_.train.steps > 0 ? config_.train.steps : INT64_MAX;
    if (optimizer.lr_min > optimizer.lr)
      add({"optimizer.lr_min", "optimizer.lr"},
          fmt::format("found {}; allowed: at most lr ({})", optimizer.lr_min, optimizer.lr));
    if (optimizer.warmup_steps > steps)
      add({"optimizer.warmup_steps", "train.steps"},
          fmt::format(
              "found {}; allowed: at most train.steps ({})", optimizer.warmup_steps, steps));
    const bool wsd = optimizer.lr_schedule == LrSchedule::wsd;
    if (wsd && optimizer.warmup_steps + optimizer.decay_steps > steps &&
        optimizer.warmup_steps <= steps) {
      add({"optimizer.decay_steps", "optimizer.warmup_steps", "train.steps"},
          fmt::format(
              "found {}; warm-up and decay do not fit into train.steps ({}); allowed: at most {}",
              optimizer.decay_steps,
              steps,
              steps - optimizer.warmup_steps));
    }
    const bool wide = config_.run.precision == PrecisionChoice::f32 ||
                      config_.run.precision == PrecisionChoice::f64;
    if (optimizer.master == MasterWeights::split && wide)
      add({"optimizer.master", "run.precision"},
          fmt::format("found split; weights of precision {} are their own masters; allowed: f32",
                      name_of(config_.run.precision)));
    if (optimizer.qk_clip_tau && full_attention_layers() == 0 && !has_mtp())
      add({"optimizer.qk_clip_tau", "model.linear_attn_config"},
          "there is no full-attention layer that it could act on; remove the key");
  }

  /// dp * cp * tp = edp * ep * etp over the same ranks, and each rank holds whole experts.
  void parallel() {
    const ParallelConfig& parallel = config_.parallel;
    if (model_.num_experts > 0 && model_.num_experts % parallel.ep != 0) {
      add({"parallel.ep", "model.num_experts"},
          fmt::format("{} does not divide model.num_experts ({}). Nearest valid: {}",
                      parallel.ep,
                      model_.num_experts,
                      near_divisors(model_.num_experts, parallel.ep)));
    }
    if (parallel.dp &&
        (*parallel.dp * parallel.cp * parallel.tp) % (parallel.ep * parallel.etp) != 0) {
      add({"parallel.ep", "parallel.dp", "parallel.cp", "parallel.tp", "parallel.etp"},
          fmt::format("ep * etp ({}) does not divide dp * cp * tp ({}){}",
                      parallel.ep * parallel.etp,
                      *parallel.dp * parallel.cp * parallel.tp,
                      nearest_ep(*parallel.dp * parallel.cp * parallel.tp)));
    }
    divides("etp", parallel.etp, "model.moe_intermediate_size", routed_inner());
    divides("tp", parallel.tp, "model.num_attention_heads", mla_heads());
    divides("tp",
            parallel.tp,
            "model.linear_attn_config.num_heads",
            model_.linear_attn_config ? model_.linear_attn_config->num_heads : 0);
    divides("tp", parallel.tp, "model.intermediate_size", dense_inner());
    divides("tp",
            parallel.tp,
            "model.moe_intermediate_size",
            model_.num_shared_experts > 0 ? routed_inner() : 0);
    divides("tp",
            parallel.tp,
            "model.vocab_size",
            model_.vocab_size,
            fmt::format("; or model.vocab_size: {} (it may be more than the tokenizer has)",
                        next_multiple(model_.vocab_size, parallel.tp)));
    if (uses_data_length())
      divides("tp", parallel.tp, "data.sequence_length", config_.data.sequence_length);
    for (std::size_t i = 0; i < config_.train.phases.size(); ++i)
      divides("tp",
              parallel.tp,
              fmt::format("train.phases[{}].sequence_length", i),
              config_.train.phases[i].sequence_length.value_or(0));
    if (uses_data_length())
      context("data.sequence_length",
              config_.data.sequence_length,
              "train.micro_batch_size",
              config_.train.micro_batch_size);
    for (std::size_t i = 0; i < config_.train.phases.size(); ++i) {
      const PhaseConfig& phase = config_.train.phases[i];
      if (!phase.sequence_length && !phase.micro_batch_size) continue;
      context(fmt::format("train.phases[{}].sequence_length", i),
              phase.sequence_length.value_or(config_.data.sequence_length),
              fmt::format("train.phases[{}].micro_batch_size", i),
              phase.micro_batch_size.value_or(config_.train.micro_batch_size));
    }
  }

  /// Not when every phase has a length of its own.
  bool uses_data_length() const {
    const auto& phases = config_.train.phases;
    return phases.empty() || std::any_of(phases.begin(), phases.end(), [](const PhaseConfig& p) {
             return !p.sequence_length;
           });
  }

  /// The tokens of a micro-batch are cut into cp equal contiguous pieces, and these among tp ranks; a short convolution
  /// reaches into the piece before, no further.
  void context(const std::string& length_key,
               std::int64_t length,
               const std::string& micro_key,
               std::int64_t micro) {
    const std::int64_t cp = config_.parallel.cp,
                       tp = std::max<std::int64_t>(1, config_.parallel.tp), tokens = length * micro;
    if (cp <= 1 || tokens <= 0 || tokens % tp != 0) return;
    const auto problem = [&](const std::string& message) {
      add({"parallel.cp", length_key, micro_key}, message);
    };
    if (tokens / tp % cp != 0) {
      return problem(fmt::format(
          "{} does not cut the {} tokens of a micro-batch ({} x {}){} into equal pieces. Nearest "
          "valid: {}",
          cp,
          tokens,
          length_key,
          micro_key,
          tp > 1 ? fmt::format(", {} for each of {} ranks along tp,", tokens / tp, tp) : "",
          near_divisors(tokens / tp, cp)));
    }
    const std::int64_t reach =
        model_.linear_attn_config ? model_.linear_attn_config->short_conv_kernel_size - 1 : 0;
    if (tokens / cp >= reach) return;
    std::int64_t most = std::max<std::int64_t>(1, tokens / reach);
    while (tokens / tp % most != 0)
      --most;
    problem(fmt::format(
        "pieces of {} tokens are shorter than the {} that "
        "model.linear_attn_config.short_conv_kernel_size reaches back. Nearest valid: {}",
        tokens / cp,
        reach,
        most));
  }

  // Sizes that are split; 0 when there is nothing of the kind.
  std::int64_t mla_heads() const {
    return full_attention_layers() > 0 || has_mtp() ? model_.num_attention_heads : 0;
  }
  std::int64_t routed_inner() const {
    return model_.num_experts > 0 ? model_.moe_intermediate_size : 0;
  }
  std::int64_t dense_inner() const {
    for (std::int64_t l = 0; l < model_.num_hidden_layers; ++l) {
      if (!model_.is_moe_layer(l)) return model_.intermediate_size;
    }
    return 0;
  }
  static std::int64_t next_multiple(std::int64_t size, std::int64_t of) {
    return of < 1 ? size : (size + of - 1) / of * of;
  }
  /// `or_else`: what else could be done.
  void divides(const char* axis,
               std::int64_t degree,
               const std::string& key,
               std::int64_t size,
               const std::string& or_else = "") {
    if (size <= 0 || degree < 1 || size % degree == 0) return;
    add({std::string("parallel.") + axis, key},
        fmt::format("{} does not divide {} ({}). Nearest valid: {}{}",
                    degree,
                    key,
                    size,
                    near_divisors(size, degree),
                    or_else));
  }

  /// What the pipeline's sizes allow beyond this needs the model: core/model/pipeline_plan.h.
  void pipeline() {
    const ParallelConfig& parallel = config_.parallel;
    if (parallel.pp > 1 && parallel.order == LayerOrder::vertical)
      add({"parallel.order", "parallel.pp"},
          fmt::format("vertical is an order for one pipeline stage, and parallel.pp is {}: the "
                      "stages' schedule has an order of its own; allowed: horizontal, or pp 1",
                      parallel.pp));
    if (parallel.pp > 1) return;
    const std::string reason = "is of use with parallel.pp above 1 only; remove it, or set pp";
    if (parallel.chunks.value_or(1) > 1) add({"parallel.chunks", "parallel.pp"}, reason);
    if (!parallel.layers.empty()) add({"parallel.layers", "parallel.pp"}, reason);
  }

  /// Further passes need counts on the host, and the memory of the pass before.
  void dispatch() {
    const DispatchConfig& dispatch = config_.dispatch;
    if (dispatch.chunks > 1 && !dispatch.overlap)
      add({"dispatch.chunks", "dispatch.overlap"},
          "chunks one after the other only take longer: they are of use beside the experts' work; "
          "allowed: 1, or overlap: true");
    if (config_.experts.replicas > 0 && config_.experts.place_every == 0)
      add({"experts.replicas", "experts.place_every"},
          "copies of busy experts are chosen by their average load when experts are dealt; "
          "allowed: 0, "
          "or a place_every above 0, as in 500");
    if (dispatch.buffer_factor == 0) return;
    if (dispatch.exchange == Exchange::dense || dispatch.exchange == Exchange::hdense)
      add({"dispatch.buffer_factor", "dispatch.exchange"},
          fmt::format(
              "{} exchanges do not count what comes and need room for all of it; allowed: 0, or "
              "exchange: auto, flat, hierarchical or pair",
              name_of(dispatch.exchange)));
    if (config_.parallel.pp > 1 && config_.parallel.schedule == PipelineSchedule::zero_bubble)
      add({"dispatch.buffer_factor", "parallel.schedule"},
          "zero_bubble keeps weight gradients for later, and further passes have no memory to keep "
          "theirs in; allowed: 0, or another schedule");
  }

  void activations() {
    const std::vector<std::string>& patterns = config_.activations.recompute;
    const auto is_exception = [](const std::string& word) { return word.starts_with('!'); };
    const auto exceptions = std::count_if(patterns.begin(), patterns.end(), is_exception);
    const auto others = static_cast<std::ptrdiff_t>(patterns.size()) - exceptions;
    const auto has = [&](const char* word) {
      return std::find(patterns.begin(), patterns.end(), word) != patterns.end();
    };
    if (patterns.size() > 1 && has("none"))
      add({"activations.recompute"}, "'none' stands alone; remove it or the patterns");
    if (others > 1 && has("full"))
      add({"activations.recompute"},
          "'full' stands alone, or before names with ! that are kept; remove it or the patterns");
    if (exceptions > 0 && others == 0)
      add({"activations.recompute"},
          "names with ! are kept of what else is named here; write them behind full, selective or "
          "patterns, as in [full, \"!cur.mid\"]");
    const bool leaves =
        config_.activations.residual_offload || !config_.activations.offload.empty();
    if (leaves && config_.parallel.pp > 1 &&
        config_.parallel.schedule == PipelineSchedule::zero_bubble)
      add({config_.activations.residual_offload ? "activations.residual_offload"
                                                : "activations.offload",
           "parallel.schedule"},
          "zero_bubble keeps weight gradients for later, and activations that have left are not "
          "there for them; allowed: no offload, or another schedule");
  }

  const Config& config_;
  const ModelConfig& model_;
  std::vector<Finding> findings_;
};

Problem without_position(const Finding& finding) {
  return {"", 0, 0, finding.keys.front(), finding.message};
}

}  // namespace

std::vector<Finding> findings(const Config& config) {
  return Checker(config).run();
}

std::vector<Problem> check(const Config& config) {
  std::vector<Problem> problems;
  for (const Finding& finding : findings(config))
    problems.push_back(without_position(finding));
  return problems;
}

std::vector<Problem> untrainable(const Config& config) {
  std::vector<Problem> problems;
  if (config.model.rope_scaling) {
    problems.push_back({"",
                        0,
                        0,
                        "model.rope_scaling",
                        "context extension by YaRN can be planned but not trained; remove the "
                        "group to train with plain rotation"});
  }
  return problems;
}

}  // namespace moesaic::config
