#pragma once
// What the kernels of the KDA chunk form share: how documents are cut into chunks, and the choice between the plain
// kernels (any size and dtype) and the tensor-core ones.
#include <type_traits>

#include "kernels/cuda/launch.h"
#include "kernels/ops/kda_chunk.h"

namespace moesaic::cuda {

struct KdaChunkSpan {
  std::int64_t document;
  std::int64_t index;   ///< among the document's chunks
  std::int64_t first;   ///< token
  std::int32_t tokens;  ///< 0: this slot holds no chunk
};

/// The chunks of packed documents. Chunks start at document borders, so their number, sum of ceil(length / chunk_size),
/// is known on the device only; a chunk's *slot* needs no prefix sum:
///
///   slot = begin(document) / chunk_size + document + index
///
/// Slots of different documents do not overlap, the chunks of one document have consecutive slots, and there are
/// num_slots = T / chunk_size + N of them, at most one per document without a chunk. A grid has num_slots blocks per
/// head, and blocks whose slot is empty return; anything kept per chunk is indexed by slot. Passed to kernels by value.
struct ChunkTable {
  const std::int32_t* cu = nullptr;  ///< [N + 1], on the device
  std::int64_t documents = 0, num_slots = 0;
  std::int32_t chunk_size = 0;

  ChunkTable() = default;
  /// For KdaChunkForward and KdaChunkBackward.
  template <class Op>
  explicit ChunkTable(const Op& op)
      : cu(op.cu_seqlens.template as<std::int32_t>()),
        documents(op.cu_seqlens.dim(0) - 1),
        num_slots(op.q.dim(0) / op.chunk_size + documents),
        chunk_size(op.chunk_size) {}

  __host__ __device__ std::int64_t first_slot(std::int64_t document) const {
    return cu[document] / chunk_size + document;
  }
  __host__ __device__ std::int64_t num_chunks(std::int64_t document) const {
    return (cu[document + 1] - cu[document] + chunk_size - 1) / chunk_size;
  }
  /// log2(N) loads; the same for all threads of a block.
  __host__ __device__ KdaChunkSpan at(std::int64_t slot) const {
    std::int64_t low = 0, high = documents;  // the last document with first_slot <= slot
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (first_slot(middle) <= slot ? low : high) = middle;
    }
    const std::int64_t index = slot - first_slot(low);
    const std::int64_t first = cu[low] + index * chunk_size, left = cu[low + 1] - first;
    return {low,
            index,
            first,
            static_cast<std::int32_t>(left < 0            ? 0
                                      : left < chunk_size ? left
                                                          : chunk_size)};
  }
};

/// States [count, H, K, V] of the documents [first, first + count); the others have none.
template <class A>
struct KdaStates {
  A* base = nullptr;
  std::int64_t first = 0, count = 0;

  __host__ __device__ bool has(std::int64_t document) const {
    return document >= first && document < first + count;
  }
  __host__ __device__ std::int64_t index(std::int64_t document) const { return document - first; }
};
/// A tensor of one state per document, or of the first one's alone; empty: of none.
template <class A, class View>
auto kda_first_states(const View& states) {
  auto* base = states.template as<A>();  // const as the view
  return KdaStates<std::remove_pointer_t<decltype(base)>>{
      base, 0, base == nullptr ? 0 : states.dim(0)};
}
/// The same, or of the last one's alone.
template <class A, class View>
auto kda_last_states(const View& states, std::int64_t documents) {
  auto of = kda_first_states<A>(states);
  of.first = documents - of.count;
  return of;
}

/// Whether the tensor-core kernels take the op. `saved` has a layout of its own on every path, so both directions must
/// answer alike for the same q, k, v, g, beta and saved: the answer may depend on their dtypes, sizes and alignment and
/// on chunk_size, on nothing else.
bool kda_tiled_takes(const KdaChunkForward& op);
bool kda_tiled_takes(const KdaChunkBackward& op);
/// As launch(), for ops that kda_tiled_takes: scratch is taken before the stream is asked whether it is dry.
void kda_tiled_forward(CudaContext& context, const KdaChunkForward& op);
void kda_tiled_backward(CudaContext& context, const KdaChunkBackward& op);

}  // namespace moesaic::cuda
