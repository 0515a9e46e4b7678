#include "core/model/model.h"

#include <algorithm>
#include <set>

#include "core/nn/losses.h"
#include "kernels/ops/attn_res.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/step_scalars.h"
#include "kernels/part_scope.h"
#include "memory/offload/offloader.h"

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

// A stretch of work that the offload of activations sees as one.
template <class Work>
void visit(RunContext& context, const Work& work) {
  if (context.offload == nullptr) return work();
  context.offload->begin_visit(stream_of(context.backend));
  work();
  context.offload->end_visit(stream_of(context.backend));
}

// The accumulators of losses that a layer adds to, while it lasts.
class LossRow {
 public:
  LossRow(RunContext& context, std::size_t row) : context_(context), all_(context.losses) {
    context.losses = loss_row(all_, static_cast<std::int64_t>(row));
  }
  ~LossRow() { context_.losses = all_; }
  LossRow(const LossRow&) = delete;
  LossRow& operator=(const LossRow&) = delete;

 private:
  RunContext& context_;
  TensorView all_;
};

// [vocabulary, d], over Axis::tp by blocks of words.
ParameterSpec word_matrix(std::string name, const ModelOptions& options, Part part) {
  ParameterSpec s = split_over_tp(
      matrix_spec(std::move(name), options.vocabulary, options.hidden, options.init_std, part), 0);
  s.matrix = false;  // AdamW (SPEC 7.2)
  return s;
}

}  // namespace

Model::Model(ParameterStore& params, const ModelOptions& options, const StageShare& share)
    : options_(options), precision_(params.precision()), residuals_(plan_residuals(options)) {
  final_bank_ = residuals_.empty() ? 0 : residuals_.back().bank_size_after();
  const bool reads_table_again = options.tie_embeddings || options.mtp;
  if (share.has_first() || (share.has_last() && reads_table_again))
    declare_embedding(params, reads_table_again, share);
  declare_layers(params, share);
  if (share.has_last()) declare_tail(params);
  is_whole_ = share.is_vertical ||
              (chunks_.size() == 1 && chunks_.front().is_first && chunks_.front().is_last);
  keeps_mtp_gradient_ = share.is_vertical && options_.mtp;
}

void Model::declare_embedding(ParameterStore& params, bool is_read_again, const StageShare& share) {
  ParameterSpec s =
      word_matrix(options_.name_prefix + "model.embed_tokens.weight", options_, Part::embedding);
  s.has_copy = is_read_again && share.has_first() != share.has_last();
  s.is_copy = !share.has_first();
  embedding_ = std::make_unique<TokenEmbedding>(params.declare(s), params.position());
}

void Model::declare_layers(ParameterStore& params, const StageShare& share) {
  const auto all = static_cast<std::int64_t>(options_.layers.size());
  auto chunks = share.chunks;
  if (chunks.empty()) chunks.push_back({{0, all}, true, true});
  for (const StageShare::Chunk& chunk : chunks) {
    chunks_.push_back({layers_.size(), layers_.size(), chunk.is_first, chunk.is_last});
    for (std::int64_t l = chunk.layers.begin; l < chunk.layers.end; ++l) {
      const auto i = static_cast<std::size_t>(l);
      DecoderLayerOptions o;
      o.hidden = options_.hidden;
      o.eps = options_.eps;
      o.is_kda = options_.layers[i].is_kda;
      o.is_moe = options_.layers[i].is_moe;
      o.kda = options_.kda;
      o.mla = options_.mla;
      o.dense = options_.dense;
      o.moe = options_.moe;
      o.residual = residuals_[i];
      first_storage_.push_back(params.next_storage());
      numbers_.push_back(l);
      layers_.push_back(std::make_unique<DecoderLayer>(
          params, options_.name_prefix + "model.layers." + std::to_string(l) + ".", o));
    }
    chunks_.back().end = layers_.size();
  }
  first_storage_.push_back(params.next_storage());
}

void Model::declare_tail(ParameterStore& params) {
  const std::string prefix = options_.name_prefix + "model.";
  const std::int64_t d = options_.hidden;
  if (options_.residual == ResidualKind::attention)
    output_mix_ = declare_depth_mix(params, prefix + "output_attn", d);
  norm_ = params.declare(vector_spec(prefix + "norm.weight", d, Init::Kind::ones, Part::norm));
  const StorageId head_weight =
      options_.tie_embeddings ? embedding_->table()
                              : params.declare(word_matrix(
                                    options_.name_prefix + "lm_head.weight", options_, Part::head));
  head_ = std::make_unique<VocabHead>(
      head_weight, options_.vocabulary, options_.head_chunk_rows, params.position());
  if (options_.mtp)
    mtp_ = std::make_unique<MtpModule>(params, prefix + "mtp.", options_, *embedding_, *head_);
}

