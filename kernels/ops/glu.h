#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// swiglu: h = silu(g) u.   situ: h = b1 tanh(g/b1) sigma(g) * b2 tanh(u/b2)  (SPEC 4.3).
enum class GluKind : std::uint8_t { swiglu, situ };

struct GluActivation {
  GluKind kind = GluKind::swiglu;
  double beta1 = 4.0;   ///< situ only: limit of the gate part
  double beta2 = 25.0;  ///< situ only: limit of the linear part
};

/// h[t, c] = act(gate_up[t, c], gate_up[t, width + c]), evaluated in acc_t.
///
///   gate_up    [rows, 2 width]  f64 | f32 | bf16: gates in columns [0, width), ups in [width, 2 width)
///   h          [rows, width]    the type of gate_up
///   first_row, row_count  [1] i32 each, optional, read inside the stream: rows before first_row and from row_count on are
///                                    neither read nor written
struct GluForward {
  static constexpr const char* kName = "glu_forward";
  TensorView h{};
  ConstTensorView gate_up{};
  ConstTensorView row_count{};
  ConstTensorView first_row{};
  GluActivation activation{};

  void check() const;
  OpCost cost() const;
};

/// d(gate_up) from the gradient of h; with row weights also what a mixture of experts needs (SPEC 4.4).
///
///   dh           [rows, width]    r = gradient of w_t h_t, i.e. before the row weight is applied
///   dgate_up     [rows, 2 width]  overwritten; may alias gate_up
///   row_weight   [rows] acc_t     optional w_t (1 when absent): the gradient of h is w_t r_t
///   drow_weight  [rows] acc_t     optional, needs row_weight: dw_t = <r_t, h_t>, overwritten
///   h            [rows, width]    optional: the recomputed h, or w_t h_t with `weight_h` (operand of the gradient of the
///                                 down projection); may alias dh
///   first_row, row_count          as in GluForward
struct GluBackward {
  static constexpr const char* kName = "glu_backward";
  TensorView dgate_up{};
  TensorView drow_weight{};
  TensorView h{};
  ConstTensorView dh{};
  ConstTensorView gate_up{};
  ConstTensorView row_weight{};
  ConstTensorView row_count{};
  ConstTensorView first_row{};
  GluActivation activation{};
  bool weight_h = false;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const GluForward& op);
void launch(CpuContext& context, const GluBackward& op);
void launch(CudaContext& context, const GluForward& op);
void launch(CudaContext& context, const GluBackward& op);

}  // namespace moesaic
