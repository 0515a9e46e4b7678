#pragma once
// What the grouped tensor-core kernels share: a ring of shared-memory stages between one loading thread and two multiplying
// warpgroups, in clusters of two blocks that load one operand for each other.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/wgmma.cuh"

namespace moesaic::cuda {

constexpr int kGroupThreads = 128;
constexpr int kConsumers = 2;  // warpgroups that multiply, 64 of the tile's M side each
constexpr int kThreads = (kConsumers + 1) * kGroupThreads;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kCluster = 2;
constexpr std::uint16_t kBothBlocks = 3;
constexpr int kMaxStages = 12;
constexpr int kBlockK = 64;  // terms of the sums per stage
constexpr int kTileM = kConsumers * 64;
constexpr int kRowBytes = 128;             // 64 bf16: a row of every swizzled tile
constexpr int kAtomTile = 64 * kRowBytes;  // 64 rows of them: what a warpgroup takes as A
constexpr int kBytesM = kConsumers * kAtomTile;
constexpr int kSwizzleAlignment = 1024;
constexpr int kMaxShared = 227 * 1024;  // of a block, the barriers included

/// How shared memory is cut: the fewer rows a tile has on the N side, the more stages there are, so that as many bytes are
/// on their way.
struct RingShape {
  std::int32_t stages;
  std::int32_t stage_bytes;  // the M side's kBytesM, then the N side
  std::int32_t bytes() const { return kSwizzleAlignment + stages * stage_bytes; }
};
constexpr RingShape ring_shape(int n, int staging_bytes) {
  const int stage = kBytesM + n * kRowBytes;
  const int room = kMaxShared - kSwizzleAlignment - staging_bytes -
                   2 * kMaxStages * static_cast<int>(sizeof(std::uint64_t));
  return {std::min(kMaxStages, room / stage), stage};
}

struct Ring {
  unsigned char* base;
  RingShape shape;
  std::uint64_t* full;   // [stages] the bytes are there
  std::uint64_t* empty;  // [stages] both warpgroups of both blocks have read them
  __device__ __forceinline__ unsigned char* stage(int i) const {
    return base + i * shape.stage_bytes;
  }
};
struct RingPosition {
  int stage = 0;
  std::uint32_t phase = 0;
  __device__ __forceinline__ void advance(const Ring& ring) {
    if (++stage == ring.shape.stages) {
      stage = 0;
      phase ^= 1U;
    }
  }
};

/// All threads of the cluster.
__device__ __forceinline__ Ring make_ring(std::uint64_t* barriers, const RingShape& shape) {
  extern __shared__ unsigned char dynamic_shared[];
  // Rounded up by the address in the shared window: that is what the swizzle goes by. The same in both blocks.
  const std::uint32_t address = shared_address(dynamic_shared);
  const Ring ring{
      dynamic_shared + (kSwizzleAlignment - address % kSwizzleAlignment) % kSwizzleAlignment,
      shape,
      barriers,
      barriers + kMaxStages};
  if (threadIdx.x == 0) {
    for (int i = 0; i < shape.stages; ++i) {
      mbarrier_init(ring.full + i, 1);
      mbarrier_init(ring.empty + i, kConsumers * kCluster);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  return ring;
}

__device__ __forceinline__ int cluster_index() {
  return static_cast<int>(blockIdx.x) / kCluster;
}
__device__ __forceinline__ int num_clusters() {
  return static_cast<int>(gridDim.x) / kCluster;
}

/// A warpgroup has read the stage: both blocks' producers may fill it.
__device__ __forceinline__ void release(const Ring& ring, int stage) {
  const auto thread = threadIdx.x % kGroupThreads;
  if (thread < kCluster) mbarrier_arrive_remote(ring.empty + stage, thread);
}

/// The first N / 2 of d = the sum over `blocks` stages (at least one): the warpgroup's 64 of M times N of the tile. The
/// products of one stage are in flight while the next stage is waited for. `prepare(b, stage)` is called when block b has
/// arrived.
template <Major kMajorM, Major kMajorN, int N, int kSums, class Prepare>
__device__ __forceinline__ void multiply(float (&sums)[kSums],
                                         const Ring& ring,
                                         RingPosition& at,
                                         int blocks,
                                         int group,
                                         Prepare&& prepare) {
  static_assert(N / 2 <= kSums);
  constexpr std::uint64_t kStepM = descriptor_step(kMajorM == Major::k ? 32 : 16 * kRowBytes),
                          kStepN = descriptor_step(kMajorN == Major::k ? 32 : 16 * kRowBytes);
  auto& d = reinterpret_cast<float(&)[N / 2]>(sums);
  int previous = 0;
  for (int b = 0; b < blocks; ++b) {
    mbarrier_wait(ring.full + at.stage, at.phase);
    unsigned char* const stage = ring.stage(at.stage);
    prepare(b, stage);
    const std::uint64_t m = swizzled_descriptor<kMajorM>(stage + group * kAtomTile, kAtomTile),
                        n = swizzled_descriptor<kMajorN>(stage + kBytesM, kAtomTile);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockK / 16; ++k)
      wgmma_ss<kMajorM, kMajorN>(d, m + k * kStepM, n + k * kStepN, b > 0 || k > 0);
    wgmma_commit();
    if (b > 0) {
      wgmma_wait<1>();
      release(ring, previous);
    }
    previous = at.stage;
    at.advance(ring);
  }
  wgmma_wait<0>();
  pin_registers(d);
  release(ring, previous);
}

/// Blocks of a persistent kernel: all multiprocessors in whole clusters, or fewer if there is less work.
inline unsigned persistent_grid(const CudaContext& context, std::int64_t units) {
  const std::int64_t clusters = std::max(1, context.num_sms / kCluster);
  return static_cast<unsigned>(std::min(units, clusters) * kCluster);
}

template <class Kernel>
void allow_shared(Kernel kernel, int bytes) {
  MOESAIC_CUDA_CALL(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

}  // namespace moesaic::cuda
