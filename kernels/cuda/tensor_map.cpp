#include "kernels/cuda/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "core/base/error.h"
#include "memory/cuda/check.h"

namespace moesaic::cuda {
namespace {

constexpr std::size_t kMaxRank = 5;
constexpr unsigned kEncodeVersion = 12000;  // the first CUDA version with the call
constexpr std::int64_t kAlignment = 16;     // bytes, of bases and strides

// Through the runtime, so that the program does not link with the driver's library and starts on machines without one.
PFN_cuTensorMapEncodeTiled_v12000 find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  MOESAIC_CUDA_CALL(cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kEncodeVersion, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || function == nullptr)
    throw ResourceError("this driver has no cuTensorMapEncodeTiled; CUDA 12.0 or later is needed");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

CUtensorMapDataType data_type(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT64;
    case DType::f32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DType::i32:
      return CU_TENSOR_MAP_DATA_TYPE_INT32;
    case DType::u8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      throw InternalError(std::string("no tensor map for ") + name(dtype));
  }
}

CUtensorMapSwizzle swizzle_mode(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::bytes_32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    case Swizzle::bytes_64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case Swizzle::bytes_128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case Swizzle::none:
      break;
  }
  return CU_TENSOR_MAP_SWIZZLE_NONE;
}

std::string list(const std::initializer_list<std::int64_t>& values) {
  return fmt::format("[{}]", fmt::join(values, ", "));
}

}  // namespace

CUtensorMap make_tensor_map(const void* base,
                            DType dtype,
                            const TensorMapShape& shape,
                            Swizzle swizzle) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encode();
  const std::size_t rank = shape.sizes.size();
  MOESAIC_CHECK(
      1 <= rank && rank <= kMaxRank && shape.box.size() == rank && shape.strides.size() == rank - 1,
      "a tensor map has 1 to 5 sizes, one stride fewer, and as many box sizes");
  std::array<cuuint64_t, kMaxRank> sizes{}, strides{};
  std::array<cuuint32_t, kMaxRank> box{}, steps{};
  for (std::size_t i = 0; i < rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(shape.sizes.begin()[i]);
    box[i] = static_cast<cuuint32_t>(shape.box.begin()[i]);
    steps[i] = 1;
    if (i + 1 < rank)
      strides[i] = static_cast<cuuint64_t>(shape.strides.begin()[i]) * byte_size(dtype);
  }
  CUtensorMap map;
  const CUresult status = encode(&map,
                                 data_type(dtype),
                                 static_cast<cuuint32_t>(rank),
                                 const_cast<void*>(base),
                                 sizes.data(),
                                 strides.data(),
                                 box.data(),
                                 steps.data(),
                                 CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 swizzle_mode(swizzle),
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw InternalError(
        fmt::format("cuTensorMapEncodeTiled refused (status {}): {} at {}, sizes {}, strides {}, "
                    "box {}, swizzle {}",
                    static_cast<int>(status),
                    name(dtype),
                    base,
                    list(shape.sizes),
                    list(shape.strides),
                    list(shape.box),
                    static_cast<int>(swizzle)));
  }
  return map;
}

bool can_map(const void* base, std::int64_t row_elements, DType dtype) {
  return reinterpret_cast<std::uintptr_t>(base) % kAlignment == 0 && row_elements > 0 &&
         row_elements * static_cast<std::int64_t>(byte_size(dtype)) % kAlignment == 0;
}

}  // namespace moesaic::cuda
