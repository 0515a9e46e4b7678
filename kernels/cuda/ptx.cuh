#pragma once
// Hopper instructions that CUDA C++ has no name for, one thin wrapper each: barriers that count bytes, the tensor copy
// engine (TMA), wgmma's fences (the products are in wgmma.cuh), warp-level products, and ordering.
//
// What goes wrong silently:
//  1. Shared memory written by ordinary stores (stmatrix too) and read next by wgmma or TMA: each writing thread calls
//     fence_proxy_async() before the barrier. The same before TMA fills a stage again that ordinary loads have read.
//  2. mbarrier_init() by one thread, then fence_mbarrier_init(), then __syncthreads(), before anybody uses the barrier.
//  3. wgmma reads A registers (RS) and accumulators asynchronously: nothing may touch them between wgmma_fence() and the
//     wgmma_wait() that covers the product. ptxas C7510 ("wgmma serialized") says that this was broken, often by a function
//     call or by an accumulator that crosses a loop with a condition; treat it as an error.
//  4. setmaxnreg works only in kernels with __launch_bounds__(threads, 1) (else warning C7508, ignored), and every warp of
//     a warpgroup must run it. Counts are multiples of 8, 24..256.
//  5. 128-byte swizzle: the tile starts at a multiple of 1024 bytes of shared memory. Inside the swizzle atom a K-major
//     operand advances by 32 bytes per k16; a transposed one advances by whole atoms of 8 k (see wgmma.cuh).
//  6. TMA: tensor base and row strides are multiples of 16 bytes, box rows of 16 bytes (of exactly 128 or less with the
//     128-byte swizzle), destination 128-byte aligned. Out-of-bounds elements arrive as zeros and do count in the bytes that
//     the barrier expects; stores drop them. Coordinates are elements, innermost first, 32-bit: offsets past 2^31 elements
//     come from the strides inside the map, so give big tensors two or three dimensions instead of a flat one.
//  7. A tensor map is a kernel parameter `const __grid_constant__ CUtensorMap`, taken by address. Never edit one that lies
//     in memory while copies use it.
//  8. The stage that a TMA store reads may be overwritten after bulk_wait_read<>() by the thread that committed it, and
//     then a barrier for the others. Before a block ends, its stores' reads must have ended.
//  9. mbarrier_wait(parity): a fresh barrier is in phase 0, so waiting for parity 1 returns at once (how producers see the
//     empty stages of the first round), and for parity 0 after the first completion.
#include <cstdint>

#include <cuda.h>

namespace moesaic::cuda {

/// Address in the shared window, as PTX wants it.
__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
/// Makes initialised barriers visible to the copy engine (and to the other blocks of a cluster).
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Announces `bytes` of asynchronous copies; does not arrive.
__device__ __forceinline__ void mbarrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
/// Announces `bytes` and arrives.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint64_t* barrier,
                                                       std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
/// Arrives at the barrier of the same name in block `rank` of the cluster: what this block's wgmma and TMA have read may be
/// written again. It does not order ordinary stores for the other block: a release at cluster scope is compiled to a fence
/// of all memory, a thousand cycles each time.
__device__ __forceinline__ void mbarrier_arrive_remote(std::uint64_t* barrier, std::uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
/// Whether the phase of this parity has completed. May wait a little.
__device__ __forceinline__ bool mbarrier_try_wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
/// In a build that looks for races (MOESAIC_CUDA_STRESS): every other call holds its warp back for up to a microsecond, so
/// that the parts that warps play in a block meet in orders that they never take by themselves.
__device__ __forceinline__ void stress_pause() {
#ifdef MOESAIC_CUDA_STRESS
  std::uint32_t x = (static_cast<std::uint32_t>(clock64()) ^ (threadIdx.x / 32 * 0x9e3779b9U) ^
                     (blockIdx.x * 0x85ebca6bU)) *
                    0xc2b2ae35U;
  x = __shfl_sync(__activemask(), x ^ x >> 15, __ffs(static_cast<int>(__activemask())) - 1);
  if ((x & 1U) != 0) __nanosleep(x >> 22);
#endif
}
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  stress_pause();
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- TMA: one thread issues; loads complete on an mbarrier, stores in groups ----------------------------------------

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(map)) : "memory");
}
__device__ __forceinline__ void tma_load_2d(
    void* shared, const CUtensorMap* map, std::uint64_t* barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4}], [%2];" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(barrier)),
      "r"(c0),
      "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(
    void* shared, const CUtensorMap* map, std::uint64_t* barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5}], [%2];" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(barrier)),
      "r"(c0),
      "r"(c1),
      "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tma_load_5d(void* shared,
                                            const CUtensorMap* map,
                                            std::uint64_t* barrier,
                                            int c0,
                                            int c1,
                                            int c2,
                                            int c3,
                                            int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2];" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(barrier)),
      "r"(c0),
      "r"(c1),
      "r"(c2),
      "r"(c3),
      "r"(c4)
      : "memory");
}
/// The same bytes to the same place of every block in `blocks` (bit = rank in the cluster); each one's barrier at the same
/// place counts its copy.
__device__ __forceinline__ void tma_load_2d_multicast(void* shared,
                                                      const CUtensorMap* map,
                                                      std::uint64_t* barrier,
                                                      int c0,
                                                      int c1,
                                                      std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(barrier)),
      "r"(c0),
      "r"(c1),
      "h"(blocks)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d_multicast(void* shared,
                                                      const CUtensorMap* map,
                                                      std::uint64_t* barrier,
                                                      int c0,
                                                      int c1,
                                                      int c2,
                                                      std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(shared)),
      "l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(barrier)),
      "r"(c0),
      "r"(c1),
      "r"(c2),
      "h"(blocks)
      : "memory");
}
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map,
                                             const void* shared,
                                             int c0,
                                             int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
          reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(shared)),
      "r"(c0),
      "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tma_store_3d(
    const CUtensorMap* map, const void* shared, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(shared)),
      "r"(c0),
      "r"(c1),
      "r"(c2)
      : "memory");
}
/// global += shared, each element rounded once in the map's type (flushes f32 subnormals). The order of several adders is
/// not defined: use it where every element has one.
__device__ __forceinline__ void tma_reduce_add_3d(
    const CUtensorMap* map, const void* shared, int c0, int c1, int c2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(reinterpret_cast<std::uint64_t>(map)),
      "r"(shared_address(shared)),
      "r"(c0),
      "r"(c1),
      "r"(c2)
      : "memory");
}
/// `bytes` (a multiple of 16) of plain memory; both addresses 16-byte aligned.
__device__ __forceinline__ void bulk_load(void* shared,
                                          const void* global,
                                          std::uint32_t bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)),
      "r"(bytes),
      "r"(shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                   __cvta_generic_to_global(global)),
               "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}
