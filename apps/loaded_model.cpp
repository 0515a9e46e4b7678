#include "apps/loaded_model.h"

#include <algorithm>
#include <set>
#include <string>

#include <fmt/format.h>

#include "apps/host_memory.h"
#include "core/checkpoint/checkpoint.h"
#include "core/checkpoint/manifest.h"
#include "memory/device_hooks.h"

namespace moesaic::apps {
namespace {

// Nothing is kept for a backward pass.
const RecomputePolicy kKeepNothing{.all = true, .patterns = {}};

// The averages of parameters; what is no parameter (router bias, statistics) has none.
void take_averages(const ParameterStore& params, std::vector<StateTensor>& tensors) {
  std::set<std::string> averaged;
  for (std::size_t i = 0; i < params.params().size(); ++i) {
    const ParamId id{static_cast<std::int32_t>(i)};
    for (std::int64_t e = 0; e < std::max<std::int64_t>(1, params.params()[i].members); ++e)
      averaged.insert(params.member_name(id, e));
  }
  for (StateTensor& t : tensors) {
    if (averaged.contains(t.name)) t.name = "ema/" + t.name;
  }
}

}  // namespace

Phase phase_of_checkpoint(const config::Config& config, std::int64_t step) {
  return phase_of(make_phases(config), std::clamp<std::int64_t>(step, 1, config.train.steps));
}

std::string text_of_tiers(const MemoryPlan& plan) {
  if (!plan.tiers) return "";
  return "memory     experts do not all fit on the device (experts.offload: full)\n" + plan.table();
}

ForwardPlan LoadedModel::plan(const config::Config& config, const Options& options) {
  const bool on_gpu = options.device.kind == Device::Kind::cuda;
  MemoryLimits limits;
  if (on_gpu) limits.device_free = cuda::device_memory(options.device).free;
  if (config.experts.offload == config::ExpertOffload::full && !config.memory.host_budget) {
    if (const auto available = available_host_memory())
      limits.host = *available / static_cast<std::uint64_t>(std::max(1, options.ranks_here));
  }
  const Phase phase = phase_of_checkpoint(config, read_manifest(options.checkpoint).step);
  return plan_forward({.config = config,
                       .device = options.device,
                       .precision = forward_precision(config, on_gpu),
                       .sparse = phase.sparse,
                       .windows = options.windows,
                       .rank = options.rank},
                      limits);
}

LoadedModel::LoadedModel(const config::Config& config,
                         const Options& options,
                         const ForwardPlan& plan)
    : assembly_(assemble(config, false, options.device, {}, plan.memory.tiers)),
      step_(read_manifest(options.checkpoint).step) {
  if (options.average && !config.optimizer.ema_decay)
    throw UsageError("--average: this run kept no averages; set optimizer.ema_decay when training");
  assembly_.model->set_sparse_stage(phase_of_checkpoint(config, step_).sparse);
  for (const Window& window : options.windows)
    add_window(window);
  allocate(config, plan.sizes);
  load(options);
  if (ExpertTiers* tiers = assembly_.params->tiers())
    tiers->set_schedule(forward_visits(*assembly_.model), tiers::Updates::none);
}

LoadedModel::~LoadedModel() {
  // After an exception work may still be queued that points into the memory below.
  try {
    backend_->stream().synchronize();
  } catch (...) {  // whoever cares has seen it already
  }
}

// Windows are told apart by their number of tokens.
void LoadedModel::add_window(const Window& window) {
  MOESAIC_CHECK(window.tokens >= 1 && window.longest >= 1, "a window without tokens");
  for (Window& known : windows_) {
    if (known.tokens != window.tokens) continue;
    known.longest = std::max(known.longest, window.longest);
    known.documents = std::max(known.documents, window.documents);
    return;
  }
  windows_.push_back(window);
}

void LoadedModel::allocate(const config::Config& config, const ForwardSizes& sizes) {
  backend_ = std::make_unique<BackendOwner>(
      BackendOwner::Options{.device = device(),
                            .num_threads = static_cast<int>(config.run.threads),
                            .scratch_bytes = sizes.scratch,
                            .name = "forward"});
  transient_ = std::make_unique<Arena>(sizes.transient, device(), "transient");
  slot_ = Buffer(sizes.slot, device(), "activations");
  const Shape words{static_cast<std::int64_t>(sizes.batch / 4)};
  batch_ = Buffer(sizes.batch, device(), "batch");
  host_batch_ = make_host_buffer(sizes.batch, device(), "batch, host");
  sequence_ = std::make_unique<SequenceBuffers>(
      sizes.tokens, host_batch_.view(words, DType::i32), batch_.view(words, DType::i32), false);
  losses_ = Buffer(sizes.losses, device(), "losses");
  results_ = Buffer(sizes.results, device(), "results");
  host_results_ = make_host_buffer(sizes.results, device(), "results, host");
}

void LoadedModel::load(const Options& options) {
  auto tensors = weight_tensors(*assembly_.params);
  if (options.average) take_averages(*assembly_.params, tensors);
  load_checkpoint(options.checkpoint, tensors, false, backend_->stream());
  backend_->stream().synchronize();
}

void LoadedModel::use(const Window& window) {
  if (window_ == &window) return;
  window_ = &window;
  assembly_.model->plan({window.tokens, window.longest}, kKeepNothing);
  activations_ = std::make_unique<Model::MicroBatch>(assembly_.model->make_micro_batch(
      slot_.view({static_cast<std::int64_t>(assembly_.model->slot_bytes())}, DType::u8)));
}

RunContext LoadedModel::context(const Sequence& sequence) {
  return {.backend = backend_->backend(),
          .params = *assembly_.params,
          .transient = *transient_,
          .weight_gradients = none_,
          .sequence = sequence,
          .step_scalars = {},
          .losses = losses_.view({kNumLosses}, precision().stats),
          .training = false,
          .gradients_final = {},
          .is_scheduled = true};
}

// Enqueues; returns the normalised hidden states [T, d].
ConstTensorView LoadedModel::forward(const data::Batch& batch, bool with_loss) {
  const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
  const auto window = std::find_if(
      windows_.begin(), windows_.end(), [&](const Window& w) { return w.tokens == tokens; });
  MOESAIC_CHECK(window != windows_.end(), fmt::format("no window has {} tokens", tokens));
  MOESAIC_CHECK(static_cast<std::int64_t>(batch.cu.size()) - 1 <= window->documents,
                "more documents than memory was measured for");
  use(*window);
  sequence_->load(batch, backend_->stream());
  Sequence sequence = sequence_->sequence();
  if (!with_loss) sequence.targets = {};
  RunContext run = context(sequence);
  assembly_.model->forward(run, *activations_);
  return assembly_.model->final_hidden(*activations_);
}

std::vector<TierCounters> LoadedModel::counters() const {
  const ExpertTiers* tiers = assembly_.params->tiers();
  return tiers != nullptr ? tiers->counters() : std::vector<TierCounters>();
}

TensorView LoadedModel::result(std::int64_t count) const {
  return results_.view({count}, precision().stats);
}

std::vector<double> LoadedModel::download(const TensorView& result) {
  const TensorView host = host_results_.view(result.shape(), result.dtype());
  copy_tensor(host, result, backend_->stream());
  backend_->stream().synchronize();
  std::vector<double> values(static_cast<std::size_t>(result.numel()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = host.dtype() == DType::f64 ? host.as<double>()[i]
                                           : static_cast<double>(host.as<float>()[i]);
  return values;
}

double LoadedModel::loss(const data::Batch& batch) {
  const TensorView losses = losses_.view({kNumLosses}, precision().stats);
  zero_tensor(losses, backend_->stream());
  forward(batch, true);
  return download(loss_slot(losses, Loss::cross_entropy)).front();
}

std::vector<double> LoadedModel::log_probabilities(const data::Batch& batch) {
  const ConstTensorView hidden = forward(batch, false);
  const TensorView logp = result(hidden.dim(0));
  const Sequence none;
  RunContext run = context(none);
  assembly_.model->head().log_probabilities(run, hidden, sequence_->sequence().targets, logp);
  return download(logp);
}

std::vector<double> LoadedModel::logits(const data::Batch& batch, std::int64_t row) {
  const ConstTensorView hidden = forward(batch, false);
  const TensorView logits = result(assembly_.model->head().vocabulary());
  const Sequence none;
  RunContext run = context(none);
  assembly_.model->head().logits(
      run, hidden.rows(row, row + 1), logits.reshaped({1, logits.numel()}));
  return download(logits);
}

}  // namespace moesaic::apps