std::int64_t Model::snapshots_before(int i) const {
  const Chunk& c = chunk(i);
  if (c.begin < c.end) return layers_[c.begin]->options().residual.bank_size;
  return c.is_last ? final_bank_ : 0;  // only the first and the last chunk may be without layers
}

std::int64_t Model::snapshots_after(int i) const {
  const Chunk& c = chunk(i);
  return c.begin < c.end ? layers_[c.end - 1]->options().residual.bank_size_after()
                         : snapshots_before(i);
}

void Model::plan(const Bounds& bounds, const RecomputePolicy& policy) {
  slices_ = bounds.slices;
  own_tokens_ = bounds.own_tokens();
  if (chunks_.front().is_first) plan_embedding(bounds, policy);
  for (std::size_t l = 0; l < layers_.size(); ++l)
    layers_[l]->plan(bounds, policy, may_leave(l));
  if (!chunks_.back().is_last) return;
  RecomputePolicy staying = policy;
  staying.offload = {};
  plan_tail(bounds, staying);
  if (mtp_) mtp_->plan(bounds, staying);
}

// In a pipeline what messages carry stays: the sum after a chunk, and every snapshot.
DecoderLayer::Leaving Model::may_leave(std::size_t l) const {
  if (is_whole_) return {.mid = true, .out = true};
  const bool ends_chunk =
      std::any_of(chunks_.begin(), chunks_.end(), [&](const Chunk& c) { return c.end == l + 1; });
  return {.mid = false,
          .out = !ends_chunk && !layers_[l + 1]->options().residual.attn_starts_block};
}

void Model::plan_embedding(const Bounds& bounds, const RecomputePolicy& policy) {
  embed_spec_ = std::make_unique<TapeSpec>();
  x_ = embed_spec_->activation(
      "embedding", {bounds.own_tokens(), options_.hidden}, precision_.compute);
  embed_spec_->step("embedding", {}, {x_}, [this](Tape& t) {
    embedding_->forward(t, slices_, t.sequence().tokens, t.out(x_));
  });
  embed_spec_->always_save(x_);
  const bool is_snapshot = layers_.empty() || layers_.front()->options().residual.attn_starts_block;
  if (is_whole_ || (chunks_.front().begin < chunks_.front().end && !is_snapshot))
    embed_spec_->may_leave(x_);
  embed_spec_->plan(policy);
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
    tail_spec_->step(
        "output.mix",
        reads,
        {h_, p_},
        [this, reads](Tape& t) {
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
        },
        StepKind::cheap);
    tail_spec_->always_save(h_);  // the MTP module reads it
  }
  n_ = tail_spec_->activation("output.normed", shape, compute);
  inv_rms_ = tail_spec_->activation("output.inv_rms", {bounds.own_tokens()}, stats);
  dn_ = tail_spec_->activation("loss.gradient", shape, compute);
  tail_spec_->step(
      "output.norm",
      {h_},
      {n_, inv_rms_},
      [this](Tape& t) {
        const WeightLease w = t.weight(norm_);
        t.run(RmsNormForward{.y = t.out(n_),
                             .inv_rms = t.out(inv_rms_),
                             .x = t.in(h_),
                             .weight = w.view(),
                             .eps = options_.eps});
      },
      StepKind::cheap);
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

std::vector<const TapeSpec*> Model::tape_specs() const {
  std::vector<const TapeSpec*> specs;
  if (embed_spec_) specs.push_back(embed_spec_.get());
  for (const auto& layer : layers_)
    specs.push_back(&layer->tape_spec());
  if (tail_spec_) specs.push_back(tail_spec_.get());
  if (mtp_) mtp_->add_specs(specs);
  return specs;
}

std::vector<std::string> Model::activation_names() const {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const TapeSpec* spec : tape_specs()) {
    for (const TapeSpec::Activation& a : spec->activations()) {
      if (!a.is_input && seen.insert(a.name).second) names.push_back(a.name);
    }
  }
  return names;
}

std::vector<std::string> Model::chosen_names() const {
  std::vector<std::string> names;
  std::set<std::string> seen;
  for (const TapeSpec* spec : tape_specs()) {
    for (const TapeSpec::Step& step : spec->steps()) {
      if (step.kind != StepKind::chooses) continue;
      for (const ActId id : step.writes) {
        const std::string& name = spec->activations()[static_cast<std::size_t>(id.index)].name;
        if (seen.insert(name).second) names.push_back(name);
      }
    }
  }
  return names;
}

std::size_t Model::mtp_gradient_bytes() const {
  if (!keeps_mtp_gradient_) return 0;
  constexpr std::size_t kAlign = 256;
  const auto elements = static_cast<std::size_t>(own_tokens_ * options_.hidden);
  return (elements * byte_size(precision_.compute) + kAlign - 1) / kAlign * kAlign;
}

