#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/data/blend.h"
#include "core/data/dataset.h"
#include "core/model/model.h"
#include "core/nn/losses.h"
#include "core/train/activation_offload.h"
#include "core/train/batch_counts.h"
#include "core/train/evaluation.h"
#include "core/train/expert_copier.h"
#include "core/train/expert_exchange.h"
#include "core/train/expert_placer.h"
#include "core/train/expert_updates.h"
#include "core/train/gradient_reduction.h"
#include "core/train/member_reduction.h"
#include "core/train/optimizer.h"
#include "core/train/phases.h"
#include "core/train/pipeline_step.h"
#include "core/train/run_sink.h"
#include "core/train/sequence_buffers.h"
#include "core/train/step_memory.h"
#include "core/train/step_record.h"
#include "core/train/step_timer.h"
#include "core/train/token_groups.h"
#include "kernels/backend.h"
#include "parallel/mesh.h"

namespace moesaic {

/// What a step did, on all ranks alike.
struct StepStats {
  std::int64_t step = 0;
  double loss = 0;  ///< cross-entropy, nats per token
  double mtp_loss = 0, indexer_kl = 0, balance_loss = 0, router_z = 0;
  double grad_norm = 0;  ///< before clipping
  double learning_rate = 0;
  double seconds = 0;
  StepSeconds parts;        ///< of this rank
  std::int64_t tokens = 0;  ///< of the global batch
  bool skipped = false;     ///< not finite: nothing but position and learning rate moved on
  std::vector<ExpertLoad> experts;
  std::vector<LayerExchange> exchange;  ///< of this rank, in steps with details
  std::vector<ExpertsMoved> moved;      ///< after the step, by experts.place_every
  /// Bytes of activations that this rank copied to host memory and back.
  std::int64_t activations_out = 0, activations_in = 0;
  std::optional<ExpertReplays> replays;  ///< of this rank, since the step before
};

/// What a data set has given to the steps so far.
struct DataUse {
  std::string name;
  double share = 0;  ///< of the samples, as the weights ask
  std::int64_t samples = 0, tokens = 0;
  double epochs = 0;  ///< windows drawn / windows of an epoch, added up over the phases
};

/// Drives the parts it is given; owns the loop's memory (slots, arenas) and nothing else. Along the data-parallel axis of
/// the mesh each rank computes its share of the global batch; gradients, losses and balancing statistics are
/// summed in rank order, every loss is divided by counts of the whole global batch.
class Trainer {
 public:
  struct Parts {
    const config::Config* config = nullptr;
    const Mesh* mesh = nullptr;  ///< null: one rank
    int ranks_per_node = 0;      ///< consecutive ranks that share a node; 0 = all
    ParameterStore* params =
        nullptr;  ///< sealed and initialised, for this rank's position in the mesh
    Model* model = nullptr;
    Optimizer* optimizer = nullptr;
    data::Blend train;
    std::shared_ptr<const data::TokenSource> valid;  ///< may be null
    Device device = kCpu;
    RecomputePolicy recompute;
    Stream::Mode stream_mode = Stream::Mode::worker;
    KernelPath path = KernelPath::automatic;   ///< CUDA only; for comparisons
    offload::Disturbance offload_disturbance;  ///< for tests
  };
  explicit Trainer(Parts parts);
  ~Trainer();

  std::int64_t steps_done() const noexcept { return step_; }
  std::int64_t consecutive_bad_steps() const noexcept { return bad_steps_; }
  /// One update of the whole global batch.
  StepStats step();
  /// The same, unless a rank has a wish above 0: then no rank does a step. `stop_wish`: in, this rank's; out, the highest
  /// of all ranks. The wish travels with the counts of the batch and costs no exchange of its own.
  std::optional<StepStats> step_unless_stopped(std::int64_t& stop_wish);
  /// The first half of step(): forward and backward of the whole global batch and the sums over ranks, after which the
  /// store holds the gradients, but for those of experts that were updated in the backward. For tests and comparisons of layouts; finish_step() is the other half.
  void accumulate_gradients();
  StepStats finish_step();
  /// Cross-entropy on the fixed validation windows, the same ones every time; `whole`: on all windows of the text. Its bits
  /// do not depend on the number of ranks (evaluate_windows()). `progress` counts the batches of this rank.
  EvalStats evaluate(bool whole = false, Progress* progress = nullptr);

