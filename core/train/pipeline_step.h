#pragma once
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/model/model.h"
#include "core/train/step_timer.h"
#include "memory/buffer.h"
#include "parallel/pipeline/executor.h"

namespace moesaic {

/// One stage's part of a step that follows a schedule, of a pipeline or of the vertical order (one stage): lets the
/// executor walk it with the model's chunks. Each weight's gradients are added up in the order of the stage's list, so that the bits depend on the schedule alone.
class PipelineStep final : private pipeline::ChunkRunner {
 public:
  /// What layers need to run a micro-batch, with the arena and the weight gradients of a pass.
  using MakeContext = std::function<RunContext(int micro_batch, Arena&, WeightGradients&)>;
  struct Parts {
    Model* model = nullptr;  ///< of this stage, planned
    ParameterStore* params = nullptr;
    Backend* backend = nullptr;
    Communicator* comm = nullptr;  ///< the stages, in order; null for one
    Stream::Mode mode = Stream::Mode::worker;
    pipeline::Schedule schedule;
    pipeline::BundlePlan bundles;
    TensorView slots;  ///< u8 [StepMemory::slot]
    /// Memory of what is offloaded of a slot of a chunk of this stage; null: nothing is.
    std::function<std::vector<TensorView>(int chunk, int slot)> offloaded;
    Arena* transient = nullptr;  ///< of passes that leave nothing behind
    /// One for each micro-batch between the two parts of a split backward: what the second part reads stays there.
    std::vector<Arena*> deferred;
    MakeContext context;
    StepTimer* timer =
        nullptr;  ///< told what each pass is, and that messages are waited for between them
  };
  explicit PipelineStep(Parts parts);
  PipelineStep(const PipelineStep&) = delete;
  PipelineStep& operator=(const PipelineStep&) = delete;

  /// Enqueues forward and backward of all micro-batches. `gradients_final` is told what RunContext::gradients_final is told
  /// in the last backward, `forwards_done` once before, when no forward is left (in vertical order); both may be empty.
  void run(const std::function<void(StorageId)>& gradients_final,
           const std::function<void()>& forwards_done = {});
  /// Where the first and the last stage both hold the embedding's table, adds its two gradients, after the sums over the
  /// ranks of each stage: the same bits on both.
  void add_gradients_of_copies();
  /// Enqueues forward of one micro-batch through all stages; the last one adds to the losses. `piece`: of a micro-batch that
  /// layers work off in pieces, all of which come one after the other.
  void evaluate(RunContext& context, int piece = 0);
  /// Waits for the messages and rethrows what went wrong in them.
  void synchronize() {
    if (parts_.schedule.placement.stages() > 1) messages_.synchronize();
  }

 private:
  using Pair = std::pair<int, int>;  // chunk, micro-batch
  pipeline::ForwardResult forward(const pipeline::ForwardCall& call) override;
  void backward(const pipeline::BackwardCall& call) override;
  void pass_back(const pipeline::BackwardCall& call);
  void add(TensorView sum, ConstTensorView value) override;
  void make_slots();
  void make_evaluation();
  int stage() const { return parts_.comm == nullptr ? 0 : parts_.comm->rank(); }
  int last_chunk() const { return parts_.schedule.placement.num_chunks() - 1; }
  void does(StepPart part);
  int chunk_here(int chunk) const;
  Model::MicroBatch& activations(int chunk, int slot);
  void follow(int chunk, int micro_batch, int slot);
  int take_deferred(Pair pair);
  bool is_last_backward(int chunk);
  Model::Bundle receive(int chunk, Model::Bundle bundle);
  void send(int chunk, const Model::Bundle& bundle);

  Parts parts_;
  Stream messages_;
  Event ready_, exchanged_;
  pipeline::Executor executor_;
  std::vector<std::vector<Model::MicroBatch>> activations_;  // by chunk of this stage, slot
  WeightGradients at_once_;
  std::vector<std::unique_ptr<WeightGradients>> deferred_;
  std::vector<bool> deferred_in_use_;
  std::map<Pair, int> deferred_of_;
  std::function<void(StorageId)> gradients_final_;
  std::function<void()> forwards_done_;  // until it is told
  std::vector<int> backwards_left_;      // of this step, by chunk of this stage
  std::vector<std::vector<int>> slots_;  // of each micro-batch, by chunk of this stage
  StepPart part_ = StepPart::other;      // told to the timer last
  Buffer evaluation_memory_, copy_memory_;
  std::vector<TensorView> received_;       // sums, by chunk of this stage
  std::vector<TensorView> received_bank_;  // by snapshot
  TensorView gradient_of_copy_;            // the other stage's
};

}  // namespace moesaic
