#include "core/train/optimizer.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "kernels/ops/adamw.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/guard.h"
#include "kernels/ops/member_scalars.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/qk_clip.h"

namespace moesaic {
namespace {
constexpr std::int64_t kAlignElements = 64;
std::int64_t aligned(std::int64_t n) {
  return (n + kAlignElements - 1) / kAlignElements * kAlignElements;
}
ParamId id_of(std::size_t i) {
  return {static_cast<std::int32_t>(i)};
}
std::int64_t members_of(const ParameterSpec& spec) {
  return std::max<std::int64_t>(1, spec.members);
}
}  // namespace

Optimizer::Optimizer(ParameterStore& params, const OptimizerOptions& options)
    : params_(params), options_(options) {
  const DType master = params.precision().master;
  std::int64_t elements = 0, num_partials = 0;
  entries_.resize(params.params().size());
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParameterSpec& spec = params.params()[i];
    Entry& e = entries_[i];
    e.trained = params.ever_trained(id_of(i));
    e.muon = options.muon && spec.matrix;
    if (e.trained) {
      elements += aligned(spec.count()) * (e.muon ? 1 : 2);
      num_partials += members_of(spec);
    }
    if (options.ema_decay) elements += aligned(spec.count());
  }
  const auto bytes = static_cast<std::size_t>(elements) * byte_size(master);
  memory_ = params.allocate(bytes, "optimizer state");
  std::int64_t at = 0;
  const TensorView all = memory_.view({elements}, master);
  const auto take = [&](std::int64_t n) {
    const TensorView view = all.rows(at, at + n);
    at += aligned(n);
    return view;
  };
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    const std::int64_t n = params.params()[i].count();
    if (e.trained && e.muon) e.momentum = take(n);
    if (e.trained && !e.muon) {
      e.m = take(n);
      e.v = take(n);
    }
    if (options.ema_decay) e.average = take(n);
  }
  // Phases may freeze any sets of parameters: no two need have been updated equally often.
  const auto max_groups = std::max<std::int64_t>(1, static_cast<std::int64_t>(entries_.size()));
  const std::size_t scalar_bytes =
      static_cast<std::size_t>(max_groups * kNumStepScalars) * byte_size(master);
  small_ = params.allocate(
      (scalar_bytes + 63) / 64 * 64 + static_cast<std::size_t>(num_partials + 1) * 8,
      "step scalars");
  scalars_ = small_.view({max_groups, kNumStepScalars}, master);
  partials_ = small_.view({num_partials}, DType::f64, (scalar_bytes + 63) / 64 * 64 + 8);
  norm_ = small_.view({1}, DType::f64, (scalar_bytes + 63) / 64 * 64);
  host_ = make_host_buffer(scalar_bytes + 64, params.device(), "step scalars, host");
  host_scalars_ = host_.view({max_groups, kNumStepScalars}, master);
  host_norm_ = host_.view({1}, DType::f64, scalar_bytes / 8 * 8);
  group_updates_ = {0};
  clear_state();
  if (!options.skip_untouched) return;
  std::int64_t most = 0;
  for (const ParameterSpec& spec : params.params())
    most = std::max(most, spec.use_counts.valid() ? spec.members : 0);
  if (most == 0) return;
  member_memory_ = params.allocate(
      static_cast<std::size_t>(most * kNumStepScalars) * byte_size(master), "step scalars");
  member_scalars_ = member_memory_.view({most, kNumStepScalars}, master);
}

// Device memory starts with anything.
void Optimizer::clear_state() {
  Stream stream(params_.device(),
                "optimizer state",
                params_.is_pretend() ? Stream::Mode::dry : Stream::Mode::immediate);
  if (memory_.bytes() > 0)
    zero_tensor(memory_.view({static_cast<std::int64_t>(memory_.bytes())}, DType::u8), stream);
  if (!params_.is_pretend()) stream.synchronize();
}

std::vector<MemoryUse> Optimizer::memory_use() const {
  return {{"optimizer state", memory_.bytes()},
          {"step scalars", small_.bytes() + member_memory_.bytes()}};
}

TensorView Optimizer::member_of(const TensorView& all, ParamId id, std::int64_t member) const {
  if (all.empty()) return {};
  const ParameterSpec& spec = params_.params()[static_cast<std::size_t>(id.index)];
  const std::int64_t n = spec.shape.numel();
  return all.rows(member * n, (member + 1) * n).reshaped(spec.shape);
}

