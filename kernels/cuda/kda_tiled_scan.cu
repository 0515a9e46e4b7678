// The chain over a document's chunks, per head and 16 value channels a warp: forward carries the state, the reverse scan its
// gradient. Both live in the accumulators of their warp, transposed [16 values, 128 keys]: rounded to bf16 an accumulator
// fragment is the left operand of the next product, so that nothing of the chain passes through shared memory and warps
// wait for each other only where they share the chunk's operands, which arrive in bulk, kStages deep.
#include "kernels/cuda/kda_tiled_scan.cuh"

namespace moesaic::cuda {
namespace {

using namespace kda_scan;  // NOLINT(google-build-using-namespace): the parts of this file

/// Where the head's state of the document begins, null without one.
template <class A>
__device__ __forceinline__ A* state_of(const KdaStates<A>& states,
                                       const KdaTiledInput& in,
                                       const Place& at) {
  if (!states.has(at.document)) return nullptr;
  return states.base +
         (states.index(at.document) * in.heads + at.head) * std::int64_t{kKdaDim} * kKdaDim;
}

/// W = W0 - Wk S, U = B W, O = Qh S + P U, S = diag(decay) S + Kb^T U.
template <bool kOutput, bool kFull>
__device__ __forceinline__ void forward_scan(const KdaTiledInput& in,
                                             const KdaRecords& records,
                                             b16* o,
                                             const KdaStates<float>& s_final,
                                             const Ring& ring,
                                             const Place& at) {
  const int lane = ring.lane, group_value = at.value - ring.warp * 16;
  const std::int64_t chunks = in.chunks.num_chunks(at.document),
                     slot = in.chunks.first_slot(at.document);
  const auto load = [&](std::int64_t i) {
    if (threadIdx.x != 0 || i >= chunks) return;
    const std::byte* record = records.at(slot + i, at.head);
    ring.load(static_cast<int>(i % (2 * kStages)),
              record,
              record + KdaRecord::kW + group_value / 16 * kColumnBytes,
              ring.layout.warps * kColumnBytes);
  };
  const bool aligned = is_aligned_16(o);
  load(0);
  load(1);
  Accumulator s;
  load_state(s, state_of(in.s0, in, at), at.value, lane);
  for (std::int64_t i = 0; i < chunks; ++i) {
    const int step = static_cast<int>(i % (2 * kStages));
    std::byte* record = records.at(slot + i, at.head);
    if (kFull && lane == 0) bulk_wait_read<0>();
    __syncthreads();  // every warp has left the stage that is filled next, and its stores have
    load(i + 2);
    ring.wait(step);
    std::uint32_t state[kKdaDim / 16][4];
    round_state(state, s);
    if constexpr (kFull)
      keep_state(state, ring.state(), record + KdaRecord::kState, at.value, lane);
    Columns w;
    b16* columns = ring.columns(step);
#pragma unroll
    for (int n = 0; n < kKdaChunk / 16; ++n) {
      std::uint32_t x[4];
      ldmatrix_x4_trans(x, column_piece(columns, n * 16, lane));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[2 * n + j / 2][j % 2 * 2] = low_half(x[j]);
        w[2 * n + j / 2][j % 2 * 2 + 1] = high_half(x[j]);
      }
    }
    add_state_times_rows(w, state, ring.tile(step, KdaRecord::kMinus), lane);
    std::uint32_t u[kKdaChunk / 16][4];
    scale_by_beta(u, w, ring.numbers(step, KdaRecord::kBeta), lane);
    if constexpr (kFull) {
      __syncwarp();
      put_columns(columns, w, lane);
      keep_columns(columns, record + KdaRecord::kW, at.value, lane);
      if (lane == 0) bulk_commit();
    }
    decay_state(s, ring.numbers(step, KdaRecord::kDecay), lane);
    add_columns_times_rows(s, u, ring.tile(step, KdaRecord::kKeys), lane);
    if constexpr (kOutput) {
      Columns out = {};
      add_state_times_rows(out, state, ring.tile(step, KdaRecord::kQueries), lane);
      const b16* pairs = ring.tile(step, KdaRecord::kPairs);
#pragma unroll
      for (int k = 0; k < kKdaTiles; ++k) {
#pragma unroll
        for (int n = k; n < kKdaTiles; ++n) {
          std::uint32_t b[4];
          load_b<WideTile64>(b, pairs, n * 16, k * 16, lane);
          multiply_16(out[2 * n], out[2 * n + 1], u[k], b);
        }
      }
      put_columns(ring.output(), out, lane);
      __syncwarp();
      const std::int64_t first = in.chunks.cu[at.document] + i * kKdaChunk;
      store_output(ring.output(),
                   o + (first * in.heads + at.head) * kKdaDim + at.value,
                   std::int64_t{in.heads} * kKdaDim,
                   static_cast<int>(in.chunks.cu[at.document + 1] - first),
                   aligned,
                   lane);
      __syncwarp();
    }
  }
  store_state(s, state_of(s_final, in, at), at.value, lane);
  if (kFull && lane == 0) bulk_wait<0>();
}

/// dU = P^T dO + Kb dS', dS = diag(decay) dS' + Qh^T dO - Wk^T B dU, from the last chunk to the first.
__device__ __forceinline__ void reverse_scan(const KdaTiledInput& in,
                                             const KdaRecords& records,
                                             const KdaRecords& gradients,
                                             const KdaTiledGradients& out,
                                             const Ring& ring,
                                             const Place& at) {
  const int lane = ring.lane;
  const std::int64_t chunks = in.chunks.num_chunks(at.document),
                     slot = in.chunks.first_slot(at.document);
  const auto* d_o = static_cast<const b16*>(out.d_o);
  const bool aligned = is_aligned_16(d_o);
  const auto load =
      [&](std::int64_t i) {  // step i is chunk chunks - 1 - i; each warp its own columns of dO
        if (i < chunks) {
          const int step = static_cast<int>(i % (2 * kStages));
          const std::int64_t chunk = chunks - 1 - i,
                             first = in.chunks.cu[at.document] + chunk * kKdaChunk;
          if (threadIdx.x == 0) ring.load(step, records.at(slot + chunk, at.head), nullptr, 0);
          const std::int64_t tokens = in.chunks.cu[at.document + 1] - first;
          const b16* from = d_o + (first * in.heads + at.head) * kKdaDim + at.value;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int piece = lane + j * kWarp, row = piece / 2, column = piece % 2 * 8;
            b16* to = ring.columns(step) + ColumnTile::at(row, column);
            const b16* source = from + std::int64_t{row} * in.heads * kKdaDim + column;
            if (aligned) {
              cp_async_16(to, row < tokens ? source : d_o, row < tokens);
            } else {
              *reinterpret_cast<uint4*>(to) = row < tokens ? load_16(source, false) : uint4{};
            }
          }
        }
        cp_async_commit();
      };
  load(0);
  load(1);
  Accumulator ds;
  load_state(ds, state_of(out.ds_final, in, at), at.value, lane);
  for (std::int64_t i = 0; i < chunks; ++i) {
    const int step = static_cast<int>(i % (2 * kStages));
    std::byte* record = gradients.at(slot + chunks - 1 - i, at.head);
    if (lane == 0) bulk_wait_read<0>();
    cp_async_wait<1>();
    __syncthreads();  // every warp has left the stage that is filled next, and its stores have
    load(i + 2);
    ring.wait(step);
    std::uint32_t state[kKdaDim / 16][4];
    round_state(state, ds);
    keep_state(state, ring.state(), record + KdaGradientRecord::kDs, at.value, lane);
    std::uint32_t d_out[kKdaChunk / 16][4];
    b16* columns = ring.columns(step);
#pragma unroll
    for (int k = 0; k < kKdaChunk / 16; ++k)
      ldmatrix_x4_trans(d_out[k], column_piece(columns, k * 16, lane));
    Columns du = {};
    add_state_times_rows(du, state, ring.tile(step, KdaRecord::kKeys), lane);
    const b16* pairs = ring.tile(step, KdaRecord::kPairs);
#pragma unroll
    for (int k = 0; k < kKdaTiles; ++k) {
#pragma unroll
      for (int n = 0; n <= k; ++n) {
        std::uint32_t b[4];
        load_b_trans<WideTile64>(b, pairs, k * 16, n * 16, lane);
        multiply_16(du[2 * n], du[2 * n + 1], d_out[k], b);
      }
    }
    __syncwarp();
    put_columns(columns, du, lane);
    keep_columns(columns, record + KdaGradientRecord::kDu, at.value, lane);
    if (lane == 0) bulk_commit();
    decay_state(ds, ring.numbers(step, KdaRecord::kDecay), lane);
    add_columns_times_rows(ds, d_out, ring.tile(step, KdaRecord::kQueries), lane);
    std::uint32_t scaled[kKdaChunk / 16][4];
    scale_by_beta(scaled, du, ring.numbers(step, KdaRecord::kBeta), lane);
    add_columns_times_rows(ds, scaled, ring.tile(step, KdaRecord::kMinus), lane);
  }
  store_state(ds, state_of(out.ds0, in, at), at.value, lane);
  if (lane == 0) bulk_wait<0>();
}

