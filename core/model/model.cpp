#include "core/model/model.h"

#include <set>

#include "core/nn/losses.h"
#include "kernels/ops/attn_res.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/step_scalars.h"
#include "kernels/part_scope.h"

namespace moesaic {

std::vector<LayerResidual> plan_residuals(const ModelOptions& options) {
  std::vector<LayerResidual> plan(options.layers.size());
  if (options.residual == ResidualKind::plain) return plan;
  std::int64_t bank = 0;
  for (std::size_t l = 0; l < plan.size(); ++l) {
    LayerResidual& r = plan[l];
    r.kind = ResidualKind::attention;
    r.bank_size = bank;
    r.attn_starts_block =
        options.attn_res_full || static_cast<std::int64_t>(l) % options.attn_res_block == 0;
    r.mlp_starts_block = options.attn_res_full;
    bank = r.bank_size_after();
  }
  return plan;
}

namespace {

// [vocabulary, d], over Axis::tp by blocks of words.
ParameterSpec word_matrix(std::string name, const ModelOptions& options, Part part) {
  ParameterSpec s = split_over_tp(
      matrix_spec(std::move(name), options.vocabulary, options.hidden, options.init_std, part), 0);
  s.matrix = false;  // AdamW (SPEC 7.2)
  return s;
}

}  // namespace

Model::Model(ParameterStore& params, const ModelOptions& options)
    : options_(options), precision_(params.precision()) {
  const std::string prefix = options.name_prefix + "model.";
  const std::int64_t d = options.hidden;
  embedding_ = std::make_unique<TokenEmbedding>(
      params.declare(word_matrix(prefix + "embed_tokens.weight", options, Part::embedding)),
      params.position());
  const auto residuals = plan_residuals(options);
  for (std::size_t l = 0; l < options.layers.size(); ++l) {
    DecoderLayerOptions o;
    o.hidden = d;
    o.eps = options.eps;
    o.is_kda = options.layers[l].is_kda;
    o.is_moe = options.layers[l].is_moe;
    o.kda = options.kda;
    o.mla = options.mla;
    o.dense = options.dense;
    o.moe = options.moe;
    o.residual = residuals[l];
    first_storage_.push_back(params.next_storage());
    layers_.push_back(
        std::make_unique<DecoderLayer>(params, prefix + "layers." + std::to_string(l) + ".", o));
  }
  first_storage_.push_back(params.next_storage());
  final_bank_ = residuals.empty() ? 0 : residuals.back().bank_size_after();
  if (options.residual == ResidualKind::attention)
    output_mix_ = declare_depth_mix(params, prefix + "output_attn", d);
  norm_ = params.declare(vector_spec(prefix + "norm.weight", d, Init::Kind::ones, Part::norm));
  const StorageId head_weight =
      options.tie_embeddings ? embedding_->table()
                             : params.declare(word_matrix(
                                   options.name_prefix + "lm_head.weight", options, Part::head));
  head_ = std::make_unique<VocabHead>(
      head_weight, options.vocabulary, options.head_chunk_rows, params.position());
  if (options.mtp)
    mtp_ = std::make_unique<MtpModule>(params, prefix + "mtp.", options, *embedding_, *head_);
}

void Model::plan(const Bounds& bounds, const RecomputePolicy& policy) {
  slices_ = bounds.slices;
  embed_spec_ = std::make_unique<TapeSpec>();
  x_ = embed_spec_->activation(
      "embedding", {bounds.own_tokens(), options_.hidden}, precision_.compute);
  embed_spec_->step("embedding", {}, {x_}, [this](Tape& t) {
    embedding_->forward(t, slices_, t.sequence().tokens, t.out(x_));
  });
  embed_spec_->always_save(x_);
  embed_spec_->plan(policy);
  for (auto& layer : layers_)
    layer->plan(bounds, policy);
  plan_tail(bounds, policy);
  if (mtp_) mtp_->plan(bounds, policy);
}

void Model::plan_tail(const Bounds& bounds, const RecomputePolicy& policy) {
  const Shape shape{bounds.own_tokens(), options_.hidden};
  const DType compute = precision_.compute, stats = precision_.stats;
  tail_spec_ = std::make_unique<TapeSpec>();
  tail_bank_.clear();
  for (std::int64_t i = 0; i < final_bank_; ++i)
    tail_bank_.push_back(tail_spec_->input("bank." + std::to_string(i), shape, compute));
  tail_cur_ = tail_spec_->input("cur", shape, compute);
  h_ = tail_cur_;
  p_ = ActId();
  if (output_mix_.declared()) {
    h_ = tail_spec_->activation("output.mixed", shape, compute);
    p_ = tail_spec_->activation("output.mix_p", {bounds.own_tokens(), final_bank_ + 1}, stats);
    std::vector<ActId> reads = tail_bank_;
    reads.push_back(tail_cur_);
    tail_spec_->step("output.mix", reads, {h_, p_}, [this, reads](Tape& t) {
      const WeightLease query = t.weight(output_mix_.query), norm = t.weight(output_mix_.norm);
      AttnResForward op{.h = t.out(h_),
                        .p = t.out(p_),
                        .sources = {},
                        .query = query.view().reshaped({options_.hidden}),
                        .norm = norm.view(),
                        .eps = options_.eps};
      for (const ActId r : reads)
        op.sources.push_back(t.in(r));
      t.run(op);
    });
    tail_spec_->always_save(h_);  // the MTP module reads it
  }
  n_ = tail_spec_->activation("output.normed", shape, compute);
  inv_rms_ = tail_spec_->activation("output.inv_rms", {bounds.own_tokens()}, stats);
  dn_ = tail_spec_->activation("loss.gradient", shape, compute);
  tail_spec_->step("output.norm", {h_}, {n_, inv_rms_}, [this](Tape& t) {
    const WeightLease w = t.weight(norm_);
    t.run(RmsNormForward{.y = t.out(n_),
                         .inv_rms = t.out(inv_rms_),
                         .x = t.in(h_),
                         .weight = w.view(),
                         .eps = options_.eps});
  });
  tail_spec_->always_save(n_);
  // The loss adds to accumulators and to the head's gradient: it happens once.
  tail_spec_->step(
      "loss",
      {n_},
      {dn_},
      [this](Tape& t) {
        RunContext& c = t.context();
        if (c.sequence.targets.empty()) return;  // generation
        head_->loss(t,
                    slices_,
                    t.in(n_),
                    {.targets = c.sequence.targets,
                     .divisor = step_scalar(c.step_scalars, StepScalar::loss_divisor),
                     .loss_sum = loss_slot(c.losses, Loss::cross_entropy)},
                    c.training ? t.out(dn_) : TensorView());
      },
      StepKind::chooses);
  tail_spec_->plan(policy);
}

std::vector<std::string> Model::activation_names() const {
  std::vector<const TapeSpec*> specs{embed_spec_.get()};
  for (const auto& layer : layers_)
    specs.push_back(&layer->tape_spec());
  specs.push_back(tail_spec_.get());
  if (mtp_) mtp_->add_specs(specs);
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const TapeSpec* spec : specs) {
    for (const TapeSpec::Activation& a : spec->activations()) {
      if (!a.is_input && seen.insert(a.name).second) names.push_back(a.name);
    }
  }
  return names;
}

