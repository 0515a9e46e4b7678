#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// y[t] = [a[t], b[t]].   a [tokens, m], b [tokens, n], y [tokens, m + n]; one type of f64 | f32 | bf16; no aliasing.
struct ConcatColumns {
  static constexpr const char* kName = "concat_columns";
  TensorView y;
  ConstTensorView a;
  ConstTensorView b;

  void check() const;
  OpCost cost() const;
};

/// [a[t], b[t]] = y[t]: the transpose of ConcatColumns.
struct SplitColumns {
  static constexpr const char* kName = "split_columns";
  TensorView a;
  TensorView b;
  ConstTensorView y;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const ConcatColumns& op);
void launch(CpuContext& context, const SplitColumns& op);
void launch(CudaContext& context, const ConcatColumns& op);
void launch(CudaContext& context, const SplitColumns& op);

}  // namespace moesaic
