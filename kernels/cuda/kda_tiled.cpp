// The tensor-core path of the KDA chunk form: when it is taken, and its passes over groups of heads.
#include "kernels/cuda/kda_tiled.h"

namespace moesaic::cuda {
namespace {

// Chunks times heads whose records lie in scratch at a time: enough to fill a large device. The heads of a group share
// nothing, so the number changes no bits.
constexpr std::int64_t kGroupRecords = 4096;

/// What both directions see alike (see kda_tiled_takes).
template <class Op>
bool takes(const Op& op) {
  return op.q.dtype() == DType::bf16 && op.q.dim(2) == kKdaDim && op.v.dim(2) == kKdaDim &&
         op.chunk_size == kKdaChunk && is_aligned(op.q.data(), 16) && is_aligned(op.k.data(), 16) &&
         is_aligned(op.v.data(), 16) && is_aligned(op.g.data(), 16) &&
         is_aligned(op.saved.data(), 16) && op.q.dim(1) <= 65535 &&
         ChunkTable(op).documents * op.q.dim(1) < (std::int64_t{1} << 26);
}

int heads_per_group(const ChunkTable& chunks, std::int64_t heads) {
  const std::int64_t fit = (kGroupRecords + 64) / std::max<std::int64_t>(1, chunks.num_slots);
  return static_cast<int>(std::clamp<std::int64_t>(std::max<std::int64_t>(fit, 32), 1, heads));
}

/// Memory for the records of `heads` heads.
KdaRecords take_records(CudaContext& context,
                        const ChunkTable& chunks,
                        int heads,
                        std::int64_t stride,
                        const char* tag) {
  const auto memory = context.scratch.take({chunks.num_slots * heads, stride / 4}, DType::f32, tag);
  return {memory.data(), stride, 0, heads};
}
/// The records that `saved` holds.
KdaRecords saved_records(const ConstTensorView& saved, int heads) {
  // Backward only reads them; one type serves both directions.
  return {const_cast<std::byte*>(saved.data()), KdaRecord::kFull, 0, heads};
}

template <class Body>
void for_each_group(KdaTiledInput in, int group, const Body& body) {
  const int heads = in.heads;
  for (in.first_head = 0; in.first_head < heads; in.first_head += group) {
    in.num_heads = std::min(group, heads - in.first_head);
    body(in);
  }
}

}  // namespace

bool kda_tiled_takes(const KdaChunkForward& op) {
  return takes(op);
}
bool kda_tiled_takes(const KdaChunkBackward& op) {
  return takes(op);
}

void kda_tiled_forward(CudaContext& context, const KdaChunkForward& op) {
  const Arena::Mark mark(context.scratch);
  const KdaTiledInput in = kda_tiled_input(op);
  const bool full = !op.saved.empty();
  const int group = full ? in.heads : heads_per_group(in.chunks, in.heads);
  KdaRecords records =
      full ? saved_records(op.saved, in.heads)
           : take_records(context, in.chunks, group, KdaRecord::kForward, "kda_chunk.forward");
  if (is_dry(context)) return;
  const auto stream = native_stream(context);
  const auto s_final = kda_last_states<float>(op.s_final, in.chunks.documents);
  for_each_group(in, group, [&](const KdaTiledInput& part) {
    if (!full) records.first_head = part.first_head;
    kda_tiled_prepare(stream, part, records, full);
    kda_tiled_scan(stream, part, records, full, op.o.data(), s_final);
  });
}

void kda_tiled_backward(CudaContext& context, const KdaChunkBackward& op) {
  const Arena::Mark mark(context.scratch);
  const KdaTiledInput in = kda_tiled_input(op);
  const bool saved = !op.saved.empty();
  const int group = heads_per_group(in.chunks, in.heads);
  KdaRecords gradients =
      take_records(context, in.chunks, group, KdaGradientRecord::kFull, "kda_chunk.backward");
  KdaRecords records =
      saved ? saved_records(op.saved, in.heads)
            : take_records(context, in.chunks, group, KdaRecord::kFull, "kda_chunk.forward");
  if (is_dry(context)) return;
  const KdaTiledGradients out{.d_o = op.d_o.data(),
                              .ds_final = kda_last_states<float>(op.ds_final, in.chunks.documents),
                              .dq = op.dq.data(),
                              .dk = op.dk.data(),
                              .dv = op.dv.data(),
                              .dg = op.dg.as<float>(),
                              .dbeta = op.dbeta.as<float>(),
                              .ds0 = kda_first_states<float>(op.ds0)};
  const auto stream = native_stream(context);
  for_each_group(in, group, [&](const KdaTiledInput& part) {
    gradients.first_head = part.first_head;
    if (!saved) {
      records.first_head = part.first_head;
      kda_tiled_prepare(stream, part, records, true);
    }
    kda_tiled_reverse(stream, part, records, gradients, out, !saved);
    kda_tiled_gradients(stream, part, records, gradients, out);
  });
}

}  // namespace moesaic::cuda