std::size_t Model::slot_bytes() const {
  std::size_t bytes = embed_spec_->slot_bytes() + tail_spec_->slot_bytes();
  for (const auto& layer : layers_)
    bytes += layer->tape_spec().slot_bytes();
  return bytes + (mtp_ ? mtp_->slot_bytes() : 0);
}

Model::MicroBatch Model::make_micro_batch(TensorView slot) const {
  MOESAIC_CHECK(slot.bytes() >= slot_bytes(), "the slot is too small for a micro-batch");
  std::int64_t at = 0;
  const auto next = [&](std::size_t bytes) {
    const std::int64_t begin = at;
    at += static_cast<std::int64_t>(bytes);
    return slot.rows(begin, at);
  };
  Tape embed(*embed_spec_, next(embed_spec_->slot_bytes()));
  std::vector<Tape> layers;
  for (const auto& layer : layers_)
    layers.emplace_back(layer->tape_spec(), next(layer->tape_spec().slot_bytes()));
  Tape tail(*tail_spec_, next(tail_spec_->slot_bytes()));
  MicroBatch batch{std::move(embed), std::move(layers), std::move(tail), nullptr};
  if (mtp_)
    batch.mtp = std::make_unique<MtpModule::Tapes>(mtp_->make_tapes(next(mtp_->slot_bytes())));
  return batch;
}

void Model::forward(RunContext& context, MicroBatch& batch) {
  const PartScope forward(context.backend, "forward");
  batch.embed.forward(context);
  DecoderLayer::Bundle bundle{batch.embed.in(x_), {}};
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    const PartScope part(context.backend, "layer", static_cast<std::int64_t>(l));
    bundle = layers_[l]->forward(context, batch.layers[l], bundle);
  }
  const PartScope part(context.backend, "head");
  for (std::size_t i = 0; i < tail_bank_.size(); ++i)
    batch.tail.bind(tail_bank_[i], bundle.bank[i]);
  batch.tail.bind(tail_cur_, bundle.cur);
  batch.tail.forward(context);
  if (mtp_ && !context.sequence.mtp_targets.empty()) {
    mtp_->forward(context, *batch.mtp, batch.tail.in(options_.mtp_post_norm ? n_ : h_));
  }
}