std::size_t Model::slot_bytes(int i) const {
  const Chunk& c = chunk(i);
  std::size_t bytes = c.is_first ? embed_spec_->slot_bytes() + mtp_gradient_bytes() : 0;
  for (std::size_t l = c.begin; l < c.end; ++l)
    bytes += layers_[l]->tape_spec().slot_bytes();
  if (!c.is_last) return bytes;
  return bytes + tail_spec_->slot_bytes() + (mtp_ ? mtp_->slot_bytes() : 0);
}

std::vector<std::size_t> Model::offloaded_parts(int i) const {
  const Chunk& c = chunk(i);
  std::vector<std::size_t> all;
  if (c.is_first) all = embed_spec_->offloaded_parts();
  for (std::size_t l = c.begin; l < c.end; ++l) {
    const auto& parts = layers_[l]->tape_spec().offloaded_parts();
    all.insert(all.end(), parts.begin(), parts.end());
  }
  return all;
}

Model::MicroBatch Model::make_micro_batch(TensorView slot,
                                          int i,
                                          std::span<const TensorView> offloaded) const {
  MOESAIC_CHECK(slot.bytes() >= slot_bytes(i), "the slot is too small for a micro-batch");
  std::int64_t at = 0;
  const auto next = [&](std::size_t bytes) {
    const std::int64_t begin = at;
    at += static_cast<std::int64_t>(bytes);
    return slot.rows(begin, at);
  };
  const auto parts_of = [&](const TapeSpec& spec) {
    const std::size_t n = spec.offloaded_parts().size();
    MOESAIC_CHECK(offloaded.size() >= n, "what is offloaded needs memory of its own");
    std::vector<TensorView> parts(offloaded.begin(),
                                  offloaded.begin() + static_cast<std::ptrdiff_t>(n));
    offloaded = offloaded.subspan(n);
    return parts;
  };
  const Chunk& c = chunk(i);
  MicroBatch batch;
  batch.chunk = i;
  if (c.is_first)
    batch.embed.emplace(*embed_spec_, next(embed_spec_->slot_bytes()), parts_of(*embed_spec_));
  if (c.is_first && keeps_mtp_gradient_) {
    const TensorView place = next(mtp_gradient_bytes());
    batch.mtp_gradient = TensorView(
        place.data(), precision_.compute, {own_tokens_, options_.hidden}, place.device());
  }
  for (std::size_t l = c.begin; l < c.end; ++l) {
    const TapeSpec& spec = layers_[l]->tape_spec();
    batch.layers.emplace_back(spec, next(spec.slot_bytes()), parts_of(spec));
  }
  if (!c.is_last) return batch;
  batch.tail.emplace(*tail_spec_, next(tail_spec_->slot_bytes()));
  if (mtp_)
    batch.mtp = std::make_unique<MtpModule::Tapes>(mtp_->make_tapes(next(mtp_->slot_bytes())));
  return batch;
}

void Model::forward(RunContext& context, MicroBatch& batch) {
  forward_chunk(context, batch, {});
}

std::size_t Model::piece_sum_bytes() const {
  std::size_t most = 0;  // layers take turns
  for (const auto& layer : layers_)
    if (layer->mla() != nullptr) most = std::max(most, layer->mla()->piece_sum_bytes());
  return mtp_ ? std::max(most, mtp_->mla()->piece_sum_bytes()) : most;
}

void Model::follow(MicroBatch& piece, MicroBatch& before) const {
  for (std::size_t l = 0; l < piece.layers.size(); ++l)
    piece.layers[l].follow(&before.layers[l]);
  if (piece.mtp && before.mtp) piece.mtp->layer.follow(&before.mtp->layer);
}

Model::Bundle Model::forward_chunk(RunContext& context, MicroBatch& batch, const Bundle& in) {
  const PartScope forward(context.backend, "forward");
  const Chunk& c = chunk(batch.chunk);
  Bundle bundle = in;
  if (c.is_first) {
    visit(context, [&] { batch.embed->forward(context); });
    bundle = {batch.embed->in(x_), {}};
  }
  for (std::size_t l = c.begin; l < c.end; ++l) {
    const PartScope part(context.backend, "layer", numbers_[l]);
    const LossRow row(context, l);
    visit(context,
          [&] { bundle = layers_[l]->forward(context, batch.layers[l - c.begin], bundle); });
  }
  if (!c.is_last) return bundle;
  const PartScope part(context.backend, "head");
  const LossRow row(context, layers_.size());
  Tape& tail = *batch.tail;
  for (std::size_t i = 0; i < tail_bank_.size(); ++i)
    tail.bind(tail_bank_[i], bundle.bank[i]);
  tail.bind(tail_cur_, bundle.cur);
  visit(context, [&] {
    tail.forward(context);
    if (mtp_ && !context.sequence.mtp_targets.empty())
      mtp_->forward(context, *batch.mtp, tail.in(options_.mtp_post_norm ? n_ : h_));
  });
  return bundle;
}

