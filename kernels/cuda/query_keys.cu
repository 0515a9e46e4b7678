#include "kernels/cuda/device.cuh"
#include "kernels/cuda/query_keys.cuh"

namespace moesaic::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void document_begins_kernel(std::int32_t* begins,
                                       const std::int32_t* cu,
                                       std::int64_t documents,
                                       std::int64_t queries,
                                       std::int64_t keys) {
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t t = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; t < queries; t += step)
    begins[t] = document_begin(cu, documents, keys - queries + t);
}

// One warp per row. Bits are set by integer atomics: their order does not matter.
__global__ void selection_words_kernel(std::uint32_t* words,
                                       const std::int32_t* selected,
                                       QueryKeys see,
                                       std::int64_t first,
                                       std::int64_t rows,
                                       std::int64_t k,
                                       std::int64_t per_row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t step = std::int64_t{gridDim.x} * (blockDim.x / kWarp);
  for (std::int64_t r = std::int64_t{blockIdx.x} * (blockDim.x / kWarp) + threadIdx.x / kWarp;
       r < rows;
       r += step) {
    std::uint32_t* row = words + r * per_row;
    for (std::int64_t i = lane; i < per_row; i += kWarp)
      row[i] = 0;
    __syncwarp();
    const std::int64_t t = first + r, begin = see.begins[t], last = see.position(t);
    for (std::int64_t i = lane; i < k; i += kWarp) {
      const std::int32_t s = selected[t * k + i];
      if (s >= begin && s <= last) atomicOr(row + s / 32, 1U << (s % 32));
    }
  }
}

}  // namespace

void launch_document_begins(const CudaContext& context,
                            TensorView begins,
                            const ConstTensorView& cu_seqlens,
                            std::int64_t keys) {
  const std::int64_t queries = begins.dim(0);
  document_begins_kernel<<<grid_for(context, (queries + kThreads - 1) / kThreads),
                           kThreads,
                           0,
                           native_stream(context)>>>(begins.as<std::int32_t>(),
                                                     cu_seqlens.as<std::int32_t>(),
                                                     cu_seqlens.dim(0) - 1,
                                                     queries,
                                                     keys);
  check_launch("kernel document_begins");
}

void launch_selection_words(const CudaContext& context,
                            TensorView words,
                            const ConstTensorView& selected,
                            const QueryKeys& see,
                            std::int64_t first,
                            std::int64_t rows) {
  constexpr int kRows = kThreads / kWarp;
  selection_words_kernel<<<grid_for(context, (rows + kRows - 1) / kRows),
                           kThreads,
                           0,
                           native_stream(context)>>>(
      reinterpret_cast<std::uint32_t*>(words.as<std::int32_t>()),
      selected.as<std::int32_t>(),
      see,
      first,
      rows,
      selected.dim(1),
      words.dim(1));
  check_launch("kernel selection_words");
}

}  // namespace moesaic::cuda