// From the gradient of the normalised output to those of the last sum and the snapshots.
void Model::backward_tail(RunContext& context,
                          MicroBatch& batch,
                          TensorView dcur,
                          std::span<const TensorView> dbank) {
  const Shape shape = dcur.shape();
  const DType compute = precision_.compute;
  const bool has_mtp = mtp_ && !context.sequence.mtp_targets.empty();
  const TensorView dn = context.transient.take(shape, compute, "d output.normed");
  run(context.backend, Cast{.y = dn, .x = batch.tail.in(dn_)});
  if (has_mtp && options_.mtp_post_norm) mtp_->backward(context, *batch.mtp, dn);
  const TensorView dh =
      output_mix_.declared() ? context.transient.take(shape, compute, "d output.mixed") : dcur;
  batch.tail.backward(context, [&] {
    Tape& t = batch.tail;
    const WeightLease w = t.weight(norm_);
    t.run(RmsNormBackward{.dx = dh,
                          .dweight = t.grad(norm_),
                          .dy = dn,
                          .x = t.in(h_),
                          .weight = w.view(),
                          .inv_rms = t.in(inv_rms_)});
  });
  if (has_mtp && !options_.mtp_post_norm) mtp_->backward(context, *batch.mtp, dh);
  if (!output_mix_.declared()) return;
  batch.tail.backward(context, [&] {
    Tape& t = batch.tail;
    t.run(Fill{.y = dcur, .value = 0.0});
    const WeightLease query = t.weight(output_mix_.query), norm = t.weight(output_mix_.norm);
    const MixGradients gradients = mix_gradients(t, output_mix_, options_.hidden);
    AttnResBackward mix{.dsources = {dbank.begin(), dbank.end()},
                        .dquery = gradients.query,
                        .dnorm = gradients.norm,
                        .dh = dh,
                        .p = t.in(p_),
                        .sources = {},
                        .query = query.view().reshaped({options_.hidden}),
                        .norm = norm.view(),
                        .eps = options_.eps};
    for (const ActId b : tail_bank_)
      mix.sources.push_back(t.in(b));
    mix.dsources.push_back(dcur);
    mix.sources.push_back(t.in(tail_cur_));
    t.run(mix);
  });
}

void Model::backward(RunContext& context, MicroBatch& batch) {
  const PartScope backward(context.backend, "backward");
  const Shape shape = batch.embed.in(x_).shape();
  // Deferred weight gradients keep this memory until they are flushed.
  auto mark = std::make_unique<Arena::Mark>(context.transient);
  const TensorView dcur = context.transient.take(shape, precision_.compute, "d residual sum");
  std::vector<TensorView> dbank;
  for (std::int64_t i = 0; i < final_bank_; ++i) {
    dbank.push_back(context.transient.take(shape, precision_.stats, "d snapshot"));
    run(context.backend, Fill{.y = dbank.back(), .value = 0.0});
  }
  if (context.weight_gradients.mode() == WeightGradients::Mode::deferred)
    context.weight_gradients.hold(std::move(mark));
  const auto is_final = [&](std::size_t l) {
    if (context.gradients_final &&
        context.weight_gradients.mode() == WeightGradients::Mode::at_once)
      context.gradients_final(first_storage_[l]);
  };
  {
    const PartScope part(context.backend, "head");
    backward_tail(context, batch, dcur, dbank);
  }
  is_final(layers_.size());
  for (std::size_t l = layers_.size(); l-- > 0;) {
    const PartScope part(context.backend, "layer", static_cast<std::int64_t>(l));
    const auto after = static_cast<std::size_t>(layers_[l]->options().residual.bank_size_after());
    layers_[l]->backward(
        context, batch.layers[l], dcur, std::span<const TensorView>(dbank).first(after));
    is_final(l);
  }
  batch.embed.backward(context, [&] {
    embedding_->backward(batch.embed, slices_, batch.embed.sequence().tokens, dcur);
  });
}

std::vector<Model::NamedMoe> Model::moe_layers() {
  std::vector<NamedMoe> all;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l]->moe() != nullptr)
      all.push_back({static_cast<std::int64_t>(l), layers_[l]->moe()});
  }
  if (mtp_ && mtp_->moe() != nullptr)
    all.push_back({static_cast<std::int64_t>(layers_.size()), mtp_->moe()});
  return all;
}

std::vector<MlaAttention*> Model::mla_layers() {
  std::vector<MlaAttention*> all;
  for (const auto& layer : layers_) {
    if (layer->mla() != nullptr) all.push_back(layer->mla());
  }
  if (mtp_) all.push_back(mtp_->mla());
  return all;
}

void Model::set_sparse_stage(bool sparse) {
  for (MlaAttention* mla : mla_layers())
    mla->set_sparse(sparse);
}

}  // namespace moesaic
