#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "apps/assembly.h"
#include "core/checkpoint/checkpoint.h"

namespace moesaic::apps {

/// The step-… folder that a user means by `run`, a run.dir or a checkpoint itself; `step` 0 = the newest complete one.
/// Throws InputError that lists the steps there are.
std::filesystem::path find_checkpoint(const std::string& run, std::int64_t step);

/// A trained model that only runs forward (generation, evaluation): weights of a checkpoint on a device, in the sparse
/// or dense stage of the phase they were saved in, and the memory of one micro-batch.
class LoadedModel {
 public:
  struct Options {
    std::filesystem::path checkpoint;
    bool average = false;                        ///< the moving averages in place of the weights
    Device device = kCpu;
    std::span<const std::int64_t> window_tokens;  ///< all lengths T that forward() will see
    std::int64_t most_documents = 2;             ///< in a window
  };
  /// Throws UsageError when averages are asked for that the run did not keep.
  LoadedModel(const config::Config& config, const Options& options);
  ~LoadedModel();

  /// Enqueues the forward pass. Without sequence.targets there is no loss and losses are not touched. Returns the normalised
  /// hidden states [T, d], valid until the next call.
  ConstTensorView forward(const Sequence& sequence);
  /// Logits of one row of them: out [1, vocabulary], statistics type.
  void logits(ConstTensorView hidden_row, TensorView out);
  /// log p of each target: logp [T], statistics type, 0 where the target is kIgnoredTarget.
  void log_probabilities(ConstTensorView hidden, ConstTensorView targets, TensorView logp);

  std::int64_t step() const noexcept { return step_; }
  std::int64_t vocabulary() const noexcept { return assembly_.model->head().vocabulary(); }
  DType stats() const noexcept { return assembly_.params->precision().stats; }
  Device device() const noexcept { return assembly_.device; }
  Stream& stream() noexcept { return backend_->stream(); }

 private:
  void allocate(const config::Config& config, const Options& options);
  void load(const Options& options);
  RunContext context(const Sequence& sequence);

  Assembly assembly_;
  std::int64_t step_ = 0, window_ = 0;
  std::unique_ptr<BackendOwner> backend_;
  std::unique_ptr<Arena> transient_;
  Buffer slot_;
  std::unique_ptr<Model::MicroBatch> activations_;
  WeightGradients none_;
};

}  // namespace moesaic::apps