// Parameters that were updated as often share their bias corrections.
void Optimizer::assign_groups() {
  group_updates_.clear();
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    Entry& e = entries_[i];
    if (!e.trained || params_.frozen(id_of(i))) continue;
    auto it = std::find(group_updates_.begin(), group_updates_.end(), e.updates);
    if (it == group_updates_.end()) {
      it = group_updates_.insert(group_updates_.end(), e.updates);
    }
    e.group = static_cast<int>(it - group_updates_.begin());
  }
  if (group_updates_.empty()) group_updates_ = {0};
}

void Optimizer::begin_step(StepScalars values, Stream& stream) {
  assign_groups();
  for (std::size_t g = 0; g < group_updates_.size(); ++g) {
    const auto t = static_cast<double>(group_updates_[g] + 1);
    values.bias_correction1 = bias_correction(options_.beta1, t);
    values.bias_correction2 = bias_correction(options_.beta2, t);
    const auto row = static_cast<std::int64_t>(g);
    values.write(host_scalars_.rows(row, row + 1).reshaped({kNumStepScalars}));
  }
  const auto rows = static_cast<std::int64_t>(group_updates_.size());
  copy_tensor(scalars_.rows(0, rows), host_scalars_.rows(0, rows), stream);
}

void Optimizer::clip(Backend& backend, ConstTensorView guarded) {
  std::int64_t slot = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].trained) continue;
    for (std::int64_t e = 0; e < members_of(params_.params()[i]); ++e, ++slot) {
      const TensorView partial = partials_.rows(slot, slot + 1);
      const TensorView grad = params_.gradient(id_of(i), e);
      if (grad.empty()) {
        run(backend, Fill{.y = partial, .value = 0.0});
      } else {
        run(backend, SumOfSquares{.partials = partial, .x = grad});
      }
    }
  }
  run(backend,
      ClipFactor{.scalars = scalars(),
                 .norm = norm_,
                 .partials = partials_,
                 .limit = options_.clip_grad_norm});
  run(backend, GuardFinite{.scalars = scalars(), .values = guarded});
  // The other groups differ in their bias corrections only.
  for (std::size_t g = 1; g < group_updates_.size(); ++g) {
    for (const StepScalar s : {StepScalar::clip_factor, StepScalar::skip}) {
      const auto row = static_cast<std::int64_t>(g);
      const TensorView to = scalars_.rows(row, row + 1)
                                .reshaped({kNumStepScalars})
                                .rows(index_of(s), index_of(s) + 1);
      copy_tensor(to, scalars().rows(index_of(s), index_of(s) + 1), stream_of(backend));
    }
  }
}

void Optimizer::update_family(Backend& backend, ParamId id) {
  const ParameterSpec& spec = params_.params()[static_cast<std::size_t>(id.index)];
  const std::int64_t group = entries_[static_cast<std::size_t>(id.index)].group,
                     members = members_of(spec);
  const ConstTensorView scalars = scalars_.rows(group, group + 1).reshaped({kNumStepScalars});
  const bool by_use = !member_scalars_.empty() && spec.use_counts.valid();
  if (by_use)
    run(backend,
        MemberScalars{.rows = member_scalars_.rows(0, members),
                      .scalars = scalars,
                      .counts = params_.buffer(spec.use_counts)});
  for (std::int64_t e = 0; e < members; ++e) {
    update_one(backend,
               id,
               e,
               by_use ? member_scalars_.rows(e, e + 1).reshaped({kNumStepScalars}) : scalars);
  }
}

void Optimizer::update_one(Backend& backend,
                           ParamId id,
                           std::int64_t member,
                           ConstTensorView scalars) {
  const Entry& e = entries_[static_cast<std::size_t>(id.index)];
  const ParameterSpec& spec = params_.params()[static_cast<std::size_t>(id.index)];
  const TensorView master = params_.master(id, member);
  const TensorView compute =
      params_.masters_are_weights(id) ? TensorView() : params_.weight(id, member);
  const double decay = spec.decay ? options_.weight_decay : 0.0;
  if (e.muon) {
    MuonUpdate op{.w = master,
                  .momentum = member_of(e.momentum, id, member),
                  .w_compute = compute,
                  .dw = params_.gradient(id, member),
                  .scalars = scalars,
                  .blocks = {},
                  .lr_scale = e.lr_scale,
                  .weight_decay = decay,
                  .mu = options_.muon_momentum,
                  .nesterov = options_.muon_nesterov,
                  .num_iterations = options_.ns_steps};
    if (options_.muon_per_head) {
      for (const RowRange& r : spec.blocks)
        op.blocks.push_back({r.begin, r.end});
    }
    run(backend, op);
    return;
  }
  run(backend,
      AdamW{.w = master,
            .m = member_of(e.m, id, member),
            .v = member_of(e.v, id, member),
            .w_compute = compute,
            .dw = params_.gradient(id, member),
            .scalars = scalars,
            .lr_scale = e.lr_scale,
            .weight_decay = decay,
            .beta1 = options_.beta1,
            .beta2 = options_.beta2,
            .eps = options_.eps});
}

