#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/tensor.h"
#include "core/nn/choices.h"
#include "core/nn/parameter_store.h"
#include "core/nn/sequence.h"
#include "kernels/ops/op.h"
#include "memory/buffer.h"

namespace moesaic {

class Tape;
namespace offload {
class Offloader;
}

/// What becomes of an activation between its use in forward and its use in backward.
///   save       stays in its slot
///   recompute  is gone, and computed again
///   offload    is saved in memory whose contents go to host memory and come back (memory/offload)
enum class Keep : std::uint8_t { save, recompute, offload };

struct ActId {
  std::int32_t index = -1;
  bool valid() const noexcept { return index >= 0; }
};

/// Something on the host that a micro-batch keeps beside its activations (the host's part of an exchange plan).
struct HostId {
  std::int32_t index = -1;
  bool valid() const noexcept { return index >= 0; }
};

/// compute: a pure function of what it reads; may be replayed in backward.
/// cheap: the same without a product of matrices or an exchange between ranks.
/// chooses: selects, counts or negotiates; never replayed, so all its outputs are saved.
enum class StepKind : std::uint8_t { compute, cheap, chooses };

/// Names the activations whose values are computed again in backward instead of saved: patterns with * for any text,
/// matched against names like "attn.q" or "moe.gate_up". `all` names every one that may be, `cheap` what cheap steps write;
/// `kept` names what none of them is about.
struct RecomputePolicy {
  bool all = false;
  bool cheap = false;
  std::vector<std::string> patterns;
  bool matches(const std::string& name, StepKind producer = StepKind::compute) const;
  /// Of what is kept, what waits in host memory: what layers hand on, and names.
  struct Offload {
    bool residuals = false;
    std::vector<std::string> patterns;
    bool any() const noexcept { return residuals || !patterns.empty(); }
    bool matches(const std::string& name) const;
  } offload;
  std::vector<std::string> kept;
};
/// Shell-like match, * stands for any text.
bool glob_match(const std::string& pattern, const std::string& text);

/// The declared activations and steps of one layer: what its forward computes, in order. Built once per layer; the same
/// step function serves forward and replay, so the two cannot drift apart.
class TapeSpec {
 public:
  /// Memory of somebody else (the layer's inputs), bound before each use.
  ActId input(const std::string& name, Shape shape, DType dtype);
  ActId activation(const std::string& name, Shape shape, DType dtype);
  /// One per tape, made by `make` with the tape, which is before the first step.
  HostId host_value(std::function<std::shared_ptr<void>()> make);
  /// Adds a step at the end. A step writes each activation once.
  void step(const std::string& name,
            std::vector<ActId> reads,
            std::vector<ActId> writes,
            std::function<void(Tape&)> run,
            StepKind kind = StepKind::compute);
  /// Pins an activation: always saved (the layer's outputs).
  void always_save(ActId id);
  /// A pinned activation that RecomputePolicy::Offload::residuals is about: its readers, in other layers, are known too.
  void may_leave(ActId id);
  /// An activation that backward does not read, or computes again whatever the policy: never saved. Not for what a choosing
  /// step writes.
  void never_save(ActId id);
  /// Backward does not read it: saved only where something is replayed from it and the policy does not name it, too.
  void forward_only(ActId id);
  /// Decides what is saved and assigns its place in a slot. Throws UsageError when a pattern names an activation that a
  /// choosing step writes, InternalError when a step reads what no earlier step wrote.
  void plan(const RecomputePolicy& policy);

  std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  /// Bytes of what is offloaded, by part: one for each activation that may leave, and one for all named ones.
  const std::vector<std::size_t>& offloaded_parts() const noexcept { return parts_; }
  /// The part of an activation that may leave, and of the named ones; -1: not offloaded.
  int part_of(ActId id) const { return activations_[static_cast<std::size_t>(id.index)].part; }
  int named_part() const noexcept { return named_part_; }
  struct Activation {
    std::string name;
    Shape shape;
    DType dtype = DType::f32;
    bool is_input = false, pinned = false, passing = false, forward_only = false;
    bool is_read = false;  // by a step
    bool may_leave = false;
    Keep keep = Keep::save;
    int part = -1;           // where offloaded
    std::size_t offset = 0;  // in the slot, or the part
    bool is_kept() const noexcept { return keep != Keep::recompute; }
    int producer = -1;
  };
  struct Step {
    std::string name;
    std::vector<ActId> reads, writes;
    std::function<void(Tape&)> run;
    StepKind kind = StepKind::compute;
  };
  const std::vector<Activation>& activations() const noexcept { return activations_; }
  const std::vector<Step>& steps() const noexcept { return steps_; }
  const std::vector<std::function<std::shared_ptr<void>()>>& host_values() const noexcept {
    return host_values_;
  }

