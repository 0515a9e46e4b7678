#pragma once
#include "kernels/ops/op.h"

namespace moesaic {

/// Rotates pairs of columns of x in place by angle positions[t] theta^(-2j/r), j = 0 .. r/2 - 1 (SPEC 2.1, 3.1).
///
///   x          [tokens, heads, width]  f64 | f32 | bf16; only columns [begin, begin + rotary_width) change
///   positions  [tokens] i32            position inside the document
///
/// Pair j is columns (2j, 2j + 1) when `interleaved`, else (j, j + r/2), counted from `begin`. Angles are formed in
/// double for every type. The gradient is the rotation by the opposite angle: `inverse`.
struct Rope {
  static constexpr const char* kName = "rope";
  TensorView x{};
  ConstTensorView positions{};
  std::int64_t begin = 0;
  std::int64_t rotary_width = 0;
  double theta = 10000.0;
  bool interleaved = true;
  bool inverse = false;

  void check() const;
  OpCost cost() const;
};

void launch(CpuContext& context, const Rope& op);
void launch(CudaContext& context, const Rope& op);

}  // namespace moesaic
