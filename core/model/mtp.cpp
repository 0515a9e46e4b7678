#include "core/model/mtp.h"

#include "kernels/ops/concat.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {
namespace {
DecoderLayerOptions layer_options(const ModelOptions& o) {
  DecoderLayerOptions l;
  l.hidden = o.hidden;
  l.eps = o.eps;
  l.is_moe = o.moe.experts > 0;
  l.mla = o.mla;
  l.mla.indexer.reset();  // dense attention: the golden's form
  l.moe = o.moe;
  l.dense = o.dense;
  return l;
}
}  // namespace

MtpModule::MtpModule(ParameterStore& params,
                     const std::string& prefix,
                     const ModelOptions& options,
                     const TokenEmbedding& embedding,
                     const VocabHead& head)
    : options_(options), precision_(params.precision()), embedding_(embedding), head_(head) {
  const std::int64_t d = options.hidden;
  eh_proj_ =
      params.declare(matrix_spec(prefix + "eh_proj.weight", d, 2 * d, options.init_std, Part::mtp));
  enorm_ = params.declare(vector_spec(prefix + "enorm.weight", d, Init::Kind::ones, Part::mtp));
  hnorm_ = params.declare(vector_spec(prefix + "hnorm.weight", d, Init::Kind::ones, Part::mtp));
  norm_ = params.declare(vector_spec(prefix + "norm.weight", d, Init::Kind::ones, Part::mtp));
  layer_ = std::make_unique<DecoderLayer>(params, prefix, layer_options(options));
}

void MtpModule::plan(const Bounds& bounds, const RecomputePolicy& policy) {
  slices_ = bounds.slices;
  const std::int64_t tokens = bounds.own_tokens();
  const Shape shape{tokens, options_.hidden}, row{tokens};
  const DType compute = precision_.compute, stats = precision_.stats;
  front_ = std::make_unique<TapeSpec>();
  hidden_ = front_->input("mtp.hidden", shape, compute);
  e_ = front_->activation("mtp.e", shape, compute);
  en_ = front_->activation("mtp.e_normed", shape, compute);
  e_inv_rms_ = front_->activation("mtp.e_inv_rms", row, stats);
  hn_ = front_->activation("mtp.h_normed", shape, compute);
  h_inv_rms_ = front_->activation("mtp.h_inv_rms", row, stats);
  u_ = front_->activation("mtp.u", {tokens, 2 * options_.hidden}, compute);
  x_ = front_->activation("mtp.x", shape, compute);
  front_->step("mtp.embed", {}, {e_}, [this](Tape& t) {
    embedding_.forward(t, slices_, t.sequence().mtp_tokens, t.out(e_));
  });
  const auto norm_step = [this](const char* name, ActId x, ActId y, ActId rho, StorageId weight) {
    front_->step(
        name,
        {x},
        {y, rho},
        [this, x, y, rho, weight](Tape& t) {
          const WeightLease w = t.weight(weight);
          t.run(RmsNormForward{.y = t.out(y),
                               .inv_rms = t.out(rho),
                               .x = t.in(x),
                               .weight = w.view(),
                               .eps = options_.eps});
        },
        StepKind::cheap);
  };
  norm_step("mtp.enorm", e_, en_, e_inv_rms_, enorm_);
  norm_step("mtp.hnorm", hidden_, hn_, h_inv_rms_, hnorm_);
  front_->forward_only(en_);
  front_->forward_only(hn_);
  front_->step(
      "mtp.concat",
      {en_, hn_},
      {u_},
      [this](Tape& t) { t.run(ConcatColumns{.y = t.out(u_), .a = t.in(en_), .b = t.in(hn_)}); },
      StepKind::cheap);
  front_->step(
      "mtp.project", {u_}, {x_}, [this](Tape& t) { linear(t, t.out(x_), t.in(u_), eh_proj_); });
  front_->always_save(x_);
  front_->plan(policy);

  layer_->plan(bounds, policy);

  back_ = std::make_unique<TapeSpec>();
  back_in_ = back_->input("mtp.out", shape, compute);
  n_ = back_->activation("mtp.normed", shape, compute);
  n_inv_rms_ = back_->activation("mtp.norm_inv_rms", row, stats);
  dn_ = back_->activation("loss.mtp_gradient", shape, compute);
  back_->step(
      "mtp.norm",
      {back_in_},
      {n_, n_inv_rms_},
      [this](Tape& t) {
        const WeightLease w = t.weight(norm_);
        t.run(RmsNormForward{.y = t.out(n_),
                             .inv_rms = t.out(n_inv_rms_),
                             .x = t.in(back_in_),
                             .weight = w.view(),
                             .eps = options_.eps});
      },
      StepKind::cheap);
  back_->step(
      "mtp.loss",
      {n_},
      {dn_},
      [this](Tape& t) {
        RunContext& c = t.context();
        head_.loss(t,
                   slices_,
                   t.in(n_),
                   {.targets = c.sequence.mtp_targets,
                    .divisor = step_scalar(c.step_scalars, StepScalar::mtp_divisor),
                    .loss_sum = loss_slot(c.losses, Loss::mtp),
                    .scale = options_.mtp_weight},
                   c.training ? t.out(dn_) : TensorView());
      },
      StepKind::chooses);
  back_->plan(policy);
}

