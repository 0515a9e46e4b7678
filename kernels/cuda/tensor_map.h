#pragma once
// Tensor maps for the copy engine (TMA), made on the host and passed to kernels by value as
// `const __grid_constant__ CUtensorMap`.
#include <array>
#include <cstdint>
#include <initializer_list>

#include <cuda.h>

#include "core/base/dtype.h"

namespace moesaic::cuda {

enum class Swizzle : std::uint8_t { none, bytes_32, bytes_64, bytes_128 };

/// A box of a tensor, as one copy moves it. Innermost dimension first, unlike TensorView.
struct TensorMapShape {
  std::initializer_list<std::int64_t> sizes;  ///< elements; 1 to 5 dimensions
  std::initializer_list<std::int64_t>
      strides;  ///< elements, of all dimensions but the innermost (which is contiguous)
  std::initializer_list<std::int64_t> box;  ///< elements, each at most 256
};

/// Throws InternalError when the driver refuses: `base` must be 16-byte aligned, strides multiples of 16 bytes, the box's
/// rows a multiple of 16 bytes and no longer than the swizzle. f32, bf16, f64, i32 and u8 tensors.
/// What lies outside `sizes` is loaded as zero and not stored.
CUtensorMap make_tensor_map(const void* base,
                            DType dtype,
                            const TensorMapShape& shape,
                            Swizzle swizzle = Swizzle::bytes_128);

/// Whether a tensor with this base and row length can have a map at all (a path's choice depends on it).
bool can_map(const void* base, std::int64_t row_elements, DType dtype);

}  // namespace moesaic::cuda
