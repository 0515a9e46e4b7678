#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// y = RMSNorm(x; weight, eps) * sigma(gate) per head (output of KDA, SPEC 1.1).
///
///   x, gate, y  [tokens, heads, width]  f64 | f32 | bf16; y may alias x or gate
///   weight      [width]                 shared by all heads; type of x or acc_t
///   inv_rms     [tokens, heads]         acc_t, saved for backward
///
/// All in acc_t; one rounding at the end.
struct GatedRmsNormForward {
  static constexpr const char* kName = "gated_rms_norm_forward";
  TensorView y{};
  TensorView inv_rms{};
  ConstTensorView x{};
  ConstTensorView gate{};
  ConstTensorView weight{};
  double eps = 1e-5;

  void check() const;
  OpCost cost() const;
};

/// Gradients of GatedRmsNormForward.
///
///   dx, dgate  [tokens, heads, width]  overwritten; each may alias dy, x or gate elementwise, but not the other
///   dweight    [width] acc_t           accumulates; empty = frozen; summed over fixed blocks of tokens
struct GatedRmsNormBackward {
  static constexpr const char* kName = "gated_rms_norm_backward";
  TensorView dx{};
  TensorView dgate{};
  TensorView dweight{};
  ConstTensorView dy{};
  ConstTensorView x{};
  ConstTensorView gate{};
  ConstTensorView weight{};
  ConstTensorView inv_rms{};

  void check() const;
  OpCost cost() const;
};

/// y = x * sigma(gate), elementwise (MLA output gate, SPEC 2.1). Any shape, one type; y may alias x or gate.
struct SigmoidGateForward {
  static constexpr const char* kName = "sigmoid_gate_forward";
  TensorView y{};
  ConstTensorView x{};
  ConstTensorView gate{};

  void check() const;
  OpCost cost() const;
};

/// dx = dy sigma(gate),  dgate = dy x sigma(gate) sigma(-gate). dx and dgate may alias any input, but not each other.
struct SigmoidGateBackward {
  static constexpr const char* kName = "sigmoid_gate_backward";
  TensorView dx{};
  TensorView dgate{};
  ConstTensorView dy{};
  ConstTensorView x{};
  ConstTensorView gate{};

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const GatedRmsNormForward& op);
void launch(CpuContext& context, const GatedRmsNormBackward& op);
void launch(CpuContext& context, const SigmoidGateForward& op);
void launch(CpuContext& context, const SigmoidGateBackward& op);
void launch(CudaContext& context, const GatedRmsNormForward& op);
void launch(CudaContext& context, const GatedRmsNormBackward& op);
void launch(CudaContext& context, const SigmoidGateForward& op);
void launch(CudaContext& context, const SigmoidGateBackward& op);

}  // namespace moesaic