/// blockIdx.x = ((document * heads) + head) * slices + slice.
__device__ __forceinline__ Place place_of(const KdaTiledInput& in, int warps) {
  const unsigned slices = static_cast<unsigned>(kKdaDim / 16 / warps);
  const unsigned slice = blockIdx.x % slices, row = blockIdx.x / slices;
  return {row / static_cast<unsigned>(in.num_heads),
          in.first_head + static_cast<int>(row % static_cast<unsigned>(in.num_heads)),
          static_cast<int>(slice) * warps * 16 + static_cast<int>(threadIdx.x) / kWarp * 16};
}
__device__ __forceinline__ Ring make_ring(unsigned char* memory, std::uint64_t* barriers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i)
      mbarrier_init(&barriers[i], 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  return {memory,
          barriers,
          Layout{static_cast<int>(blockDim.x) / kWarp},
          static_cast<int>(threadIdx.x) / kWarp,
          static_cast<int>(threadIdx.x) % kWarp};
}

template <bool kFull>
__global__ void __launch_bounds__(kMaxWarps* kWarp, 1) forward_kernel(const KdaTiledInput in,
                                                                      const KdaRecords records,
                                                                      b16* o,
                                                                      KdaStates<float> s_final) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ std::uint64_t barriers[kStages];
  const Ring ring = make_ring(memory, barriers);
  forward_scan<true, kFull>(in, records, o, s_final, ring, place_of(in, ring.layout.warps));
}

