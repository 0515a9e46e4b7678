#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// y = a + b. One shape and one type (f64 | f32 | bf16), summed in acc_t; y may alias a or b.
struct Add {
  static constexpr const char* kName = "add";
  TensorView y{};
  ConstTensorView a{};
  ConstTensorView b{};

  void check() const;
  OpCost cost() const;
};

/// y += alpha x. One shape; the types may differ (f64 | f32 | bf16 each), summed in the wider one's acc_t.
struct Accumulate {
  static constexpr const char* kName = "accumulate";
  TensorView y{};
  ConstTensorView x{};
  double alpha = 1.0;

  void check() const;
  OpCost cost() const;
};

/// y = x in the type of y (f64 | f32 | bf16 each; round to nearest even). One shape.
struct Cast {
  static constexpr const char* kName = "cast";
  TensorView y{};
  ConstTensorView x{};

  void check() const;
  OpCost cost() const;
};

/// y = value (f64 | f32 | bf16 | i32).
struct Fill {
  static constexpr const char* kName = "fill";
  TensorView y{};
  double value = 0.0;

  void check() const;
  OpCost cost() const;
};

/// y = alpha * factor[0] * x. One shape and type; `factor` is an optional scalar tensor of type acc_t, read inside the
/// stream; y may alias x.
struct Scale {
  static constexpr const char* kName = "scale";
  TensorView y{};
  ConstTensorView x{};
  ConstTensorView factor{};
  double alpha = 1.0;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const Add& op);
void launch(CpuContext& context, const Accumulate& op);
void launch(CpuContext& context, const Cast& op);
void launch(CpuContext& context, const Fill& op);
void launch(CpuContext& context, const Scale& op);
void launch(CudaContext& context, const Add& op);
void launch(CudaContext& context, const Accumulate& op);
void launch(CudaContext& context, const Cast& op);
void launch(CudaContext& context, const Fill& op);
void launch(CudaContext& context, const Scale& op);

}  // namespace moesaic
