#include "apps/loaded_model.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/train/phases.h"
#include "core/train/step_memory.h"

namespace moesaic::apps {
namespace {

// Nothing is kept for a backward pass.
const RecomputePolicy kKeepNothing{.all = true, .patterns = {}};

std::int64_t step_of(const std::filesystem::path& checkpoint) {
  for (const auto& info : list_checkpoints(checkpoint.parent_path())) {
    if (info.path.filename() == checkpoint.filename()) return info.step;
  }
  return 0;  // a folder that was renamed
}

}  // namespace

std::filesystem::path find_checkpoint(const std::string& run, std::int64_t step) {
  std::filesystem::path path(run);
  if (!std::filesystem::is_directory(path))
    throw InputError(fmt::format(
        "{} is not a folder; give the run.dir of a training run, or one of its step-… folders",
        run));
  if (std::filesystem::exists(path / "manifest.json")) {  // a checkpoint itself
    path = std::filesystem::absolute(path).lexically_normal();
    return path.has_filename() ? path : path.parent_path();
  }
  const auto root = path / "checkpoints";
  if (step == 0) {
    if (const auto latest = latest_checkpoint(root)) return latest->path;
    throw InputError(fmt::format(
        "{} holds no complete checkpoint; give the run.dir of a training run, or a step-… folder",
        root.string()));
  }
  std::string known;
  for (const auto& info : list_checkpoints(root)) {
    if (info.step == step) return info.path;
    known += fmt::format(" {}", info.step);
  }
  throw InputError(fmt::format("{} holds no checkpoint of step {}; there are:{}",
                               root.string(),
                               step,
                               known.empty() ? " none" : known));
}

LoadedModel::LoadedModel(const config::Config& config, const Options& options)
    : assembly_(assemble(config, false, options.device)), step_(step_of(options.checkpoint)) {
  if (options.average && !config.optimizer.ema_decay)
    throw UsageError("--average: this run kept no averages; set optimizer.ema_decay when training");
  assembly_.model->set_sparse_stage(
      phase_of(make_phases(config), std::clamp<std::int64_t>(step_, 1, config.train.steps)).sparse);
  allocate(config, options);
  load(options);
}
LoadedModel::~LoadedModel() {
  // After an exception work may still be queued that points into the memory below.
  try {
    backend_->stream().synchronize();
  } catch (...) {  // whoever cares has seen it already
  }
}

// Kernels are chosen by sizes, so that a short window may need more than a long one.
void LoadedModel::allocate(const config::Config& config, const Options& options) {
  const int threads = static_cast<int>(config.run.threads);
  StepMemory most;
  for (const std::int64_t window : options.window_tokens) {
    const StepMemory m = measure_step(*assembly_.model,
                                      *assembly_.params,
                                      nullptr,
                                      assembly_.device,
                                      threads,
                                      {.tokens = window,
                                       .step_tokens = window,
                                       .most_documents = options.most_documents,
                                       .mtp = false},
                                      kKeepNothing);
    most.scratch = std::max(most.scratch, m.scratch);
    most.transient = std::max(most.transient, m.transient);
    most.slot = std::max(most.slot, m.slot);
  }
  // A scalar beside the logits, which log_probabilities() needs and a loss does not.
  most.transient += 256;
  backend_ = std::make_unique<BackendOwner>(BackendOwner::Options{.device = assembly_.device,
                                                                  .num_threads = threads,
                                                                  .scratch_bytes = most.scratch,
                                                                  .name = "forward"});
  transient_ = std::make_unique<Arena>(most.transient, assembly_.device, "transient");
  slot_ = Buffer(most.slot, assembly_.device, "activations");
}

void LoadedModel::load(const Options& options) {
  auto tensors = weight_tensors(*assembly_.params);
  if (options.average) {
    for (StateTensor& t : tensors) {
      if (assembly_.params->find(t.name).valid() || t.name.find("experts.") != std::string::npos)
        t.name = "ema/" + t.name;
    }
  }
  load_checkpoint(options.checkpoint, tensors, false, backend_->stream());
  refresh_weights(*assembly_.params, backend_->backend());
  backend_->stream().synchronize();
}

RunContext LoadedModel::context(const Sequence& sequence) {
  return {backend_->backend(), *assembly_.params, *transient_, none_, sequence, {}, {}, false};
}

ConstTensorView LoadedModel::forward(const Sequence& sequence) {
  if (sequence.num_tokens() != window_) {
    stream().synchronize();
    window_ = sequence.num_tokens();
    assembly_.model->plan({window_}, kKeepNothing);
    activations_ = std::make_unique<Model::MicroBatch>(assembly_.model->make_micro_batch(
        slot_.view({static_cast<std::int64_t>(assembly_.model->slot_bytes())}, DType::u8)));
  }
  RunContext run = context(sequence);
  assembly_.model->forward(run, *activations_);
  return assembly_.model->final_hidden(*activations_);
}

void LoadedModel::logits(ConstTensorView hidden_row, TensorView out) {
  const Sequence none;
  RunContext run = context(none);
  assembly_.model->head().logits(run, hidden_row, out);
}

void LoadedModel::log_probabilities(ConstTensorView hidden,
                                    ConstTensorView targets,
                                    TensorView logp) {
  const Sequence none;
  RunContext run = context(none);
  assembly_.model->head().log_probabilities(run, hidden, targets, logp);
}

}  // namespace moesaic::apps
