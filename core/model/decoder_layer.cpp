#include "core/model/decoder_layer.h"

#include "kernels/ops/attn_res.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/rms_norm.h"

namespace moesaic {

MixGradients mix_gradients(Tape& tape, const DepthMix& mix, std::int64_t hidden) {
  MixGradients g{tape.grad(mix.query), tape.grad(mix.norm)};
  if (!g.query.empty()) g.query = g.query.reshaped({hidden});
  // Taken in any case: the arenas are measured with all parameters trained.
  const TensorView unused =
      tape.temp({hidden}, tape.context().params.precision().stats, "unused d mix");
  if (g.query.empty() == g.norm.empty()) return g;
  (g.query.empty() ? g.query : g.norm) = unused;
  tape.run(Fill{.y = unused, .value = 0.0});
  return g;
}

DepthMix declare_depth_mix(ParameterStore& params, const std::string& prefix, std::int64_t hidden) {
  ParameterSpec query;
  query.name = prefix + "_res_proj.weight";
  query.shape = {1, hidden};
  query.init = {Init::Kind::zeros, 0, 0};  // a uniform average at the start: crucial (SPEC 6.2)
  query.part = Part::attn_res;
  DepthMix mix;
  mix.query = params.declare(query);
  mix.norm = params.declare(
      vector_spec(prefix + "_res_norm.weight", hidden, Init::Kind::ones, Part::attn_res));
  return mix;
}

DecoderLayer::DecoderLayer(ParameterStore& params,
                           const std::string& prefix,
                           const DecoderLayerOptions& options)
    : options_(options), precision_(params.precision()) {
  attn_.norm = params.declare(
      vector_spec(prefix + "input_layernorm.weight", options.hidden, Init::Kind::ones, Part::norm));
  if (options.is_kda) {
    kda_ = std::make_unique<KdaAttention>(params, prefix + "self_attn.", options.kda);
    attn_.module = kda_.get();
  } else {
    mla_ = std::make_unique<MlaAttention>(params, prefix + "self_attn.", options.mla);
    attn_.module = mla_.get();
  }
  channel_.norm = params.declare(vector_spec(
      prefix + "post_attention_layernorm.weight", options.hidden, Init::Kind::ones, Part::norm));
  if (options.is_moe) {
    moe_ = std::make_unique<MoeLayer>(params, prefix + "block_sparse_moe.", options.moe);
    channel_.module = moe_.get();
  } else {
    mlp_ = std::make_unique<GatedMlp>(params, prefix + "mlp.", options.dense, Part::dense_mlp);
    channel_.module = mlp_.get();
  }
  if (options.residual.kind == ResidualKind::attention) {
    attn_.mix = declare_depth_mix(params, prefix + "self_attention", options.hidden);
    channel_.mix = declare_depth_mix(params, prefix + "mlp", options.hidden);
  }
}

void DecoderLayer::declare_sublayer(
    Sublayer& s, const std::string& name, std::int64_t sources, ActId cur, const Bounds& bounds) {
  const Shape shape{bounds.own_tokens(), options_.hidden};
  const DType compute = precision_.compute, stats = precision_.stats;
  s.h = cur;  // with one source the mix is that source
  if (s.mix.declared() && sources > 0) {
    s.h = spec_->activation(name + ".mixed", shape, compute);
    s.p = spec_->activation(name + ".mix_p", {bounds.own_tokens(), sources + 1}, stats);
    std::vector<ActId> reads(bank_.begin(), bank_.begin() + sources);
    reads.push_back(cur);
    spec_->step(
        name + ".mix",
        reads,
        {s.h, s.p},
        [this, &s, reads](Tape& t) {
          const WeightLease query = t.weight(s.mix.query), norm = t.weight(s.mix.norm);
          AttnResForward op{.h = t.out(s.h),
                            .p = t.out(s.p),
                            .sources = {},
                            .query = query.view().reshaped({options_.hidden}),
                            .norm = norm.view(),
                            .eps = options_.eps};
          for (const ActId r : reads)
            op.sources.push_back(t.in(r));
          t.run(op);
        },
        StepKind::cheap);
  }
  s.n = spec_->activation(name + ".normed", shape, compute);
  s.inv_rms = spec_->activation(name + ".norm_inv_rms", {bounds.own_tokens()}, stats);
  spec_->step(
      name + ".norm",
      {s.h},
      {s.n, s.inv_rms},
      [this, &s](Tape& t) {
        const WeightLease w = t.weight(s.norm);
        t.run(RmsNormForward{.y = t.out(s.n),
                             .inv_rms = t.out(s.inv_rms),
                             .x = t.in(s.h),
                             .weight = w.view(),
                             .eps = options_.eps});
      },
      StepKind::cheap);
  s.y = spec_->activation(name + ".output", shape, compute);
  declare_module(s, name, bounds);
}

void DecoderLayer::declare_module(Sublayer& s, const std::string& name, const Bounds& bounds) {
  s.all_n = s.share = ActId();
  if (bounds.slices == nullptr || !s.module->takes_all_tokens())
    return s.module->declare(*spec_, bounds, s.n, s.y);
  const Shape all{bounds.tokens, options_.hidden};
  s.all_n = spec_->activation(name + ".gathered", all, precision_.compute);
  s.share = spec_->activation(name + ".share", all, precision_.compute);
  spec_->step(name + ".gather", {s.n}, {s.all_n}, [this, &s](Tape& t) {
    slices_->gather(t.out(s.all_n), t.in(s.n), t.stream());
  });
  s.module->declare(*spec_, bounds, s.all_n, s.share);
  spec_->forward_only(s.n);
  spec_->never_save(s.share);
  spec_->step(name + ".sum", {s.share}, {s.y}, [this, &s](Tape& t) {
    slices_->sum_to_own(t.out(s.y), t.in(s.share), t.stream());
  });
}

void DecoderLayer::plan(const Bounds& bounds, const RecomputePolicy& policy, Leaving leaving) {
  spec_ = std::make_unique<TapeSpec>();
  bank_.clear();
  slices_ = bounds.slices;
  const Shape shape{bounds.own_tokens(), options_.hidden};
  const DType compute = precision_.compute;
  const LayerResidual& r = options_.residual;
  cur_in_ = spec_->input("cur", shape, compute);
  for (std::int64_t i = 0; i < r.bank_size; ++i)
    bank_.push_back(spec_->input("bank." + std::to_string(i), shape, compute));
  declare_sublayer(attn_, "attn_block", r.bank_size, cur_in_, bounds);
  if (r.attn_starts_block) bank_.push_back(cur_in_);
  if (r.attn_starts_block) {
    mid_ = attn_.y;
  } else {
    spec_->forward_only(attn_.y);
    mid_ = spec_->activation("cur.mid", shape, compute);
    spec_->step(
        "cur.mid",
        {cur_in_, attn_.y},
        {mid_},
        [this](Tape& t) { t.run(Add{.y = t.out(mid_), .a = t.in(cur_in_), .b = t.in(attn_.y)}); },
        StepKind::cheap);
  }
  declare_sublayer(channel_, "mlp_block", static_cast<std::int64_t>(bank_.size()), mid_, bounds);
  if (r.mlp_starts_block) {
    spec_->always_save(mid_);
    if (leaving.mid) spec_->may_leave(mid_);
    out_ = channel_.y;
  } else {
    spec_->forward_only(channel_.y);
    out_ = spec_->activation("cur.out", shape, compute);
    spec_->step(
        "cur.out",
        {mid_, channel_.y},
        {out_},
        [this](Tape& t) { t.run(Add{.y = t.out(out_), .a = t.in(mid_), .b = t.in(channel_.y)}); },
        StepKind::cheap);
  }
  spec_->always_save(out_);
  if (leaving.out) spec_->may_leave(out_);
  spec_->plan(policy);
}

DecoderLayer::Bundle DecoderLayer::forward(RunContext& context, Tape& tape, const Bundle& in) {
  const LayerResidual& r = options_.residual;
  MOESAIC_CHECK(static_cast<std::int64_t>(in.bank.size()) == r.bank_size,
                "the bundle does not hold the snapshots of this layer");
  tape.bind(cur_in_, in.cur);
  for (std::size_t i = 0; i < in.bank.size(); ++i)
    tape.bind(bank_[i], in.bank[i]);
  tape.forward(context);
  Bundle out = in;
  if (r.attn_starts_block) out.bank.push_back(in.cur);
  if (r.mlp_starts_block) out.bank.push_back(tape.in(mid_));
  out.cur = tape.in(out_);
  return out;
}

void DecoderLayer::backward_module(Tape& tape,
                                   const Sublayer& s,
                                   ConstTensorView dy,
                                   TensorView dn) const {
  if (!s.all_n.valid()) return s.module->backward(tape, dy, dn);
  const Shape all = tape.in(s.all_n).shape();
  const TensorView all_dy = tape.temp(all, precision_.compute, "d sublayer output, all tokens"),
                   all_dn = tape.temp(all, precision_.compute, "d sublayer input, all tokens");
  slices_->gather(all_dy, dy, tape.stream());
  s.module->backward(tape, all_dy, all_dn);
  slices_->sum_to_own(dn, all_dn, tape.stream());
}

void DecoderLayer::backward_sublayer(Tape& tape,
                                     const Sublayer& s,
                                     ConstTensorView dy,
                                     TensorView dcur,
                                     std::span<const TensorView> dbank,
                                     ActId cur,
                                     std::int64_t sources) {
  const ConstTensorView h = tape.in(s.h);
  const TensorView dn = tape.temp(h.shape(), precision_.compute, "d sublayer input");
  backward_module(tape, s, dy, dn);
  const WeightLease w = tape.weight(s.norm);
  RmsNormBackward norm{.dx = dcur,
                       .dweight = tape.grad(s.norm),
                       .dy = dn,
                       .x = h,
                       .weight = w.view(),
                       .inv_rms = tape.in(s.inv_rms),
                       .accumulate_dx = true};
  if (!s.p.valid()) {
    tape.run(norm);
    return;
  }
  const TensorView dh = tape.temp(h.shape(), precision_.compute, "d mixed");
  norm.dx = dh;
  norm.accumulate_dx = false;
  tape.run(norm);
  const WeightLease query = tape.weight(s.mix.query), norm_weight = tape.weight(s.mix.norm);
  const MixGradients gradients = mix_gradients(tape, s.mix, options_.hidden);
  AttnResBackward mix{.dsources = {},
                      .dquery = gradients.query,
                      .dnorm = gradients.norm,
                      .dh = dh,
                      .p = tape.in(s.p),
                      .sources = {},
                      .query = query.view().reshaped({options_.hidden}),
                      .norm = norm_weight.view(),
                      .eps = options_.eps};
  for (std::int64_t i = 0; i < sources; ++i) {
    mix.dsources.push_back(dbank[static_cast<std::size_t>(i)]);
    mix.sources.push_back(tape.in(bank_[static_cast<std::size_t>(i)]));
  }
  mix.dsources.push_back(dcur);
  mix.sources.push_back(tape.in(cur));
  tape.run(mix);
}

void DecoderLayer::backward(RunContext& context,
                            Tape& tape,
                            TensorView dcur,
                            std::span<const TensorView> dbank) {
  const LayerResidual& r = options_.residual;
  // A sublayer's output gradient is dcur itself. Where weight gradients wait, their operand must outlive the next update
  // of dcur, hence the copy.
  const auto keep = [&](ConstTensorView view) -> ConstTensorView {
    if (context.weight_gradients.mode() == WeightGradients::Mode::at_once) {
      const bool restarts = r.attn_starts_block || r.mlp_starts_block;
      if (!restarts) return view;
    }
    const TensorView kept = tape.temp(view.shape(), view.dtype(), "d output, kept");
    tape.run(Cast{.y = kept, .x = view});
    return kept;
  };
  tape.backward(context, [&] {
    // mlp sublayer: out = mid + y, or out = y when it starts a block (then mid is a snapshot)
    const ConstTensorView dout = keep(dcur);
    if (r.mlp_starts_block)
      tape.run(Cast{.y = dcur, .x = dbank[static_cast<std::size_t>(r.bank_size_for_mlp())]});
    tape.in(mid_);  // what is replayed for it the attention's backward reads, too
    {
      const Tape::Stage stage(tape);
      backward_sublayer(tape, channel_, dout, dcur, dbank, mid_, r.bank_size_for_mlp());
    }
    // attention sublayer: mid = cur + y, or mid = y when it starts a block (then cur is a snapshot)
    const ConstTensorView dmid = keep(dcur);
    if (r.attn_starts_block)
      tape.run(Cast{.y = dcur, .x = dbank[static_cast<std::size_t>(r.bank_size)]});
    backward_sublayer(tape, attn_, dmid, dcur, dbank, cur_in_, r.bank_size);
  });
}

}  // namespace moesaic
