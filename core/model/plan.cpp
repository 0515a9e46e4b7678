#include "core/model/plan.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <tuple>

#include <fmt/format.h>

#include "core/config/phase_extent.h"
#include "core/model/from_config.h"
#include "core/model/model.h"

namespace moesaic {
namespace {

[[noreturn]] void too_large() {
  throw UsageError(
      "the model's counts do not fit 64 bits; check hidden_size, the number of layers and the "
      "numbers of heads and experts");
}
std::int64_t add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) too_large();
  return sum;
}
std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) too_large();
  return product;
}
template <class... Rest>
std::int64_t times(std::int64_t a, std::int64_t b, Rest... rest) {
  return times(times(a, b), rest...);
}
void operator+=(ParameterCount& sum, const ParameterCount& x) {
  sum.all = add(sum.all, x.all);
  sum.active = add(sum.active, x.active);
}
std::int64_t size(DType dtype) {
  return static_cast<std::int64_t>(byte_size(dtype));
}

// --- parameters, from the declarations alone
class Counter {
 public:
  Counter(const ModelOptions& options, ModelPlan& plan)
      : options_(options), plan_(plan), prefix_(options.name_prefix + "model.") {
    for (const LayerOptions& layer : options.layers) {
      plan.layers.push_back({layer.is_kda          ? "KDA"
                             : options.mla.indexer ? "sparse MLA"
                                                   : "MLA",
                             layer.is_moe ? "MoE" : "dense MLP",
                             {}});
    }
  }
  void count(const ParameterSpec& spec) {
    ParameterCount n{spec.count(), spec.count()};
    if (spec.members > 0) n.active = spec.shape.numel() * spec.active_members;
    // A tied embedding is the head too, so a token meets all of it.
    if (spec.part == Part::embedding && !options_.tie_embeddings) n.active = 0;
    count(spec.name, spec.part, n);
  }
  void count(const BufferSpec& spec) {
    if (spec.is_parameter_in_checkpoint)
      count(spec.name, spec.part, {spec.shape.numel(), spec.shape.numel()});
  }
  void finish() {
    for (const auto& [part, n] : parts_)
      plan_.parts.push_back({part, n});
  }

 private:
  void count(const std::string& name, Part part, const ParameterCount& n) {
    if (name.starts_with(prefix_ + "mtp.")) {
      plan_.mtp += n;
      return;
    }
    plan_.model += n;
    parts_[part] += n;
    const std::string layers = prefix_ + "layers.";
    if (!name.starts_with(layers)) return;
    std::size_t layer = plan_.layers.size();
    std::from_chars(name.data() + layers.size(), name.data() + name.size(), layer);
    MOESAIC_CHECK(layer < plan_.layers.size(), "'" + name + "' belongs to no layer");
    plan_.layers[layer].parameters += n;
  }

  const ModelOptions& options_;
  ModelPlan& plan_;
  std::string prefix_;
  std::map<Part, ParameterCount> parts_;
};

// --- operations
std::int64_t layers_of(const ModelOptions& o, bool kda) {
  return std::count_if(
      o.layers.begin(), o.layers.end(), [&](const LayerOptions& l) { return l.is_kda == kda; });
}

FlopsPlan kda_core(const ModelOptions& o) {
  const std::int64_t n = layers_of(o, true), h = o.kda.heads, k = o.kda.head_dim,
                     c = o.kda.chunk_size;
  const std::int64_t per_head = add(times(c, add(times(2, k), times(3, k))), times(6, k, k));
  return {
      "KDA core",
      fmt::format(
          "{} layers x {} heads x (2CK + C(K+V) + CV + 6KV), chunk C = {}, K = V = {}", n, h, c, k),
      times(n, h, per_head)};
}