/// blockIdx.y = 0: the reverse scan; 1: the forward one, which it does not need.
__global__ void __launch_bounds__(kMaxWarps* kWarp, 1) reverse_kernel(const KdaTiledInput in,
                                                                      const KdaRecords records,
                                                                      const KdaRecords gradients,
                                                                      const KdaTiledGradients out) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ std::uint64_t barriers[kStages];
  const Ring ring = make_ring(memory, barriers);
  const Place at = place_of(in, ring.layout.warps);
  if (blockIdx.y == 0) {
    reverse_scan(in, records, gradients, out, ring, at);
  } else {
    forward_scan<false, true>(in, records, nullptr, {}, ring, at);
  }
}

/// Warps per block: four share loads, two spread a short list of heads over more multiprocessors. A value channel's bits
/// are the same either way.
int warps_for(std::int64_t chains) {
  return chains * (kKdaDim / 16 / kMaxWarps) >= 96 ? kMaxWarps : kMaxWarps / 2;
}
template <class Kernel>
int allow_shared(Kernel* kernel, int warps) {
  const int bytes = Layout{warps}.total();
  static_assert(Layout{kMaxWarps}.total() <= 227 * 1024);
  MOESAIC_CUDA_CALL(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  return bytes;
}

}  // namespace

void kda_tiled_scan(cudaStream_t stream,
                    const KdaTiledInput& in,
                    const KdaRecords& records,
                    bool full,
                    void* o,
                    KdaStates<float> s_final) {
  const std::int64_t chains = in.chunks.documents * in.num_heads;
  if (chains == 0) return;
  const int warps = warps_for(chains);
  const auto grid = static_cast<unsigned>(chains * (kKdaDim / 16 / warps));
  auto* kernel = full ? forward_kernel<true> : forward_kernel<false>;
  const int shared = allow_shared(kernel, warps);
  kernel<<<grid, static_cast<unsigned>(warps * kWarp), shared, stream>>>(
      in, records, static_cast<b16*>(o), s_final);
  check_launch("kernel kda_chunk_forward: scan");
}

void kda_tiled_reverse(cudaStream_t stream,
                       const KdaTiledInput& in,
                       const KdaRecords& records,
                       const KdaRecords& gradients,
                       const KdaTiledGradients& out,
                       bool forward) {
  const std::int64_t chains = in.chunks.documents * in.num_heads;
  if (chains == 0) return;
  const int directions = forward ? 2 : 1, warps = warps_for(chains * directions);
  const dim3 grid(static_cast<unsigned>(chains * (kKdaDim / 16 / warps)),
                  static_cast<unsigned>(directions));
  const int shared = allow_shared(reverse_kernel, warps);
  reverse_kernel<<<grid, static_cast<unsigned>(warps * kWarp), shared, stream>>>(
      in, records, gradients, out);
  check_launch("kernel kda_chunk_backward: scans");
}

}  // namespace moesaic::cuda