  /// All persistent tensors of this rank, and the values of the run. load_values() comes after the tensors were filled.
  std::vector<StateTensor> state() const;
  /// Those of them that this rank writes: every tensor, or piece of one, is written by one rank.
  std::vector<StateTensor> owned_state() const;
  /// Names, types and whole shapes of what all ranks hold together, in memory that is not there.
  std::vector<StateTensor> state_of_all_ranks() const;
  /// Whether some rank holds what another does not.
  bool is_split() const;
  /// Those of the model: parameters, and buffers that are stored like them (router biases).
  std::vector<StateTensor> weights() const;
  /// With a pipeline all ranks call it together.
  StateValues values() const;
  void load_values(const StateValues& values);
  /// After weights() alone were filled, at step 0: what is derived from them follows.
  void weights_were_loaded();
  Stream& stream() noexcept { return backend_->stream(); }
  const StepMemory& memory() const noexcept { return memory_; }
  /// Bytes of activations that a step copies to host memory, and as many back or more.
  struct OffloadTraffic {
    std::size_t out = 0, in = 0;
  };
  OffloadTraffic offload_traffic() const;
  std::int64_t tokens_seen() const noexcept { return tokens_seen_; }
  std::int64_t skipped_steps() const noexcept { return skipped_total_; }
  /// Copies of experts that there are in this stage's layers (experts.replicas).
  std::int64_t expert_replicas() const;
  /// Of every data set, over all steps of the run; a function of the step and the configuration.
  std::vector<DataUse> data_use() const;
  /// Shows what later steps choose to `choices`, which may put other choices in their place; null ends it.
  void set_choices(ChoiceObserver* choices) { choices_ = choices; }
  /// Shows the ops of later steps to `observer` (BackendOwner::observe); null ends it.
  void observe(OpObserver* observer) { backend_->observe(observer); }
  void observe_paths(PathObserver* observer) { backend_->observe_paths(observer); }

 private:
  /// All ranks; null for one.
  Communicator* world() const {
    return parts_.mesh != nullptr && parts_.mesh->world().size() > 1 ? &parts_.mesh->world()
                                                                     : nullptr;
  }
  /// The ranks of this one's pipeline stage, which hold the same layers; null for one.
  Communicator* stage() const;
  /// One rank of every stage, in order; null without a pipeline.
  Communicator* stages() const;
  bool is_pipelined() const { return parts_.params->position().extent(Axis::pp) > 1; }
  /// Whether the step follows a schedule over chunks.
  bool walks_chunks() const { return parts_.model->num_chunks() > 1 || is_pipelined(); }
  /// Among the ranks that share the global batch.
  int rank() const { return parts_.params->position().coordinate(Axis::dp); }
  int ranks() const { return parts_.params->position().extent(Axis::dp); }
  void check_layout() const;
  void check_data() const;
  std::string data_order() const;
  void allocate();
  void allocate_batches();
  void allocate_results();
  void allocate_offload_host();
  void place_batches(const Phase& phase);
  void enter_phase(const Phase& phase);
  void place_pipeline(const Phase& phase);
  void place_offload(const StepPasses& passes);
  void choose_balanced(const Phase& phase);
  void place_margins(std::int64_t rank_tokens);
  TensorView some_gradient() const;
  /// Which piece of a micro-batch this rank has along Axis::cp.
  SequenceBuffers::Piece piece() const {
    const MeshPosition& p = parts_.params->position();
    return {p.coordinate(Axis::cp), p.extent(Axis::cp)};
  }
  void prepare_batches(const Phase& phase, std::int64_t step);
  void load_batches(const Phase& phase);
  BatchCounts count_batches(std::int64_t stop_wish) const;
  StepScalars step_scalars(const Phase& phase, const BatchCounts& counts) const;
  bool begin_step(std::int64_t& stop_wish);
  void forward_backward();
  void forwards_done();
  void gradients_final(StorageId first);
  void reset_step_buffers();
  void add_losses_of_layers();
  void reduce_over_ranks();
  /// All ranks get the weights that others keep. `all`: of frozen experts too, which no step changes.
  void gather_weights(bool all);
  /// Of the micro-batch of this number on this rank.
  std::optional<ExpertReplays> replays_of_step();
  RunContext training_context(std::size_t micro_batch, Arena& arena, WeightGradients& gradients);
  TensorView piece_sums() const;
  std::vector<ExpertLoad> of_all_stages(std::vector<ExpertLoad> own) const;
  /// Lists of values in the order of their layers.
  template <class Value>
  std::vector<Value> of_all_stages(std::vector<Value> own) const;
  double loss_of(const data::Batch& batch);
  /// Whether several ranks share a micro-batch.
  bool splits_batches() const {
    const MeshPosition& p = parts_.params->position();
    return p.extent(Axis::cp) * p.extent(Axis::tp) > 1;
  }
  /// Whether this rank counts the tokens that the ranks along Axis::tp share.
  bool counts_batch() const { return parts_.params->position().coordinate(Axis::tp) == 0; }
  void read_results(StepStats& stats, const StepScalars& scalars);
  [[noreturn]] void refuse_half_made(ConstTensorView losses, double grad_norm) const;
  /// The next step's places, when it is time for others.
  void place_experts(StepStats& stats);
  TensorView host_losses() const;
  struct HostExperts {
    TensorView tokens, bias;  // of one mixture; bias is empty unless it is reported
  };
  bool reports_experts(std::int64_t step) const;
  std::vector<HostExperts> download_experts(bool with_bias);
  void begin_exchanges();
  std::vector<LayerExchange> exchange_times();
  std::vector<ExpertLoad> expert_loads(const std::vector<HostExperts>& experts);

