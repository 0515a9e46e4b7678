#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/checkpoint/checkpoint.h"
#include "core/model/model.h"
#include "core/nn/parameter_store.h"
#include "core/train/whole_matrices.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/op.h"
#include "kernels/ops/step_scalars.h"

namespace moesaic {

struct MemberTensors;

struct OptimizerOptions {
  bool muon = false;  ///< Muon for matrices, AdamW for the rest; else AdamW for all
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;    ///< on parameters declared with decay
  double clip_grad_norm = 1.0;  ///< 0 = no clipping
  double muon_momentum = 0.95;
  bool muon_nesterov = true;
  bool muon_per_head = true;
  int ns_steps = 5;
  std::optional<bool> bf16_products =
      false;  ///< of the iteration; empty = where the compute type is bf16
  std::optional<double> qk_clip_tau;
  std::optional<double> ema_decay;
  bool skip_untouched = false;  ///< experts without a token in the step keep weights and state
  bool lazy_untouched = false;  ///< offloaded experts may be given updates without a gradient later
};

/// What a member of offloaded experts is yet to be given: the updates of the steps [first, end).
struct LateUpdates {
  std::int64_t member = 0;
  std::int64_t first = 0, end = 0;
};

/// Those of a storage of which some are made now, [begin, end): all in turn, from the first on.
struct LateMembers {
  std::span<const LateUpdates> all;
  std::size_t begin = 0, end = 0;
  bool is_first = true;  ///< the tiers are told of all of them
};

/// What an optimizer keeps of experts beside masters: ExpertTierOptions::state_kinds.
std::vector<std::string> expert_state_kinds(const OptimizerOptions& options);
inline constexpr const char* kAverageKind = "average";

/// Updates all trained parameters of a store (SPEC section 7), or this rank's share of them when the store's state is
/// sharded: the weights of the others come with GradientReduction::gather_weights(). It sees logical tensors only: experts one by one, gate
/// and up projections apart. State lives in the master type, in memory of its own, or, of offloaded experts, in the store's tiers. All of a step is enqueued; whether it is skipped is read
/// from StepScalars on the device.
class Optimizer {
 public:
  /// `whole`: the parameters of all pipeline stages, sealed; null when `params` has them all. Read here only.
  Optimizer(ParameterStore& params,
            const OptimizerOptions& options,
            const ParameterStore* whole = nullptr);

  /// lr_scale of a parameter (1 by default), by declaration index; set at the start of a phase.
  void set_lr_scale(ParamId id, double scale) {
    entries_[static_cast<std::size_t>(id.index)].lr_scale = scale;
  }

  /// The tensor that ops of a step read; written by begin_step().
  TensorView scalars() const { return scalars_.rows(0, 1).reshaped({kNumStepScalars}); }
  /// Writes `values` (with this optimizer's bias corrections filled in) to the device.
  void begin_step(StepScalars values, Stream& stream);

  /// In the last backward: the gradients of `first` and all storages after it are final, and no other rank adds to them.
  /// Those of offloaded experts are added up for the norm now, while many of them are on the device.
  void gradients_final(Backend& backend, StorageId first);
  /// The same of one offloaded member, whose gradient [rows, cols] is at hand.
  void gradient_final(Backend& backend,
                      StorageId id,
                      std::int64_t member,
                      const TensorView& gradient);

  /// All forwards are done: the step is skipped when one of `guarded` is not finite, and updates of experts may know it.
  void guard_losses(Backend& backend, ConstTensorView guarded);

