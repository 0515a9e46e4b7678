#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "memory/stream.h"
#include "parallel/pipeline/bundle.h"
#include "parallel/pipeline/schedule.h"

namespace moesaic::pipeline {

struct ForwardCall {
  int chunk = 0, micro_batch = 0;
  /// Where the chunk keeps the activations of this micro-batch: 0 … Executor::slots(chunk) - 1. The same in its backward,
  /// and nobody else's in between.
  int slot = 0;
  ConstTensorView cur;                ///< incoming sum; empty for the first chunk
  std::vector<ConstTensorView> bank;  ///< the snapshots taken before the chunk
};

/// Must stay as it is until the micro-batch's backward through the chunk is over; the activation slot is a good place.
struct ForwardResult {
  ConstTensorView cur;                     ///< outgoing sum; not used of the last chunk
  std::vector<ConstTensorView> snapshots;  ///< those that the chunk took
};

struct BackwardCall {
  Work part = Work::backward;  ///< backward, backward_input or backward_weight
  int chunk = 0, micro_batch = 0, slot = 0;
  /// Holds the gradient of the outgoing sum (undefined for the last chunk, which starts it) and receives that of the
  /// incoming one (not for the first chunk). Empty for backward_weight: what that needs, backward_input keeps elsewhere.
  TensorView dcur;
  /// One accumulator for each snapshot that exists after the chunk, to be added to. Those of the snapshots that the chunk
  /// took are complete, but for its own part. Empty for backward_weight.
  std::vector<TensorView> dbank;
};

/// The model, as far as a schedule sees it. Each call enqueues work on the computing stream and returns.
class ChunkRunner {
 public:
  virtual ~ChunkRunner() = default;
  virtual ForwardResult forward(const ForwardCall& call) = 0;
  virtual void backward(const BackwardCall& call) = 0;
  /// sum += value, two gradients of a snapshot.
  virtual void add(TensorView sum, ConstTensorView value) = 0;
};

/// Walks one rank's list of a schedule, step after step: calls the model and exchanges bundles, each on its own stream and
/// waiting for just what it needs, so that messages travel beside the computing.
///
/// Owns what is received and the gradients in transit. Gradients of a micro-batch are the same as without a pipeline, to
/// the bit, but for those that snapshots give where a rank holds several chunks: it adds up its own chunks' parts first.
class Executor {
 public:
  /// `comm`: the ranks of the pipeline, in order; null for one stage. All arguments must outlive the executor. Bundles are
  /// on the device of the streams. The schedule must pass validate(). Allocates bytes() here, and nothing later; what the streams still have to do when it is destroyed
  /// must not concern it.
  Executor(const Schedule& schedule,
           const BundlePlan& bundles,
           Communicator* comm,
           Stream& computing,
           Stream& messages);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// What a rank will need, without its communicator.
  struct Needs {
    std::vector<int> slots;  ///< by chunk of the model; 0 for those of other ranks
    std::vector<int>
        slot_of_action;     ///< where each action of the rank's list finds activations; -1: none
    std::size_t bytes = 0;  ///< as bytes()
  };
  static Needs needs(const Schedule& schedule, const BundlePlan& bundles, int rank);

  /// Activation slots that a chunk of this rank needs.
  int slots(int chunk) const;
  /// Bytes of the bundles that this rank receives and of the gradients that it sends.
  std::size_t bytes() const noexcept;

  /// Enqueues a step. What the model throws passes through; the executor is of no use then.
  void run(ChunkRunner& model);

 private:
  struct Walk;
  std::unique_ptr<Walk> walk_;
};

}  // namespace moesaic::pipeline
