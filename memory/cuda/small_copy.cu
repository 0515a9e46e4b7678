#include <cstdint>

#include <cuda_runtime.h>

#include "memory/cuda/check.h"
#include "memory/device_hooks.h"

namespace moesaic::cuda {
namespace {

constexpr std::size_t kLargest = std::size_t{64} << 10;
constexpr int kThreads = 256, kBlocks = 16;

__global__ void copy_words(std::uint32_t* to, const std::uint32_t* from, int words) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < words;
       i += static_cast<int>(gridDim.x * blockDim.x))
    to[i] = from[i];
}

bool is_in_words(const void* data, std::size_t bytes) {
  return (reinterpret_cast<std::uintptr_t>(data) | bytes) % sizeof(std::uint32_t) == 0;
}

}  // namespace

bool copy_small_to_host(void* to, const void* from, std::size_t bytes, void* stream) {
  if (bytes > kLargest || !is_in_words(to, bytes) || !is_in_words(from, bytes)) return false;
  cudaPointerAttributes at{};
  MOESAIC_CUDA_CALL(cudaPointerGetAttributes(&at, to));
  if (at.type != cudaMemoryTypeHost || at.devicePointer == nullptr) return false;
  const int words = static_cast<int>(bytes / sizeof(std::uint32_t));
  const int blocks = words <= kThreads * kBlocks ? (words + kThreads - 1) / kThreads : kBlocks;
  copy_words<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<std::uint32_t*>(at.devicePointer),
      static_cast<const std::uint32_t*>(from),
      words);
  MOESAIC_CUDA_CALL(cudaGetLastError());
  return true;
}

}  // namespace moesaic::cuda