 private:
  std::vector<Activation> activations_;
  std::vector<Step> steps_;
  std::vector<std::function<std::shared_ptr<void>()>> host_values_;
  Keep choose(const Activation& activation, const RecomputePolicy& policy) const;
  void save_for_replays(const RecomputePolicy& policy);
  void find_place(Activation& activation, const RecomputePolicy::Offload& policy);

  std::size_t slot_bytes_ = 0;
  std::vector<std::size_t> parts_;
  int named_part_ = -1;
  bool planned_ = false;
};

/// Weight gradients of one micro-batch: computed at once, or kept until flush() (split backward). Kept ones hold the
/// memory of their operands, because the arenas are not given back before.
class WeightGradients {
 public:
  enum class Mode { at_once, deferred };
  explicit WeightGradients(Mode mode = Mode::at_once) : mode_(mode) {}
  Mode mode() const noexcept { return mode_; }
  void add(Backend& backend, std::function<void(Backend&)> work);
  /// Holds the marks until flush().
  void hold(std::unique_ptr<Arena::Mark> mark) { held_.push_back(std::move(mark)); }
  void flush(Backend& backend);

 private:
  Mode mode_;
  std::vector<std::function<void(Backend&)>> pending_;
  std::vector<std::unique_ptr<Arena::Mark>> held_;
};

/// What the layers of one stream share while a micro-batch passes: where ops run, memory for what is not saved.
struct RunContext {
  Backend& backend;
  ParameterStore& params;
  Arena&
      transient;  ///< unsaved activations: of the current layer in forward, replayed ones in backward
  WeightGradients& weight_gradients;
  const Sequence& sequence;
  TensorView step_scalars;  ///< StepScalars: divisors of the losses and more
  TensorView losses;        ///< stats [kNumLosses], or a row for each layer: see core/nn/losses.h
  bool training = true;
  /// Told during backward that the gradients of `first` and all storages after it are final for this micro-batch (never
  /// while weight gradients are deferred); may be empty.
  std::function<void(StorageId first)> gradients_final;
  ChoiceObserver* choices = nullptr;  ///< of training only
  std::int64_t micro_batch = 0;       ///< number in the global batch; for `choices`
  std::int32_t micro_batch_here = 0;  ///< among those of this rank; for MemberVisit
  /// Where pieces of a micro-batch come one after the other (Bounds::pieces): u8, what a layer's backward adds up over them.
  TensorView piece_sums = {};
  offload::Offloader* offload = nullptr;  ///< told of every visit of a layer; null: nothing leaves
  /// Without training: the schedule of offloaded experts (ExpertTiers::set_schedule()) is made of forwards like this one.
  bool is_scheduled = false;
};

/// The activations of one layer for one micro-batch.
class Tape {
 public:
  /// `slot` [slot_bytes] holds what is saved, `parts` what is offloaded. Nothing is allocated later.
  Tape(const TapeSpec& spec, TensorView slot, std::vector<TensorView> parts = {});

  /// Points an input at its owner's memory.
  void bind(ActId id, ConstTensorView view);
  /// `before`: the tape of the same layer for the piece of the micro-batch before this one (Bounds::pieces), after its
  /// forward and before its backward; null for the first piece. Both outlive each other's use.
  void follow(Tape* before) { before_ = before; }

  /// Runs all steps. Unsaved activations are gone afterwards.
  void forward(RunContext& context);
  /// Calls `body`, inside which in() replays what was not saved and temporaries may be taken from the arenas.
  void backward(RunContext& context, const std::function<void()>& body);