/// Closes the group of the stores that this thread has issued since the last call.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until all but the last N groups have read their shared memory.
template <int N = 0>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/// Waits until all but the last N groups have written global memory.
template <int N = 0>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// ---- ordering and roles -----------------------------------------------------------------------------------------------

/// Orders this thread's ordinary accesses of shared memory before later ones of wgmma and TMA (after a barrier).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Barrier 1..15 (0 is __syncthreads) among `threads` threads, a multiple of 32.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Arrives without waiting; the waiting threads call named_barrier_sync with the same count.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int Registers>
__device__ __forceinline__ void set_max_registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void set_max_registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
__device__ __forceinline__ std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// ---- cp.async: 16 bytes per thread -------------------------------------------------------------------------------------

/// Copies 16 bytes, or writes 16 zero bytes if not `valid` (`global` is not read then, but must be a mapped address).
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global)),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Arrives at `barrier`, as one of the arrivals it was made for, when this thread's copies so far have been written. Readers
/// by wgmma or TMA call fence_proxy_async() after waiting.
__device__ __forceinline__ void cp_async_arrive(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
/// Waits for this thread's copies but the last N groups; other threads' need a barrier after it.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- warp-level products ------------------------------------------------------------------------------------------------
//
// With g = lane / 4 and q = lane % 4:
//   16-bit fragments hold pairs (lower column in the lower half)
//   a, m16k16:  a[0] (row g, k 2q..), a[1] (g + 8, 2q..), a[2] (g, 2q + 8..), a[3] (g + 8, 2q + 8..)
//   b, k16n8:   b[0] (k 2q.., column g), b[1] (k 2q + 8.., column g)
//   d, m16n8:   d[0], d[1] (row g, columns 2q, 2q + 1), d[2], d[3] (row g + 8)
//   tf32 a, m16k8:  a[0] (g, q), a[1] (g + 8, q), a[2] (g, q + 4), a[3] (g + 8, q + 4);  b: b[0] (q, g), b[1] (q + 4, g)

/// d += a b, bf16 operands, f32 sums.
__device__ __forceinline__ void mma_bf16(float (&d)[4],
                                         const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/// d += a b in TF32: operands are f32 bits; the hardware ignores the low 13 (use to_tf32 to round instead of cut).
__device__ __forceinline__ void mma_tf32(float (&d)[4],
                                         const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ std::uint32_t to_tf32(float x) {
  std::uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
/// 8x8 blocks of 16-bit elements: lane 8 i + r gives the address of row r of block i (16 bytes); d[i] is then (row g,
/// columns 2q, 2q + 1) of block i, or with _trans (rows 2q, 2q + 1, column g).
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&d)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(std::uint32_t (&d)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(std::uint32_t (&d)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(d[0]), "=r"(d[1])
               : "r"(shared_address(row))
               : "memory");
}
/// The inverse of ldmatrix.
__device__ __forceinline__ void stmatrix_x4(void* row, const std::uint32_t (&d)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(d[0]),
      "r"(d[1]),
      "r"(d[2]),
      "r"(d[3])
      : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(void* row, const std::uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(row)),
               "r"(d[0]),
               "r"(d[1]),
               "r"(d[2]),
               "r"(d[3])
               : "memory");
}
__device__ __forceinline__ void stmatrix_x2_trans(void* row, const std::uint32_t (&d)[2]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(row)),
      "r"(d[0]),
      "r"(d[1])
      : "memory");
}
/// Two f32 as bf16, `low` in the lower half, to nearest even.
__device__ __forceinline__ std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace moesaic::cuda