// Dense causal attention over the average context T/2.
FlopsPlan dense_core(const MlaOptions& mla, std::int64_t layers, std::int64_t tokens) {
  const std::int64_t width = mla.qk_nope_dim + mla.qk_rope_dim + mla.v_dim;
  return {"attention core, dense",
          fmt::format(
              "{} layers x {} heads x 2(dn+dr+dv) x T/2, dn+dr+dv = {}", layers, mla.heads, width),
          times(layers, mla.heads, times(width, tokens))};
}

// 2 x min(T/2, k) = min(T, 2k), which is an integer for odd T as well.
FlopsPlan sparse_core(const MlaOptions& mla, std::int64_t layers, std::int64_t tokens) {
  const std::int64_t width = 2 * mla.kv_lora_rank + mla.qk_rope_dim,
                     keys = std::min(tokens, 2 * mla.indexer->top_k);
  return {"attention core, sparse",
          fmt::format("{} layers x {} heads x 2(2ckv+dr) x min(T/2, {}), keys and values as "
                      "latents, 2ckv+dr = {}",
                      layers,
                      mla.heads,
                      mla.indexer->top_k,
                      width),
          times(layers, mla.heads, times(width, keys))};
}

FlopsPlan index_scores(const IndexerOptions& index, std::int64_t layers, std::int64_t tokens) {
  return {"indexer scores",
          fmt::format(
              "{} layers x {} heads x (2dI+2) x T/2, dI = {}", layers, index.heads, index.head_dim),
          times(layers, index.heads, times(index.head_dim + 1, tokens))};
}

// What attention does beside products with parameters.
std::vector<FlopsPlan> cores_of(const ModelOptions& o, std::int64_t tokens, bool dense_warmup) {
  std::vector<FlopsPlan> all;
  if (layers_of(o, true) > 0) all.push_back(kda_core(o));
  const std::int64_t full = layers_of(o, false);
  if (full == 0) return all;
  if (o.mla.indexer) all.push_back(index_scores(*o.mla.indexer, full, tokens));
  all.push_back(o.mla.indexer && !dense_warmup ? sparse_core(o.mla, full, tokens)
                                               : dense_core(o.mla, full, tokens));
  return all;
}

std::vector<FlopsPlan> flops_of(const ModelPlan& plan,
                                const ModelOptions& o,
                                std::int64_t tokens,
                                bool dense_warmup) {
  std::vector<FlopsPlan> all;
  for (const PartPlan& part : plan.parts) {
    if (part.parameters.active == 0) continue;
    all.push_back({name(part.part), "2 x active parameters", times(2, part.parameters.active)});
  }
  for (FlopsPlan& core : cores_of(o, tokens, dense_warmup))
    all.push_back(std::move(core));
  return all;
}

std::int64_t sum(const std::vector<FlopsPlan>& parts) {
  std::int64_t total = 0;
  for (const FlopsPlan& part : parts)
    total = add(total, part.flops);
  return total;
}

FlopsPlan mtp_flops(const ModelPlan& plan, const ModelOptions& o, std::int64_t tokens) {
  const std::int64_t head = times(o.vocabulary, o.hidden);
  return {"MTP",
          "2 x (its active parameters + the shared head) + one dense attention core",
          add(times(2, add(plan.mtp.active, head)), dense_core(o.mla, 1, tokens).flops)};
}

// --- bytes
class Bytes {
 public:
  Bytes(const config::OptimizerConfig& optimizer, const ParameterStore& params)
      : optimizer_(optimizer), params_(params) {}

  ByteClass of(const ParameterSpec& spec, bool is_trained) const {
    const Precision& p = params_.precision();
    const bool muon = optimizer_.name == config::OptimizerName::muon && spec.matrix;
    ByteClass c;
    c.optimizer = !is_trained ? "frozen" : muon ? "Muon" : "AdamW";
    c.stored_as = spec.stored_as == StoredAs::compute ? p.compute : p.stats;
    c.weight = size(c.stored_as);
    c.master = c.stored_as == p.master ? 0 : p.split_masters ? size(DType::u16) : size(p.master);
    if (!is_trained) return c;
    c.gradient = size(p.grad);
    c.state = (muon ? 1 : 2) * size(p.master);  // momentum, or two moments
    c.average = optimizer_.ema_decay ? size(p.master) : 0;
    return c;
  }