  // --- for step functions and backward code
  /// An activation to read. In backward its producer is replayed when it was not saved.
  ConstTensorView in(ActId id);
  /// Where a step writes.
  TensorView out(ActId id);
  /// In backward: the memory of an activation that was asked for before and is read no more, to be written with something
  /// else. in() gives that from then on; nothing may be replayed from it.
  TensorView reuse(ActId id);
  /// Always saved: of the piece before, which must exist. Backward may leave gradients there that the piece before will
  /// find in its own(), once nobody reads the values any more.
  TensorView of_piece_before(ActId id) const;
  TensorView own(ActId id) const;
  /// Always saved, [tokens, …]: all = its rows in the pieces up to this one, `pieces` of them, one after the other.
  void gather_pieces(TensorView all, ActId id, std::int64_t pieces) const;
  /// What TapeSpec::host_value() declared; T is the type that its maker made.
  template <class T>
  T& host(HostId id) const {
    return *static_cast<T*>(host_values_[static_cast<std::size_t>(id.index)].get());
  }
  /// Whether somebody will read what the running step writes there: in forward a later step, or backward if it is saved; in
  /// a replay, backward's in(). A step may leave out a result that is not wanted, and then must not call out() for it.
  bool is_wanted(ActId id) const;
  /// Whether backward() runs, replays included.
  bool is_backward() const noexcept { return in_backward_; }
  RunContext& context() const;
  Backend& backend() const { return context().backend; }
  Stream& stream() const { return stream_of(context().backend); }
  const Sequence& sequence() const { return context().sequence; }
  WeightLease weight(StorageId id) const { return context().params.acquire(id, stream()); }
  TensorView grad(StorageId id) const { return context().params.grad(id); }
  /// Memory until the end of this layer's backward (or of the step function).
  TensorView temp(Shape shape, DType dtype, const char* tag) const;
  template <class Op>
  void run(const Op& op) const {
    moesaic::run(context().backend, op);
  }
  /// What RunContext::choices puts in the place of a choice that was just enqueued; empty = nothing. For Choice's members.
  ConstTensorView replaced_choice(const std::string& layer,
                                  std::int64_t first_token,
                                  bool is_shared,
                                  ConstTensorView chosen) const;
  /// An op that adds into parameter gradients: runs now or is kept for later (WeightGradients).
  template <class Op>
  void run_weight_gradient(const Op& op) const {
    add_weight_gradient([op](Backend& b) { moesaic::run(b, op); });
  }
  /// The same of any work, which gets the backend to enqueue on when its time comes.
  void add_weight_gradient(std::function<void(Backend&)> work) const {
    context().weight_gradients.add(context().backend, std::move(work));
  }
  /// Gives the temporaries that are taken in its lifetime back at its end, to be used again later in the same backward;
  /// where weight gradients wait, their operands keep the memory. Nothing may be replayed meanwhile: what is read inside
  /// must have been asked for with in() before.
  class Scope {
   public:
    explicit Scope(Tape& tape);
    ~Scope() { --tape_.scopes_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Tape& tape_;
    std::optional<Arena::Mark> mark_;
  };
  /// In backward: what is replayed in its lifetime, and all temporaries, are given back at its end; what is asked for again
  /// later is replayed again. Where weight gradients wait, nothing is given back. Not inside a Scope.
  class Stage {
   public:
    explicit Stage(Tape& tape);
    ~Stage();
    Stage(const Stage&) = delete;
    Stage& operator=(const Stage&) = delete;

   private:
    Tape& tape_;
    std::optional<Arena::Mark> mark_;
    std::vector<TensorView> before_;
  };
  int replays() const noexcept { return replays_; }
  /// What was saved for nothing: the names that the last backward did not ask for. Neither choices nor what is always saved.
  std::vector<std::string> saved_in_vain() const;

 private:
  TensorView saved_view(ActId id) const;

  const TapeSpec* spec_;
  TensorView slot_;
  std::vector<TensorView> parts_;
  std::vector<TensorView> transient_;  // unsaved activations of the current pass
  std::vector<ConstTensorView> bound_;
  std::vector<std::shared_ptr<void>> host_values_;
  RunContext* context_ = nullptr;
  Tape* before_ = nullptr;
  ActId replayed_;               // what the running replay is for
  std::vector<bool> asked_for_;  // in the last backward
  int replays_ = 0;
  int scopes_ = 0;
  bool in_backward_ = false;
};

}  // namespace moesaic
