#pragma once
// Single numbers that ops read from tensors of several dtypes.
#include <cstdint>

#include "core/base/tensor.h"

namespace moesaic::cuda {

/// A one-element tensor (f64, f32, i64 or i32), to be read in a kernel.
struct Scalar {
  const void* data = nullptr;
  DType dtype = DType::f64;

  Scalar() = default;
  explicit Scalar(const ConstTensorView& v) : data(v.data()), dtype(v.dtype()) {}

  __device__ __forceinline__ double read() const {
    switch (dtype) {
      case DType::f64:
        return *static_cast<const double*>(data);
      case DType::f32:
        return static_cast<double>(*static_cast<const float*>(data));
      case DType::i64:
        return static_cast<double>(*static_cast<const std::int64_t*>(data));
      default:
        return static_cast<double>(*static_cast<const std::int32_t*>(data));
    }
  }
  /// For flags: false when none was given.
  __device__ __forceinline__ bool is_set() const { return data != nullptr && read() != 0; }
};

}  // namespace moesaic::cuda
