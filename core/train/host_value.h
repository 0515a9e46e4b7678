#pragma once
#include <cstdint>

#include "core/base/tensor.h"

namespace moesaic {

/// Element i of a small tensor in host memory, f64, f32, i64 or i32.
inline double host_value(ConstTensorView view, std::int64_t i) {
  switch (view.dtype()) {
    case DType::f64:
      return view.as<double>()[i];
    case DType::f32:
      return static_cast<double>(view.as<float>()[i]);
    case DType::i64:
      return static_cast<double>(view.as<std::int64_t>()[i]);
    default:
      return static_cast<double>(view.as<std::int32_t>()[i]);
  }
}

}  // namespace moesaic
