#pragma once
#include "core/model/options.h"
#include "core/nn/module.h"

namespace moesaic {

/// The dense gated MLP: y = W_down act(x W_gate^T, x W_up^T)  (SPEC 4.2). The inner width is split over Axis::tp.
class GatedMlp : public Module {
 public:
  GatedMlp(ParameterStore& params, const std::string& prefix, const MlpOptions& options, Part part);
  void declare(TapeSpec& tape, const Bounds& bounds, ActId x, ActId y) override;
  void backward(Tape& tape, ConstTensorView dy, TensorView dx) override;

  // For a mixture's shared experts, whose output adds to the routed one.
  void declare_inner(TapeSpec& tape, const Bounds& bounds, ActId x, const std::string& prefix);
  ActId inner() const noexcept { return h_; }  ///< what add_output() reads
  void add_output(Tape& tape, TensorView y, bool accumulate);
  void backward_into(Tape& tape, ConstTensorView dy, TensorView dx, bool accumulate_dx);

 private:
  MlpOptions options_;
  DType compute_;
  StorageId gate_up_, down_;
  ActId x_, pre_, h_;
};

}  // namespace moesaic
