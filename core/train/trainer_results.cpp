// What a step reports, and what follows from it: losses, loads of experts, times of exchanges.
#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/train/host_value.h"
#include "core/train/trainer.h"

namespace moesaic {
namespace {

// What lies one behind the other in host memory begins at multiples of 8 bytes.
std::size_t padded(std::size_t bytes) {
  return (bytes + 7) / 8 * 8;
}
}  // namespace

// It comes back in one go: the losses, then counts and bias of the experts.
void Trainer::allocate_results() {
  std::size_t bytes = kNumLosses * 8;
  for (const auto& named : parts_.model->moe_layers())
    bytes += padded(parts_.params->buffer(named.moe->counts()).bytes()) +
             padded(parts_.params->buffer(named.moe->bias()).bytes());
  host_results_ = make_host_buffer(bytes, parts_.device, "results, host");
}

// The step's one wait of the host: everything that it reports is copied first.
void Trainer::read_results(StepStats& stats, const StepScalars& scalars) {
  Stream& stream = backend_->stream();
  const TensorView host = host_losses();
  copy_tensor(host, losses_, stream);
  const std::vector<HostExperts> experts = download_experts(reports_experts(step_ + 1));
  parts_.optimizer->download_outcome(stream);
  stream.synchronize();
  if (reduction_) reduction_->synchronize();
  if (pipeline_) pipeline_->synchronize();
  if (exchange_side_) exchange_side_->stream().synchronize();
  const Optimizer::Outcome outcome = parts_.optimizer->outcome();
  if (outcome.half_made) refuse_half_made(host, outcome.grad_norm);
  parts_.optimizer->end_step(outcome);
  const auto loss = [&](Loss which) { return host_value(host, static_cast<int>(which)); };
  stats.loss = loss(Loss::cross_entropy) / scalars.loss_divisor;
  stats.mtp_loss = loss(Loss::mtp) / scalars.mtp_divisor;
  stats.indexer_kl = loss(Loss::indexer_kl) / scalars.tokens;
  stats.balance_loss = loss(Loss::balance);
  stats.router_z = loss(Loss::router_z);
  stats.grad_norm = outcome.grad_norm;
  stats.skipped = outcome.skipped;
  stats.learning_rate = scalars.learning_rate;
  stats.tokens = static_cast<std::int64_t>(scalars.tokens);
  stats.experts = of_all_stages(expert_loads(experts));
  for (std::size_t l = 0; placer_ && !outcome.skipped && l < experts.size(); ++l)
    placer_->count(l, experts[l].tokens, stream);
  if (exchange_meter_.is_on()) stats.exchange = of_all_stages(exchange_times());
  bad_steps_ = outcome.skipped ? bad_steps_ + 1 : 0;
  skipped_total_ += outcome.skipped ? 1 : 0;
}

// The updates of some experts were made, those of the others and of all that does not lie in tiers were not.
void Trainer::refuse_half_made(ConstTensorView losses, double grad_norm) const {
  bool is_finite = true;
  for (int i = 0; i < kNumLosses; ++i)
    is_finite = is_finite && std::isfinite(host_value(losses, i));
  throw NumericsError(fmt::format(
      "step {}: {}, and experts.update: in_backward had updated experts by then, so that the step "
      "can neither be made nor skipped; nothing of it was saved. Continue from the last checkpoint "
      "with experts.update=after_step, which skips such a step, or with a lower optimizer.lr",
      step_ + 1,
      is_finite ? fmt::format("the norm of the gradients is not finite ({})", grad_norm)
                : "a loss that backward adds to is not finite"));
}

TensorView Trainer::host_losses() const {
  return host_results_.view({kNumLosses}, losses_.dtype());
}

bool Trainer::reports_experts(std::int64_t step) const {
  const auto& log = parts_.config->log;
  return (log.expert_every > 0 && step % log.expert_every == 0) ||
         (log.detail_every > 0 && step % log.detail_every == 0);
}

// Enqueues the copies of a mixture's counts and, in steps that report them, of its router's bias.
std::vector<Trainer::HostExperts> Trainer::download_experts(bool with_bias) {
  std::vector<HostExperts> all;
  std::size_t at = kNumLosses * 8;
  const auto download = [&](BufferId id) {
    const TensorView from = parts_.params->buffer(id);
    const TensorView to = host_results_.view(from.shape(), from.dtype(), at);
    copy_tensor(to, from, backend_->stream());
    at += padded(from.bytes());
    return to;
  };
  for (const auto& named : parts_.model->moe_layers()) {
    HostExperts& layer = all.emplace_back();
    layer.tokens = download(named.moe->counts());
    if (with_bias) layer.bias = download(named.moe->bias());
  }
  return all;
}

std::vector<ExpertLoad> Trainer::expert_loads(const std::vector<HostExperts>& experts) {
  std::vector<ExpertLoad> loads;
  const auto layers = parts_.model->moe_layers();
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const HostExperts& host = experts[l];
    const auto* tokens = host.tokens.as<std::int64_t>();
    ExpertLoad load = expert_load({tokens, tokens + host.tokens.numel()});
    load.layer = layers[l].layer;
    if (const int ranks = parts_.params->position().extent(Axis::ep); ranks > 1) {
      const PlacesId id = layers[l].moe->places();
      const auto places = parts_.params->places(id);
      const ExpertCopies& copies = parts_.params->copies(id);
      add_ranks(load,
                copies.slots > 0 ? copies : no_copies({places.begin(), places.end()}, ranks, 0));
    }
    if (exchange_ != nullptr && exchange_->may_take_passes())
      load.further_passes = layers[l].moe->further_passes() - passes_before_[l];
    if (host.bias.empty()) {
      load.tokens.clear();
      load.rank_tokens.clear();
    } else {
      for (std::int64_t e = 0; e < host.bias.numel(); ++e) {
        const double bias = host_value(host.bias, e);
        load.bias_min = std::min(load.bias_min.value_or(bias), bias);
        load.bias_max = std::max(load.bias_max.value_or(bias), bias);
      }
    }
    loads.push_back(std::move(load));
  }
  return loads;
}

