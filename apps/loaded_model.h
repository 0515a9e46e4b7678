#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "apps/assembly.h"
#include "core/train/forward_plan.h"
#include "core/train/phases.h"
#include "core/train/sequence_buffers.h"

namespace moesaic::apps {

/// The phase of training that a checkpoint of `step` was saved in.
Phase phase_of_checkpoint(const config::Config& config, std::int64_t step);

/// For the user, where experts do not all fit on the device: what lies where, as lines. Else empty.
std::string text_of_tiers(const MemoryPlan& plan);

/// A trained model that only runs forward (generation, evaluation): weights of a checkpoint on a device, in the sparse or
/// dense stage of the phase they were saved in, and the memory of one window of tokens. Where they do not fit on the device,
/// experts live in host memory and in the file, if experts.offload is `full` (plan_forward()). Every call waits for its result.
class LoadedModel {
 public:
  using Window = ForwardWindow;
  struct Options {
    std::filesystem::path checkpoint;
    bool average = false;  ///< the moving averages in place of the weights
    Device device = kCpu;
    std::vector<Window> windows;  ///< of all batches that will come
    int rank = 0;                 ///< of all that have a model of their own
    int ranks_here = 1;           ///< that share the host memory of this machine
  };
  /// What the model will allocate, by what is free now. Throws MemoryShortage as plan_forward() does.
  static ForwardPlan plan(const config::Config& config, const Options& options);
  /// `plan`: of the same arguments. Throws UsageError when averages are asked for that the run did not keep, InputError for a
  /// checkpoint that does not fit.
  LoadedModel(const config::Config& config, const Options& options, const ForwardPlan& plan);
  LoadedModel(const config::Config& config, const Options& options)
      : LoadedModel(config, options, plan(config, options)) {}
  ~LoadedModel();
  LoadedModel(const LoadedModel&) = delete;
  LoadedModel& operator=(const LoadedModel&) = delete;

  /// The sum of -log p over the labels of a batch, as training computes it.
  double loss(const data::Batch& batch);
  /// log p of every label; 0 where there is none.
  std::vector<double> log_probabilities(const data::Batch& batch);
  /// Logits of the token behind position `row`; labels are not looked at.
  std::vector<double> logits(const data::Batch& batch, std::int64_t row);

  std::int64_t step() const noexcept { return step_; }
  const Precision& precision() const noexcept { return assembly_.params->precision(); }
  Device device() const noexcept { return assembly_.device; }
  /// Of offloaded experts, so far; empty where all are on the device.
  std::vector<TierCounters> counters() const;

 private:
  void add_window(const Window& window);
  void allocate(const config::Config& config, const ForwardSizes& sizes);
  void load(const Options& options);
  void use(const Window& window);
  ConstTensorView forward(const data::Batch& batch, bool with_loss);
  RunContext context(const Sequence& sequence);
  TensorView result(std::int64_t count) const;
  std::vector<double> download(const TensorView& result);

  Assembly assembly_;
  std::int64_t step_ = 0;
  std::vector<Window> windows_;
  const Window* window_ = nullptr;  // that the model is planned for
  std::unique_ptr<BackendOwner> backend_;
  std::unique_ptr<Arena> transient_;
  Buffer slot_, batch_, host_batch_, losses_, results_, host_results_;
  std::unique_ptr<SequenceBuffers> sequence_;
  std::unique_ptr<Model::MicroBatch> activations_;
  WeightGradients none_;
};

}  // namespace moesaic::apps