  /// Norm of all gradients (one f64 partial per expert's tensor and per block of rows of others (RowBlocks), so that its bits
  /// do not depend on how state is sharded; storages in the order of declaration, each member by member),
  /// clip factor, and the skip flag when the
  /// norm or one of `guarded` is not finite. `world`: all ranks, which bring their partials together where the layout
  /// splits parameters; may be null for one rank. The order of the sum is that of one rank.
  void clip(Backend& backend, ConstTensorView guarded, Communicator* world = nullptr);
  /// All but experts whose state is offloaded. `mesh`: all ranks, which put split matrices together for Muon; null for one rank.
  void update(Backend& backend, const Mesh* mesh = nullptr);
  /// Those experts, from the last layer to the first.
  void update_experts(Backend& backend);
  /// The same later, storage by storage, in the middle of the next step even: what the updates read of this step is put aside.
  /// Steps are numbered without gaps, and the last late_steps() of them kept; all are of one phase. Not with skip_untouched.
  void put_off_experts(Backend& backend, std::int64_t step);
  std::int64_t late_steps() const { return static_cast<std::int64_t>(late_decays_.size()); }
  /// Some of what was put off, members in turns on backends beside that of forward and backward, each member's updates in
  /// their order. The gradients are zeros, but for that of the last step where `with_gradients`. `outside` as in ExpertTiers.
  void update_experts_of(std::span<Backend* const> backends,
                         StorageId id,
                         const LateMembers& members,
                         bool with_gradients,
                         bool outside);
  /// In the step's last backward, once gradients_final() has been told of them: the updates of these experts that are made
  /// next, or of others behind them, are skipped when a sum of squares of this rank is not finite. The step itself is put off
  /// before, when its losses have been guarded.
  void guard_experts(Backend& backend, StorageId id);
  /// As update_experts_of(), by those scalars.
  void update_guarded_experts_of(std::span<Backend* const> backends,
                                 StorageId id,
                                 std::span<const LateUpdates> members);
  /// Whether these experts' updates change anything in this phase.
  bool updates_experts_of(StorageId id) const;
  /// Whether ranks put matrices of offloaded experts together for their updates.
  bool splits_experts() const;
  const OptimizerOptions& options() const noexcept { return options_; }
  /// Scales the query and key projections of heads whose largest logit of the step exceeded the limit.
  void qk_clip(Backend& backend, const std::vector<MlaAttention*>& layers);
  /// Moves the averages of the weights on (ema_decay), after everything that changes weights. Those of experts whose state is
  /// offloaded went on in update().
  void average(Backend& backend);

  /// Norm before clipping and whether the step was skipped, on the host.
  struct Outcome {
    double grad_norm = 0;
    bool skipped = false;
    bool half_made = false;  ///< skipped, but experts had been updated in the backward
  };
  /// Enqueues the copies that outcome() reads once the stream has passed them.
  void download_outcome(Stream& stream);
  Outcome outcome() const;
  /// Both, with the wait in between.
  Outcome read_outcome(Stream& stream);
  /// Counts an update; call with what read_outcome() said.
  void end_step(const Outcome& outcome);

  /// State for checkpoints, this rank's pieces of it where it is sharded, behind StateAccess where it is offloaded; names "optimizer/m/NAME", "optimizer/v/NAME", "optimizer/momentum/NAME", "ema/NAME".
  std::vector<StateTensor> state() const;
  /// The kinds of state of a storage, flat, of this rank's range of it: an empty view where that is empty. Not of offloaded experts.
  std::vector<TensorView> state_of_storage(StorageId id) const;
  /// Updates made so far; counters also hold those of parameters that were frozen in some of them.
  std::int64_t updates() const noexcept { return updates_; }
  void save_counters(StateValues& values) const;
  void load_counters(const StateValues& values);
  /// Device memory by tag.
  std::vector<MemoryUse> memory_use() const;