std::vector<LayerExchange> Trainer::exchange_times() {
  const auto layers = parts_.model->moe_layers();
  std::vector<LayerExchange> times;
  for (ExchangeUse& use : exchange_meter_.end()) {
    const auto way = [&](ExchangeWay w) {
      const ExchangeUse::Way& of = use.of(w);
      return LayerExchange::Way{of.seconds, of.exposed, of.bytes, of.network_bytes};
    };
    const auto at = std::find_if(layers.begin(), layers.end(), [&](const auto& named) {
      return named.moe->name() == use.label;
    });
    MOESAIC_CHECK(at != layers.end(), "an exchange of no layer: " + use.label);
    times.push_back({at->layer, way(ExchangeWay::dispatch), way(ExchangeWay::combine)});
  }
  return times;
}

template <class Value>
std::vector<Value> Trainer::of_all_stages(std::vector<Value> own) const {
  if (!is_pipelined()) return own;
  std::vector<Value> all;
  const std::string bytes(reinterpret_cast<const char*>(own.data()), own.size() * sizeof(Value));
  for (const std::string& from : stages()->all_gather_host(bytes)) {
    const std::size_t before = all.size();
    all.resize(before + from.size() / sizeof(Value));
    std::copy_n(from.data(), from.size(), reinterpret_cast<char*>(all.data() + before));
  }
  std::stable_sort(
      all.begin(), all.end(), [](const auto& a, const auto& b) { return a.layer < b.layer; });
  return all;
}

// Every stage knows its own layers; all of them get the list in the order of the model.
std::vector<ExpertLoad> Trainer::of_all_stages(std::vector<ExpertLoad> own) const {
  if (!is_pipelined()) return own;
  std::string bytes;
  for (const ExpertLoad& load : own)
    write_expert_load(bytes, load);
  std::vector<ExpertLoad> all;
  for (const std::string& from : stages()->all_gather_host(bytes)) {
    for (std::size_t at = 0; at < from.size();)
      all.push_back(read_expert_load(from, at));
  }
  std::stable_sort(
      all.begin(), all.end(), [](const auto& a, const auto& b) { return a.layer < b.layer; });
  return all;
}

void Trainer::place_experts(StepStats& stats) {
  if (!placer_ || step_ % parts_.config->experts.place_every != 0) return;
  stats.moved = of_all_stages(placer_->place(step_, backend_->stream()));
  if (copier_) copier_->send_weights(backend_->stream());
}

}  // namespace moesaic