void Optimizer::update(Backend& backend) {
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParamId id = id_of(i);
    if (entries_[i].trained && !params_.frozen(id)) update_family(backend, id);
  }
}

void Optimizer::average(Backend& backend) {
  if (!options_.ema_decay) return;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParamId id = id_of(i);
    for (std::int64_t e = 0; e < members_of(params_.params()[i]); ++e) {
      // The first average is the weight itself.
      run(backend,
          MovingAverage{.average = member_of(entries_[i].average, id, e),
                        .w = params_.master(id, e),
                        .scalars = scalars(),
                        .decay = updates_ == 0 ? 0.0 : *options_.ema_decay});
    }
  }
}

void Optimizer::qk_clip(Backend& backend, const std::vector<MlaAttention*>& layers) {
  if (!options_.qk_clip_tau) return;
  for (MlaAttention* layer : layers) {
    const ParamId q = params_.find(layer->query_matrix()),
                  kv = params_.find(layer->key_value_matrix());
    if (params_.frozen(q) || params_.frozen(kv)) continue;  // a frozen weight keeps its bits
    const auto& o = layer->options();
    run(backend,
        QkClip{.q_weight = params_.master(q, 0),
               .kv_b_weight = params_.master(kv, 0),
               .max_logit = params_.buffer(layer->max_logit()),
               .skip = step_scalar(scalars(), StepScalar::skip),
               .dn = o.qk_nope_dim,
               .dr = o.qk_rope_dim,
               .dv = o.v_dim,
               .tau = *options_.qk_clip_tau});
    for (const ParamId id : {q, kv}) {
      if (!params_.masters_are_weights(id))
        run(backend, Cast{.y = params_.weight(id, 0), .x = params_.master(id, 0)});
    }
  }
}

void Optimizer::download_outcome(Stream& stream) {
  copy_tensor(host_scalars_, scalars_, stream);
  copy_tensor(host_norm_, norm_, stream);
}

Optimizer::Outcome Optimizer::outcome() const {
  const int skip = index_of(StepScalar::skip);
  const double flag = host_scalars_.dtype() == DType::f64
                          ? host_scalars_.as<double>()[skip]
                          : static_cast<double>(host_scalars_.as<float>()[skip]);
  return {host_norm_.as<double>()[0], flag != 0.0};
}

Optimizer::Outcome Optimizer::read_outcome(Stream& stream) {
  download_outcome(stream);
  stream.synchronize();
  return outcome();
}

void Optimizer::end_step(const Outcome& outcome) {
  if (outcome.skipped) return;
  ++updates_;
  for (std::size_t i = 0; i < entries_.size(); ++i)
    entries_[i].updates += entries_[i].trained && !params_.frozen(id_of(i)) ? 1 : 0;
}

std::vector<StateTensor> Optimizer::state() const {
  std::vector<StateTensor> all;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const ParamId id = id_of(i);
    const Entry& e = entries_[i];
    for (std::int64_t k = 0; k < members_of(params_.params()[i]); ++k) {
      const std::string name = params_.member_name(id, k);
      const auto add = [&](const char* kind, const TensorView& view) {
        if (!view.empty()) all.push_back({kind + name, member_of(view, id, k)});
      };
      add("optimizer/m/", e.m);
      add("optimizer/v/", e.v);
      add("optimizer/momentum/", e.momentum);
      add("ema/", e.average);
    }
  }
  return all;
}

void Optimizer::save_counters(StateValues& values) const {
  values.integers["optimizer.updates"] = updates_;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    // Only what differs from the rule: parameters that were frozen in some of the updates.
    if (entries_[i].trained && entries_[i].updates != updates_)
      values.integers["optimizer.updates_of." + params_.params()[i].name] = entries_[i].updates;
  }
}

void Optimizer::load_counters(const StateValues& values) {
  const auto it = values.integers.find("optimizer.updates");
  if (it == values.integers.end())
    throw InputError("the checkpoint's manifest holds no optimizer.updates");
  updates_ = it->second;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const auto own = values.integers.find("optimizer.updates_of." + params_.params()[i].name);
    entries_[i].updates =
        own == values.integers.end() ? (entries_[i].trained ? updates_ : 0) : own->second;
  }
}

}  // namespace moesaic