  void fill(ModelPlan& plan, const std::vector<bool>& ever_trained) const {
    std::map<std::tuple<std::string, DType>, ByteClass> classes;
    for (std::size_t i = 0; i < ever_trained.size(); ++i) {
      const ParameterSpec& spec = params_.params()[i];
      const ByteClass c = of(spec, ever_trained[i]);
      ByteClass& known = classes.try_emplace({c.optimizer, c.stored_as}, c).first->second;
      known.parameters = add(known.parameters, spec.count());
    }
    BytesPlan& b = plan.bytes;
    for (const auto& [key, c] : classes) {
      plan.byte_classes.push_back(c);
      b.weights = add(b.weights, times(c.parameters, c.weight));
      b.masters = add(b.masters, times(c.parameters, c.master));
      b.gradients = add(b.gradients, times(c.parameters, c.gradient));
      b.optimizer = add(b.optimizer, times(c.parameters, c.state));
      b.average = add(b.average, times(c.parameters, c.average));
    }
    for (const BufferSpec& buffer : params_.buffers())
      b.buffers = add(b.buffers, times(buffer.shape.numel(), size(buffer.dtype)));
    for (const std::int64_t x :
         {b.weights, b.masters, b.gradients, b.optimizer, b.average, b.buffers})
      b.total = add(b.total, x);
  }

 private:
  const config::OptimizerConfig& optimizer_;
  const ParameterStore& params_;
};

// --- activations
// Whether every activation of a micro-batch surely has fewer than 2^53 elements, so that nothing in
// Model::plan() can overflow.
bool fits(const ModelOptions& o, std::int64_t tokens) {
  const auto f = [](std::int64_t x) { return static_cast<double>(x); };
  double width = std::max(f(2 * o.hidden), f(2 * o.dense.inner));
  width = std::max(
      width, f(o.kda.heads) * f(o.kda.head_dim) * f(std::max(o.kda.head_dim, o.kda.chunk_size)));
  width = std::max(width, f(o.mla.heads) * f(o.mla.qk_nope_dim + o.mla.qk_rope_dim + o.mla.v_dim));
  width = std::max(
      width, f(o.moe.top_k) * std::max({f(2 * o.moe.inner), f(o.moe.latent), f(o.moe.hidden)}));
  width = std::max({width,
                    f(o.moe.experts),
                    f(2 * o.moe.shared_inner),
                    f(o.mla.q_lora_rank),
                    f(o.mla.kv_lora_rank)});
  if (o.mla.indexer)
    width = std::max(
        {width, f(o.mla.indexer->heads) * f(o.mla.indexer->head_dim), f(o.mla.indexer->top_k)});
  return width * f(tokens) < 0x1p53;
}

// The bytes that training would reserve, by the same declarations; each length is laid out once.
class Activations {
 public:
  Activations(Model& model, const config::Config& config, RecomputePolicy policy)
      : model_(model), config_(config), policy_(std::move(policy)) {}
  std::optional<std::int64_t> bytes(std::int64_t tokens) {
    if (const auto it = known_.find(tokens); it != known_.end()) return it->second;
    std::optional<std::int64_t> result;
    if (fits(model_.options(), tokens)) {
      const std::int64_t pieces = pieces_of(tokens);
      model_.plan({.tokens = tokens / pieces, .pieces = pieces}, policy_);
      result = times(pieces, static_cast<std::int64_t>(model_.slot_bytes()));
    }
    known_[tokens] = result;
    return result;
  }
  std::int64_t pieces_of(std::int64_t tokens) const {
    return std::max<std::int64_t>(1, config::pieces_of_micro_batch(config_, tokens));
  }

