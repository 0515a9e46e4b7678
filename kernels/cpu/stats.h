#pragma once
// Helpers of ops that work in the statistics type, and of ops that read single values from tensors.
#include "core/base/dtype.h"
#include "core/base/tensor.h"

namespace moesaic::cpu {

/// Calls f(TypeTag<T>{}) for T = double or float.
template <class F>
decltype(auto) dispatch_stats(DType dtype, F&& f) {
  if (dtype == DType::f64) return f(TypeTag<double>{});
  MOESAIC_CHECK(dtype == DType::f32, std::string("statistics are f64 or f32, not ") + name(dtype));
  return f(TypeTag<float>{});
}

/// Calls f(TypeTag<T>{}) for T = std::int64_t or std::int32_t.
template <class F>
decltype(auto) dispatch_int(DType dtype, F&& f) {
  if (dtype == DType::i64) return f(TypeTag<std::int64_t>{});
  MOESAIC_CHECK(dtype == DType::i32, std::string("counts are i64 or i32, not ") + name(dtype));
  return f(TypeTag<std::int32_t>{});
}

/// The value of a one-element tensor: f64, f32, i64 or i32.
inline double read_scalar(const ConstTensorView& v) {
  switch (v.dtype()) {
    case DType::f64:
      return *v.as<double>();
    case DType::f32:
      return static_cast<double>(*v.as<float>());
    case DType::i64:
      return static_cast<double>(*v.as<std::int64_t>());
    default:
      return static_cast<double>(*v.as<std::int32_t>());
  }
}

/// True when a flag was given and is not zero.
inline bool is_set(const ConstTensorView& flag) {
  return !flag.empty() && read_scalar(flag) != 0;
}

}  // namespace moesaic::cpu