 private:
  struct Entry {
    bool trained = false, muon = false;
    double lr_scale = 1;
    std::int64_t updates = 0;  // of this parameter; steps in which it was frozen do not count
    int group = 0;  // row of scalars_: parameters with as many updates share bias corrections
  };
  // Laid out like the storage, flat, so that what holds for all of its parameters is one op.
  struct State {
    TensorView m, v, momentum, average;
  };
  std::int64_t place_partials(const ParameterStore& whole);
  void allocate_state(DType master);
  void clear_state();
  const Entry& entry(ParamId id) const { return entries_[static_cast<std::size_t>(id.index)]; }
  const State& state_of(ParamId id) const {
    return states_[static_cast<std::size_t>(params_.storage_of(id).index)];
  }
  bool is_uniform(StorageId id) const;
  void sum_squares(Backend& backend, StorageId id);
  TensorView partials_of(StorageId id) const;
  TensorView partials_of(StorageId id, std::int64_t tensor) const;
  void sum_squares_of_piece(Backend& backend, StorageId id, std::int64_t tensor);
  void update_storage(Backend& backend, StorageId id);
  void update_family(Backend& backend, ParamId id);
  void update_one(Backend& backend, ParamId id, std::int64_t member, ConstTensorView scalars);
  struct Tensors {
    TensorView master, compute, remainder, gradient, m, v, momentum;
  };
  /// Muon's update of a matrix of which this rank has a block.
  struct SplitUpdate {
    ParamId id;
    Tensors own;
    ConstTensorView scalars;
  };
  bool updates_in_parts(ParamId id) const;
  void put_off(Backend& backend, const SplitUpdate& update);
  void update_split_matrices(Backend& backend);  // those put off, of all axes
  void update_split_matrices(Backend& backend, std::vector<SplitUpdate>& updates);
  void update_tensors(Backend& backend,
                      const Entry& entry,
                      const Tensors& tensors,
                      const ParameterSpec& spec,
                      const std::vector<RowBlock>& blocks,
                      ConstTensorView scalars);
  Tensors tensors_of(ParamId id, std::int64_t member) const;
  ConstTensorView scalars_of(const Entry& entry) const {
    return scalars_.rows(entry.group, entry.group + 1).reshaped({kNumStepScalars});
  }
  double average_decay() const {  // the first average is the weight itself
    return updates_ == 0 ? 0.0 : *options_.ema_decay;
  }
  // Offloaded experts (optimizer_offloaded.cpp).
  bool trains_experts_of(StorageId id) const;
  TensorView late_scalars_of(std::int64_t step) const;
  ConstTensorView expert_scalars_of(const Entry& entry) const {
    return expert_scalars_.rows(entry.group, entry.group + 1).reshaped({kNumStepScalars});
  }
  struct MemberState {
    Tensors tensors;  // [rows, cols] each
    TensorView average;
  };
  bool has_separate_master(ParamId id) const;
  bool sums_squares(StorageId id) const;
  void sum_squares_of_members(Backend& backend, StorageId id);
  void sum_squares_of_member(Backend& backend,
                             StorageId id,
                             std::int64_t member,
                             const TensorView& gradient);
  struct HowUpdated {
    bool with_gradients = true;
    bool beside = false;  // with the scalars of the steps that were put off
    bool outside = false;
    bool guarded = false;  // the last of them with the scalars of guard_experts()
  };
  void update_members(std::span<Backend* const> backends,
                      StorageId id,
                      const LateMembers& updates,
                      const HowUpdated& how);
  void make_late_updates(Backend& backend,
                         StorageId id,
                         const LateUpdates& updates,
                         const MemberState& state,
                         const HowUpdated& how);
  void share_skip(Backend& backend, const TensorView& scalars);
  bool is_rounded_last(StorageId id) const;
  void round_member(Backend& backend, StorageId id, const MemberState& state);
  MemberState member_state(StorageId id, std::int64_t member, const MemberTensors& tensors) const;
  void update_member(Backend& backend, StorageId id, std::int64_t member, const MemberState& state);
  void update_split_members(Backend& backend,
                            StorageId id,
                            std::span<const std::int64_t> members,
                            std::span<const MemberState> states);
  void average_member(Backend& backend, const MemberState& state);
  void add_of_member(std::vector<StateTensor>& all, ParamId id, std::int64_t member) const;
  ConstTensorView scalars_by_use(Backend& backend, ParamId id, std::int64_t member);
  /// The blocks of a matrix that Muon treats on their own, in the rows of this rank; nothing for whole matrices.
  std::vector<RowBlock> blocks_here(ParamId id) const;
  void assign_groups();

  ParameterStore& params_;
  OptimizerOptions options_;
  std::vector<Entry> entries_;  // by parameter
  std::vector<State> states_;   // by storage
  Buffer memory_, small_;
  TensorView scalars_, host_scalars_, host_norm_, partials_, norm_;
  // What updates of offloaded experts read: scalars_, or the copy of those of a step whose updates were put off.
  TensorView expert_scalars_;
  double expert_decay_ = 0;  // of averages
  TensorView
      late_scalars_;  // [late_steps(), max_groups, kNumStepScalars], step s in row s % late_steps()
  std::vector<double> late_decays_;  // the same of averages
  Buffer late_memory_;
  // Of updates in the backward: a copy for every storage, as updates read one while the next is written.
  TensorView guarded_scalars_;  // [storages, max_groups, kNumStepScalars]
  TensorView put_off_;          // of the step that was put off last
  TensorView guarded_;          // the newest of those, or put_off_
  TensorView host_early_skip_;  // of put_off_
  std::int64_t num_guarded_ = 0;
  bool has_early_updates_ = false;  // in this step
  Buffer guarded_memory_;
  TensorView member_scalars_;  // [largest family, kNumStepScalars], rewritten for each family
  Buffer host_, member_memory_;
  std::optional<WholeMatrices> whole_;                      // those that Muon needs
  std::map<Axis, std::vector<SplitUpdate>> split_updates_;  // put off, by the axis that splits them
  const Mesh* mesh_ = nullptr;                              // of the update in progress
  bool split_ = false;                    // some parameter, or its state, is spread over ranks
  std::vector<char> summed_;              // by storage: offloaded, and in the norm already
  std::vector<std::int64_t> first_slot_;  // of a storage among the partials of all ranks
  std::vector<std::int64_t> group_updates_;
  std::int64_t updates_ = 0;
};

/// Where this rank's piece of a member's state lies; nothing when it is the whole member.
std::optional<StateTensor::Place> place_in_whole(const ParameterStore& params,
                                                 ParamId id,
                                                 std::int64_t member);

}  // namespace moesaic
