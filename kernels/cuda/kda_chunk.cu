// The KDA chunk form on CUDA: which kernels run, and the plain ones' memory (kda_chunk_plain.cuh).
#include "kernels/cuda/kda_chunk.h"
#include "kernels/cuda/kda_chunk_plain.cuh"

namespace moesaic {
namespace {

using namespace cuda::kda;  // NOLINT(google-build-using-namespace): the plain kernels
using cuda::ChunkTable, cuda::device_t, cuda::is_dry, cuda::may_specialise, cuda::report_path;

// Scratch, in elements of acc_t per token and head, for C = chunk_size and few documents (each may add a chunk):
//   forward                2 C             P and N; nothing with `saved`
//   backward               K V / C + V     the state's gradient after each chunk, and Y
//   ... without `saved`  + 2 C + K V / C + V   the records that forward would have saved
// K = V = 128, C = 64, f32: 512, 1536 and 3584 bytes, so 128 MiB, 384 MiB and 896 MiB for T = 8192, H = 32. States of
// heads too large for shared memory (K > 768 in f32 and f64) take K V per document and head in addition.

template <class T, class Op>
Operands<device_t<T>, acc_t<T>> operands_of(const Op& op) {
  using A = acc_t<T>;
  using D = device_t<T>;
  return {reinterpret_cast<const D*>(op.q.template as<T>()),
          reinterpret_cast<const D*>(op.k.template as<T>()),
          reinterpret_cast<const D*>(op.v.template as<T>()),
          op.g.template as<A>(),
          op.beta.template as<A>(),
          op.q.dim(1),
          op.q.dim(2),
          op.v.dim(2)};
}

/// Of one chunk and head, as kda_saved_numel has room for; without states, the triangles only.
template <class Op>
std::int64_t record_numel(const Op& op, bool full) {
  const std::int64_t C = op.chunk_size;
  return full ? kda_saved_numel(0, 1, 1, op.q.dim(2), op.v.dim(2), op.chunk_size) : 2 * C * C;
}
template <class A, class Op>
Records<A> records_at(const Op& op, A* base, bool full) {
  return {base, record_numel(op, full), op.q.dim(1), op.q.dim(2), op.v.dim(2), op.chunk_size, full};
}

struct Scratch {
  TensorView records, state, ds_exit, y;

  template <class Op>
  void take_records(CudaContext& context, const Op& op, bool full) {
    if (!op.saved.empty()) return;
    records = context.scratch.take({ChunkTable(op).num_slots, op.q.dim(1), record_numel(op, full)},
                                   op.g.dtype(),
                                   "kda_chunk.records");
  }
  template <class Op>
  void take_states(CudaContext& context, const Op& op) {
    dispatch_float(op.g.dtype(), [&]<class A>(TypeTag<A>) {
      if constexpr (!std::is_same_v<A, bf16>) {
        const auto numel =
            scan_state_numel<A>(ChunkTable(op), op.q.dim(1), op.q.dim(2), op.v.dim(2));
        if (numel > 0) state = context.scratch.take({numel}, op.g.dtype(), "kda_chunk.state");
      }
    });
  }
};

template <class T>
void forward(const CudaContext& context, const KdaChunkForward& op, const Scratch& scratch) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const ChunkTable chunks(op);
  const auto in = operands_of<T>(op);
  const auto records = op.saved.empty() ? records_at(op, scratch.records.as<A>(), false)
                                        : records_at(op, op.saved.as<A>(), true);
  plain_triangles(context, chunks, in, records);
  plain_forward(context,
                chunks,
                ForwardScan<D, A>{in,
                                  records,
                                  reinterpret_cast<D*>(op.o.as<T>()),
                                  cuda::kda_first_states<A>(op.s0),
                                  cuda::kda_last_states<A>(op.s_final, chunks.documents),
                                  scratch.state.as<A>()});
}

template <class T>
void backward(const CudaContext& context, const KdaChunkBackward& op, const Scratch& scratch) {
  using A = acc_t<T>;
  using D = device_t<T>;
  const ChunkTable chunks(op);
  const auto in = operands_of<T>(op);
  // Only read from here on when they are the op's; Records has one form for both directions.
  const auto records = records_at(
      op, op.saved.empty() ? scratch.records.as<A>() : const_cast<A*>(op.saved.as<A>()), true);
  if (op.saved.empty()) {
    plain_triangles(context, chunks, in, records);
    plain_forward(context,
                  chunks,
                  ForwardScan<D, A>{
                      in, records, nullptr, cuda::kda_first_states<A>(op.s0), {}, scratch.state.as<A>()});
  }
  const auto* d_o = reinterpret_cast<const D*>(op.d_o.as<T>());
  plain_backward(context,
                 chunks,
                 BackwardScan<D, A>{in,
                                    records,
                                    d_o,
                                    cuda::kda_last_states<A>(op.ds_final, chunks.documents),
                                    cuda::kda_first_states<A>(op.ds0),
                                    scratch.ds_exit.as<A>(),
                                    scratch.y.as<A>(),
                                    scratch.state.as<A>()});
  plain_gradients(context,
                  chunks,
                  Gradients<D, A>{in,
                                  records,
                                  d_o,
                                  scratch.ds_exit.as<A>(),
                                  scratch.y.as<A>(),
                                  reinterpret_cast<D*>(op.dq.as<T>()),
                                  reinterpret_cast<D*>(op.dk.as<T>()),
                                  reinterpret_cast<D*>(op.dv.as<T>()),
                                  op.dg.as<A>(),
                                  op.dbeta.as<A>()});
}

}  // namespace

void launch(CudaContext& context, const KdaChunkForward& op) {
  if (may_specialise(context) && cuda::kda_tiled_takes(op)) {
    report_path(context, op, "tiled");
    return cuda::kda_tiled_forward(context, op);
  }
  report_path(context, op, "plain");
  const Arena::Mark mark(context.scratch);
  Scratch scratch;
  scratch.take_records(context, op, false);
  scratch.take_states(context, op);
  if (is_dry(context)) return;
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { forward<T>(context, op, scratch); });
}

void launch(CudaContext& context, const KdaChunkBackward& op) {
  if (may_specialise(context) && cuda::kda_tiled_takes(op)) {
    report_path(context, op, "tiled");
    return cuda::kda_tiled_backward(context, op);
  }
  report_path(context, op, "plain");
  const Arena::Mark mark(context.scratch);
  Scratch scratch;
  scratch.take_records(context, op, true);
  scratch.take_states(context, op);
  scratch.ds_exit =
      context.scratch.take({ChunkTable(op).num_slots, op.q.dim(1), op.q.dim(2), op.v.dim(2)},
                           op.g.dtype(),
                           "kda_chunk.ds_exit");
  scratch.y = context.scratch.take(op.v.shape(), op.g.dtype(), "kda_chunk.y");
  if (is_dry(context)) return;
  dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { backward<T>(context, op, scratch); });
}

}  // namespace moesaic