// From the gradient of the normalised output to those of the last sum and the snapshots.
void Model::backward_tail(RunContext& context,
                          MicroBatch& batch,
                          TensorView dcur,
                          std::span<const TensorView> dbank) {
  const Shape shape = dcur.shape();
  const DType compute = precision_.compute;
  const bool has_mtp = mtp_ && !context.sequence.mtp_targets.empty();
  // The layers need this memory; where weight gradients wait, the mark of the chunk keeps it.
  std::optional<Arena::Mark> mark;
  if (context.weight_gradients.mode() == WeightGradients::Mode::at_once)
    mark.emplace(context.transient);
  const TensorView dn = context.transient.take(shape, compute, "d output.normed");
  run(context.backend, Cast{.y = dn, .x = batch.tail->in(dn_)});
  if (has_mtp && options_.mtp_post_norm)
    mtp_->backward(context, *batch.mtp, dn, batch.mtp_gradient);
  const TensorView dh =
      output_mix_.declared() ? context.transient.take(shape, compute, "d output.mixed") : dcur;
  batch.tail->backward(context, [&] {
    Tape& t = *batch.tail;
    const WeightLease w = t.weight(norm_);
    t.run(RmsNormBackward{.dx = dh,
                          .dweight = t.grad(norm_),
                          .dy = dn,
                          .x = t.in(h_),
                          .weight = w.view(),
                          .inv_rms = t.in(inv_rms_)});
  });
  if (has_mtp && !options_.mtp_post_norm)
    mtp_->backward(context, *batch.mtp, dh, batch.mtp_gradient);
  if (!output_mix_.declared()) return;
  batch.tail->backward(context, [&] {
    Tape& t = *batch.tail;
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
  const Shape shape{own_tokens_, options_.hidden};
  // Deferred weight gradients keep this memory until they are flushed.
  auto mark = std::make_unique<Arena::Mark>(context.transient);
  if (context.weight_gradients.mode() == WeightGradients::Mode::deferred)
    context.weight_gradients.hold(std::move(mark));
  const TensorView dcur = context.transient.take(shape, precision_.compute, "d residual sum");
  std::vector<TensorView> dbank;
  for (std::int64_t i = 0; i < final_bank_; ++i) {
    dbank.push_back(context.transient.take(shape, precision_.stats, "d snapshot"));
    run(context.backend, Fill{.y = dbank.back(), .value = 0.0});
  }
  backward_chunk(context, batch, dcur, dbank);
}

void Model::backward_chunk(RunContext& context,
                           MicroBatch& batch,
                           TensorView dcur,
                           std::span<const TensorView> dbank) {
  const PartScope backward(context.backend, "backward");
  const Chunk& c = chunk(batch.chunk);
  auto mark = std::make_unique<Arena::Mark>(context.transient);
  if (context.weight_gradients.mode() == WeightGradients::Mode::deferred)
    context.weight_gradients.hold(std::move(mark));
  const auto is_final = [&](std::size_t l) {
    if (context.gradients_final &&
        context.weight_gradients.mode() == WeightGradients::Mode::at_once)
      context.gradients_final(first_storage_[l]);
  };
  if (c.is_last) {
    const PartScope part(context.backend, "head");
    const LossRow row(context, layers_.size());
    visit(context, [&] { backward_tail(context, batch, dcur, dbank); });
    is_final(layers_.size());
  }
  for (std::size_t l = c.end; l-- > c.begin;) {
    const PartScope part(context.backend, "layer", numbers_[l]);
    const LossRow row(context, l);
    const auto after = static_cast<std::size_t>(layers_[l]->options().residual.bank_size_after());
    visit(context, [&] {
      layers_[l]->backward(context, batch.layers[l - c.begin], dcur, dbank.first(after));
    });
    is_final(l);
  }
  if (!c.is_first) return;
  if (!batch.mtp_gradient.empty() && !context.sequence.mtp_targets.empty()) {
    batch.embed->backward(context, [&] {
      embedding_->backward(
          *batch.embed, slices_, batch.embed->sequence().mtp_tokens, batch.mtp_gradient);
    });
  }
  batch.embed->backward(context, [&] {
    embedding_->backward(*batch.embed, slices_, batch.embed->sequence().tokens, dcur);
  });
}

std::vector<Model::NamedMoe> Model::moe_layers() {
  std::vector<NamedMoe> all;
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    if (layers_[l]->moe() != nullptr) all.push_back({numbers_[l], layers_[l]->moe()});
  }
  if (mtp_ && mtp_->moe() != nullptr)
    all.push_back({static_cast<std::int64_t>(options_.layers.size()), mtp_->moe()});
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