  Parts parts_;
  std::vector<Phase> phases_;
  int phase_ = -1;
  std::vector<Model::NamedMoe> balanced_;  // mixtures whose router bias moves in this phase
  std::unique_ptr<BackendOwner> backend_;
  std::unique_ptr<StepTimer> timer_;
  std::unique_ptr<Arena> transient_;
  StepMemory memory_;
  Buffer offload_memory_, offload_host_;
  Buffer piece_sum_memory_;  // where layers work off micro-batches in pieces
  Buffer slot_memory_, losses_memory_, margin_memory_, batch_memory_, host_batches_;
  TensorView losses_;     // sums of the step
  TensorView loss_rows_;  // of training: by layer, added up into losses_
  Buffer host_results_;
  std::unique_ptr<GradientReduction> reduction_;       // with more than one rank
  std::unique_ptr<MemberReduction> member_reduction_;  // the same, of offloaded experts
  std::unique_ptr<ExpertUpdates> expert_updates_;  // in the backward, or beside the next forward
  ExpertReplays replays_before_;          // what they had replayed at the end of the step before
  std::unique_ptr<ExpertPlacer> placer_;  // with experts.place_every
  std::unique_ptr<ExpertCopier> copier_;  // with experts.replicas
  std::vector<std::unique_ptr<SequenceBuffers>> micro_batches_;  // or their pieces, in order
  std::int64_t pieces_ = 1;                                      // of a micro-batch, in this phase
  TokenGroups token_groups_;
  std::unique_ptr<BackendOwner> exchange_side_;  // with dispatch.overlap
  ExchangeMeter exchange_meter_;
  std::unique_ptr<ExpertExchange> exchange_;  // of the phase, with expert parallelism
  std::optional<ActivationOffload> offload_;  // of the phase
  std::unique_ptr<offload::Offloader> offloader_;
  std::unique_ptr<Model::MicroBatch> activations_;  // without a schedule
  std::vector<std::unique_ptr<Arena>> deferred_;    // of split backwards
  std::unique_ptr<PipelineStep> pipeline_;          // of the phase
  std::unique_ptr<data::BlendedDataset> dataset_;
  std::vector<data::Batch> prepared_;  // of step prepared_step_
  std::int64_t prepared_step_ = -1;
  std::unique_ptr<data::ValidationSet> validation_;
  WeightGradients at_once_;
  ChoiceObserver* choices_ = nullptr;
  StepScalars scalars_;  // of the step in progress
  std::chrono::steady_clock::time_point begun_;
  std::int64_t step_ = 0;
  std::int64_t bad_steps_ = 0, skipped_total_ = 0;
  std::int64_t tokens_seen_ = 0;
  std::vector<std::int64_t> passes_before_;  // of the mixtures, before this step
};

/// Weights (masters), persistent buffers and optimizer state under their checkpoint names.
std::vector<StateTensor> weight_tensors(const ParameterStore& params);
/// After masters were loaded: rounds them into the weights that kernels read (split ones were loaded as both).
void refresh_weights(const ParameterStore& params, Backend& backend);

}  // namespace moesaic