std::size_t MtpModule::slot_bytes() const {
  return front_->slot_bytes() + layer_->tape_spec().slot_bytes() + back_->slot_bytes();
}

MtpModule::Tapes MtpModule::make_tapes(TensorView slot) const {
  const auto a = static_cast<std::int64_t>(front_->slot_bytes()),
             b = a + static_cast<std::int64_t>(layer_->tape_spec().slot_bytes());
  return {Tape(*front_, slot.rows(0, a)),
          Tape(layer_->tape_spec(), slot.rows(a, b)),
          Tape(*back_, slot.rows(b, slot.dim(0)))};
}

void MtpModule::forward(RunContext& context, Tapes& tapes, ConstTensorView hidden) {
  tapes.front.bind(hidden_, hidden);
  tapes.front.forward(context);
  const auto out = layer_->forward(context, tapes.layer, {tapes.front.in(x_), {}});
  tapes.back.bind(back_in_, out.cur);
  tapes.back.forward(context);
}

void MtpModule::backward(RunContext& context,
                         Tapes& tapes,
                         TensorView dhidden,
                         TensorView dembedded) {
  const DType compute = precision_.compute;
  const Shape shape = dhidden.shape();
  const TensorView dcur = context.transient.take(shape, compute, "d mtp.out");
  tapes.back.backward(context, [&] {
    Tape& t = tapes.back;
    const WeightLease w = t.weight(norm_);
    t.run(RmsNormBackward{.dx = dcur,
                          .dweight = t.grad(norm_),
                          .dy = t.in(dn_),
                          .x = t.in(back_in_),
                          .weight = w.view(),
                          .inv_rms = t.in(n_inv_rms_)});
  });
  layer_->backward(context, tapes.layer, dcur, {});
  tapes.front.backward(context, [&] {
    Tape& t = tapes.front;
    const TensorView du = t.temp({shape[0], 2 * shape[1]}, compute, "d mtp.u");
    linear_backward(t, du, dcur, t.in(u_), eh_proj_, false);
    const TensorView de = t.temp(shape, compute, "d mtp.e"), dh = t.temp(shape, compute, "d mtp.h");
    t.run(SplitColumns{.a = de, .b = dh, .y = du});
    const WeightLease we = t.weight(enorm_), wh = t.weight(hnorm_);
    t.run(RmsNormBackward{.dx = de,
                          .dweight = t.grad(enorm_),
                          .dy = de,
                          .x = t.in(e_),
                          .weight = we.view(),
                          .inv_rms = t.in(e_inv_rms_)});
    if (dembedded.empty())
      embedding_.backward(t, slices_, t.sequence().mtp_tokens, de);
    else
      t.run(Cast{.y = dembedded, .x = de});
    t.run(RmsNormBackward{.dx = dhidden,
                          .dweight = t.grad(hnorm_),
                          .dy = dh,
                          .x = t.in(hidden_),
                          .weight = wh.view(),
                          .inv_rms = t.in(h_inv_rms_),
                          .accumulate_dx = true});
  });
}

}  // namespace moesaic
