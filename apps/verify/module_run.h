#pragma once
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "apps/verify/case_run.h"
#include "core/nn/losses.h"
#include "core/nn/module.h"
#include "core/nn/parameter_store.h"
#include "core/nn/sequence.h"
#include "core/nn/tape.h"
#include "kernels/ops/step_scalars.h"
#include "memory/buffer.h"

namespace moesaic::verify {

/// What a module or a model of a golden case needs around it: parameters with the stored weights,
/// one packed micro-batch, step scalars, losses, and memory that holds NaN where nothing was
/// written.
class ModuleRun {
 public:
  explicit ModuleRun(CaseRun& run);
  /// Queued work may still use what this owns.
  ~ModuleRun();

  CaseRun& run() noexcept { return run_; }
  ParameterStore& params() noexcept { return params_; }

  /// After the module was built in params(): allocates and loads every parameter and every buffer
  /// of the checkpoint from "w.NAME". Fails the case when a stored weight belongs to no parameter.
  void load_weights();
  /// Documents from "in.cu", or one document of `tokens` tokens; token ids from `ids` (empty =
  /// none).
  void set_sequence(std::int64_t tokens, const std::vector<std::int64_t>& ids = {});
  /// Targets `by` tokens further in the same document, -100 where there is none; and how many there
  /// are.
  std::vector<std::int64_t> targets(const std::vector<std::int64_t>& ids,
                                    int by,
                                    std::int64_t& valid) const;
  const std::vector<std::int64_t>& borders() const noexcept { return borders_; }
  Sequence& sequence() noexcept { return sequence_; }

  void set_scalars(const StepScalars& values);
  void set_scalars(TensorView scalars) { scalars_ = scalars; }
  /// Gradients, losses and counters of a step at their neutral values.
  void begin_step();
  RunContext context();
  double loss(Loss which);

  /// Compares the gradient of every trained parameter whose name contains `part` with `kind`NAME
  /// ("grad.w.").
  void expect_gradients(const std::string& kind, const std::string& part = "");
  /// Fails the case unless the gradients of all parameters whose name does not contain `part` are
  /// zero.
  void expect_no_gradient_outside(const std::string& part);

 private:
  /// Recording: weights of a usual size for the case, from their names; they become inputs of the case.
  void draw_weights();
  void draw_weight(const ParameterSpec& spec, const std::string& name, TensorView initial);
  void load_one(const std::string& name, TensorView to, TensorView also);
  template <class F>
  void for_each_parameter(F f);

  CaseRun& run_;
  ParameterStore params_;
  Arena transient_;
  WeightGradients weight_gradients_;
  Sequence sequence_;
  std::vector<std::int64_t> borders_;
  TensorView scalars_, losses_;
};

/// One module between an input and an output activation.
class LayerRun {
 public:
  /// Declares `module` for `tokens` rows; call after ModuleRun::load_weights().
  LayerRun(ModuleRun& owner, Module& module, std::int64_t tokens, std::int64_t hidden);
  /// y [T, d] from "in.x".
  ConstTensorView forward();
  /// dx [T, d] from dy.
  TensorView backward(ConstTensorView dy);
  Tape& tape() { return *tape_; }

 private:
  ModuleRun& owner_;
  Module& module_;
  TapeSpec spec_;
  ActId x_, y_;
  std::unique_ptr<Tape> tape_;
};

}  // namespace moesaic::verify