 private:
  Model& model_;
  const config::Config& config_;
  RecomputePolicy policy_;
  std::map<std::int64_t, std::optional<std::int64_t>> known_;
};

}  // namespace

ModelPlan make_plan(const config::Config& config) {
  ModelPlan plan;
  plan.precision = precision_of(config, config.run.device != config::DeviceChoice::cpu);
  plan.sequence_length = config.data.sequence_length;
  plan.micro_batch_tokens = times(config.train.micro_batch_size, plan.sequence_length);
  const ModelOptions options = model_options(config);
  ParameterStore params(plan.precision);
  Model model(params, options);

  Counter counter(options, plan);
  for (const ParameterSpec& spec : params.params())
    counter.count(spec);
  for (const BufferSpec& spec : params.buffers())
    counter.count(spec);
  counter.finish();

  plan.flops = flops_of(plan, options, plan.sequence_length, false);
  plan.forward_flops = sum(plan.flops);
  plan.training_flops = times(3, plan.forward_flops);
  if (options.mtp) plan.mtp_flops = mtp_flops(plan, options, plan.sequence_length);

  plan.findings = phase_findings(params, config.train);
  const auto recompute = recompute_findings(model, config.activations);
  plan.findings.insert(plan.findings.end(), recompute.begin(), recompute.end());
  // With patterns that cannot be kept, sizes are those of none.
  RecomputePolicy policy =
      recompute.empty() ? recompute_policy(config.activations) : RecomputePolicy();
  policy.offload = {};  // all that is kept counts, wherever it is
  Activations activations(model, config, policy);
  plan.activation_bytes = activations.bytes(plan.micro_batch_tokens);
  for (std::size_t l = 0; plan.activation_bytes && l < plan.layers.size(); ++l)
    plan.layers[l].activation_bytes =
        times(activations.pieces_of(plan.micro_batch_tokens),
              static_cast<std::int64_t>(model.layers()[l]->tape_spec().slot_bytes()));
  const Bytes bytes(config.optimizer, params);
  std::vector<bool> ever_trained(params.params().size(), false);
  for (const config::PhaseExtent& extent : config::phase_extents(config)) {
    const config::PhaseConfig phase = config.train.phases.empty()
                                          ? config::PhaseConfig{}
                                          : config.train.phases[plan.phases.size()];
    PhasePlan p;
    p.begin = extent.begin;
    p.end = extent.until;
    p.sequence_length = extent.sequence_length;
    p.global_batch_size = extent.global_batch_size;
    p.micro_batch_size = extent.micro_batch_size;
    p.first_token = extent.first_token;
    p.end_token = extent.end_token();
    p.dense_warmup = phase.sparse_stage == config::SparseStage::warmup;
    const std::vector<bool> frozen = frozen_parameters(params, phase);
    for (std::size_t i = 0; i < frozen.size(); ++i) {
      const ParameterSpec& spec = params.params()[i];
      (frozen[i] ? p.frozen : p.trained) += spec.count();
      if (frozen[i]) continue;
      ever_trained[i] = true;
      const ByteClass c = bytes.of(spec, true);
      p.gradient_bytes = add(p.gradient_bytes, times(spec.count(), c.gradient));
      p.optimizer_bytes = add(p.optimizer_bytes, times(spec.count(), c.state));
    }
    p.forward_flops = sum(flops_of(plan, options, p.sequence_length, p.dense_warmup));
    p.activation_bytes = activations.bytes(times(p.micro_batch_size, p.sequence_length));
    plan.phases.push_back(p);
  }
  bytes.fill(plan, ever_trained);
  return plan;
}

std::int64_t layer_core_flops(const ModelOptions& options,
                              std::size_t layer,
                              std::int64_t tokens,
                              bool dense_warmup) {
  ModelOptions alone = options;
  alone.layers = {options.layers[layer]};
  return sum(cores_of(alone, tokens, dense_warmup));
}

}  // namespace moesaic
