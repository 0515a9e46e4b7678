#pragma once
// The tensor-core kernels of the KDA chunk form and what they pass to each other: bf16 operands, 128 channels, chunks of 64
// tokens in 4 tiles of 16. Host code, and the layout of a chunk's record for device code.
//
// Notation of SPEC 1.4 with B = diag(beta). The only inverse kept is N = (I + A B)^-1 A, strictly lower, from which
//   W = (I - N B) (V - Kh S),  U = B W   and   Y = X^-T dU = (I - N^T B) dU,  dR = B Y
// follow without a division by beta. Every decay is a product of numbers <= 1, as in the CPU version.
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/kda_chunk.h"

namespace moesaic::cuda {

constexpr int kKdaDim = 128;    // channels of keys and of values
constexpr int kKdaChunk = 64;   // tokens
constexpr int kKdaTokens = 16;  // of a tile
constexpr int kKdaTiles = kKdaChunk / kKdaTokens;

/// Byte offsets in a chunk's record. Tiles lie as they do in shared memory (kda_tiles.cuh), so that they travel in bulk.
/// [kKeys, kW) is what both scans read.
struct KdaRecord {
  static constexpr int kWide = kKdaChunk * kKdaDim * 2, kSquare = kKdaChunk * kKdaChunk * 2;
  static constexpr int kKeys = 0;                     ///< [64, 128] k scaled to the chunk's end
  static constexpr int kQueries = kKeys + kWide;      ///< [64, 128] q scaled from the chunk's start
  static constexpr int kMinus = kQueries + kWide;     ///< [64, 128] -(I - N B) Kh
  static constexpr int kPairs = kMinus + kWide;       ///< [64, 64] P
  static constexpr int kDecay = kPairs + kSquare;     ///< [128] f32, decay over the chunk
  static constexpr int kBeta = kDecay + kKdaDim * 4;  ///< [64] f32
  static constexpr int kW =
      kBeta + kKdaChunk * 4;  ///< [64, 128] in columns of 16: (I - N B) V, after the scan W
  static constexpr int kForward = kW + kWide;  ///< end of what forward alone needs
  static constexpr int kInverse = kForward;    ///< [64, 64] -B N
  static constexpr int kState =
      kInverse + kSquare;  ///< [128 values, 128 keys] state on entry, transposed
  static constexpr int kFull = kState + kKdaDim * kKdaDim * 2;
};
/// What the reverse scan leaves per chunk: dU in columns of 16, and dS' as kState.
struct KdaGradientRecord {
  static constexpr int kDu = 0, kDs = KdaRecord::kWide, kFull = kDs + kKdaDim * kKdaDim * 2;
};

/// Records of (slot, head), `stride` bytes apart; heads [first_head, first_head + heads) have one.
struct KdaRecords {
  std::byte* base = nullptr;
  std::int64_t stride = 0;
  int first_head = 0, heads = 0;

  __host__ __device__ std::byte* at(std::int64_t slot, int head) const {
    return base + (slot * heads + head - first_head) * stride;
  }
};

/// Arguments that the kernels share. Pointers are null for tensors that are not there.
struct KdaTiledInput {
  ChunkTable chunks;
  const void *q = nullptr, *k = nullptr, *v = nullptr;  ///< bf16
  const float *g = nullptr, *beta = nullptr;
  KdaStates<const float> s0;
  int heads = 0;                      ///< of the tensors
  int first_head = 0, num_heads = 0;  ///< of this launch
};
template <class Op>
KdaTiledInput kda_tiled_input(const Op& op) {
  KdaTiledInput in;
  in.chunks = ChunkTable(op);
  in.q = op.q.data();
  in.k = op.k.data();
  in.v = op.v.data();
  in.g = op.g.template as<float>();
  in.beta = op.beta.template as<float>();
  in.s0 = kda_first_states<float>(op.s0);
  in.heads = in.num_heads = static_cast<int>(op.q.dim(1));
  return in;
}

struct KdaTiledGradients {
  const void* d_o = nullptr;
  KdaStates<const float> ds_final;
  void *dq = nullptr, *dk = nullptr, *dv = nullptr;
  float *dg = nullptr, *dbeta = nullptr;
  KdaStates<float> ds0;
};

/// Fills the records but for kState; `full` ones with kInverse.
void kda_tiled_prepare(cudaStream_t stream,
                       const KdaTiledInput& in,
                       const KdaRecords& records,
                       bool full);
/// Writes o (may be null) and s_final (may have none); with `full` records W and the states.
void kda_tiled_scan(cudaStream_t stream,
                    const KdaTiledInput& in,
                    const KdaRecords& records,
                    bool full,
                    void* o,
                    KdaStates<float> s_final);
/// The reverse scan: dU, dS' of every chunk, ds0; with `forward` the states and W of the records besides.
void kda_tiled_reverse(cudaStream_t stream,
                       const KdaTiledInput& in,
                       const KdaRecords& records,
                       const KdaRecords& gradients,
                       const KdaTiledGradients& out,
                       bool forward);
/// All gradients of every chunk from both kinds of records.
void kda_tiled_gradients(cudaStream_t stream,
                         const KdaTiledInput& in,
                         const KdaRecords& records,
                         const KdaRecords& gradients,
                         const KdaTiledGradients& out);

}  // namespace moesaic::cuda
