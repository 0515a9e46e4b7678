#pragma once
// What the check() of several ops asks for.
#include "core/base/tensor.h"

namespace moesaic {

/// The accumulation and statistics type next to activations of `dtype`: f64 for f64, else f32.
inline DType acc_dtype(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

inline void check_like(const ConstTensorView& view,
                       const ConstTensorView& model,
                       const char* what) {
  check_shape(view, model.shape(), what);
  check_dtype(view, model.dtype(), what);
}
inline void check_acc(const ConstTensorView& view,
                      const Shape& shape,
                      DType compute,
                      const char* what) {
  check_shape(view, shape, what);
  check_dtype(view, acc_dtype(compute), what);
}
/// One element of the accumulation type, of any rank.
inline void check_scalar(const ConstTensorView& view, DType compute, const char* what) {
  MOESAIC_CHECK(!view.empty() && view.numel() == 1,
                std::string(what) + " must be given and hold one element");
  check_dtype(view, acc_dtype(compute), what);
}
/// (weight, remainder) as a master, in place of one that is not given (core/base/split_float.h).
inline void check_split_master(const ConstTensorView& master,
                               const ConstTensorView& weight,
                               const ConstTensorView& remainder) {
  MOESAIC_CHECK(master.empty() && !weight.empty(),
                "a split master is the compute weight and the remainder, and no third tensor");
  check_dtype(weight, DType::bf16, "the weight of a split master");
  check_dtype(remainder, DType::u16, "remainder");
  check_shape(remainder, weight.shape(), "remainder");
}
inline double total_bytes(std::initializer_list<ConstTensorView> views) {
  double sum = 0;
  for (const auto& v : views)
    sum += v.empty() ? 0.0 : static_cast<double>(v.bytes());
  return sum;
}

}  // namespace moesaic
