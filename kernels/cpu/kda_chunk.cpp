#include "kernels/ops/kda_chunk.h"

#include <atomic>

#include "kernels/cpu/documents.h"
#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/kda_core_backward.h"
#include "kernels/cpu/thread_pool.h"

namespace moesaic {
namespace {

using cpu::Carver;
using cpu::Documents;
using cpu::KdaChunkData;
using cpu::KdaChunkGradients;
using cpu::KdaChunkInput;
using cpu::KdaRecord;
using cpu::KdaSizes;

template <class Op>
KdaSizes sizes_of(const Op& op) {
  return {op.q.dim(2), op.v.dim(2), op.chunk_size};
}

/// The op's tensors from token t of head h on.
template <class T, class Op>
KdaChunkInput<T> input_at(const Op& op, std::int64_t t, std::int64_t h, std::int64_t tokens) {
  using A = acc_t<T>;
  const std::int64_t heads = op.q.dim(1), row = t * heads + h;
  return {op.q.template as<T>() + row * op.q.dim(2),
          op.k.template as<T>() + row * op.q.dim(2),
          op.v.template as<T>() + row * op.v.dim(2),
          op.g.template as<A>() + row * op.q.dim(2),
          op.beta.template as<A>() + row,
          heads,
          tokens};
}

/// Records of document n start here; the documents' ranges do not overlap whatever their lengths.
std::int64_t first_record(const Documents& documents, const KdaSizes& n, std::int64_t document) {
  return documents.begin(document) / n.C + document;
}

/// Copies one [K, V] state between its tensor and padded rows; a null source is zero.
template <class A>
void load_state(const KdaSizes& n, A* out, const A* in) {
  if (in == nullptr) {
    for (std::int64_t c = 0; c < n.Kp; ++c)
      std::fill_n(out + c * n.ldv, n.Vp, A(0));
  } else {
    cpu::gather_rows(out, n.ldv, n.Kp, n.Vp, in, n.K, n.V, n.V);
  }
}
/// The state of a document and head; `index` counts the documents that may have one from 0: null for the others, and
/// without a tensor.
template <class View>
auto* state_at(const View& states, std::int64_t index, std::int64_t h, auto tag) {
  using A = typename decltype(tag)::type;
  auto* base = states.template as<A>();
  if (base == nullptr || index < 0 || index >= states.dim(0)) return decltype(base)(nullptr);
  return base + (index * states.dim(1) + h) * states.dim(2) * states.dim(3);
}
/// The same for tensors that hold the last documents' states.
template <class View>
auto* last_state_at(const View& states,
                    const Documents& documents,
                    std::int64_t document,
                    std::int64_t h,
                    auto tag) {
  const std::int64_t given = states.empty() ? 0 : states.dim(0);
  return state_at(states, document - (documents.count - given), h, tag);
}

/// Runs body(worker, document, head) for all documents and heads; `worker` < pool.num_threads()
/// belongs to one thread at a time.
template <class F>
void for_each_head(ThreadPool& pool, std::int64_t documents, std::int64_t heads, const F& body) {
  std::atomic<std::int64_t> next{0};
  pool.parallel_for(pool.num_threads(), 1, [&](std::int64_t worker, std::int64_t) {
    const cpu::FlushDenormals flush;
    for (std::int64_t i = next.fetch_add(1); i < documents * heads; i = next.fetch_add(1))
      body(worker, i / heads, i % heads);
  });
}

// ---------------------------------------------------------------- forward
/// One thread's memory: a chunk, the running state, the output rows and one record.
template <class A>
struct ForwardWorkspace {
  KdaSizes n;
  Carver<A> carver;
  KdaChunkData<A> data;
  A *state, *out, *record;

  ForwardWorkspace(const KdaSizes& sizes, A* base)
      : n(sizes),
        carver(base),
        data(n, carver),
        state(carver.take(n.Kp * n.ldv)),
        out(carver.take(n.C * n.ldv)),
        record(carver.take(n.record_numel())) {}
};

/// Loads a chunk and computes its triangles, corrections and, in `state`, the state after it.
template <class T>
void forward_chunk(const KdaSizes& n,
                   const KdaChunkInput<T>& in,
                   KdaChunkData<acc_t<T>>& data,
                   const KdaRecord<acc_t<T>>& record,
                   const acc_t<T>* entry) {
  cpu::kda_load(n, in, data);
  cpu::kda_decays(n, data);
  cpu::kda_triangles(n, data, record);
  cpu::kda_corrections(n, data, record, entry);
}

template <class T>
void forward_head(const KdaChunkForward& op,
                  const Documents& documents,
                  ForwardWorkspace<acc_t<T>>& ws,
                  std::int64_t document,
                  std::int64_t h) {
  using A = acc_t<T>;
  const KdaSizes& n = ws.n;
  const std::int64_t heads = op.q.dim(1), begin = documents.begin(document),
                     end = documents.end(document);
  load_state<A>(n, ws.state, state_at(op.s0, document, h, TypeTag<A>{}));
  for (std::int64_t t = begin; t < end; t += n.C) {
    const std::int64_t tokens = std::min(n.C, end - t);
    A* memory = ws.record;
    if (!op.saved.empty()) {
      memory = op.saved.template as<A>() +
               ((first_record(documents, n, document) + (t - begin) / n.C) * heads + h) *
                   n.record_numel();
    }
    const KdaRecord<A> record(n, memory);
    if (!op.saved.empty()) std::copy_n(ws.state, n.Kp * n.ldv, record.s);
    forward_chunk<T>(n, input_at<T>(op, t, h, tokens), ws.data, record, ws.state);
    cpu::kda_output(n, ws.data, record, ws.state, ws.out);
    cpu::scatter_rows(
        op.o.template as<T>() + (t * heads + h) * n.V, heads * n.V, ws.out, n.ldv, tokens, n.V);
    cpu::kda_advance(n, ws.data, ws.state);
  }
  if (A* s = last_state_at(op.s_final, documents, document, h, TypeTag<A>{}))
    cpu::scatter_rows(s, n.V, ws.state, n.ldv, n.K, n.V);
}

template <class T>
void forward(ThreadPool& pool,
             const KdaChunkForward& op,
             acc_t<T>* scratch,
             std::int64_t per_thread) {
  const Documents documents(op.cu_seqlens, op.q.dim(0));
  const KdaSizes n = sizes_of(op);
  for_each_head(pool,
                documents.count,
                op.q.dim(1),
                [&](std::int64_t worker, std::int64_t document, std::int64_t h) {
                  ForwardWorkspace<acc_t<T>> ws(n, scratch + worker * per_thread);
                  forward_head<T>(op, documents, ws, document, h);
                });
}

// ---------------------------------------------------------------- backward
/// One thread's memory: a chunk, its gradients, the running state and the records of one document
/// of up to `chunks` chunks.
template <class A>
struct BackwardWorkspace {
  KdaSizes n;
  Carver<A> carver;
  KdaChunkData<A> data;
  KdaChunkGradients<A> gradients;
  A *state, *records;

  BackwardWorkspace(const KdaSizes& sizes, std::int64_t chunks, A* base)
      : n(sizes),
        carver(base),
        data(n, carver),
        gradients(n, carver),
        state(carver.take(n.Kp * n.ldv)),
        records(carver.take(chunks * n.record_numel())) {}
};

/// Recomputes the records of a document.
template <class T>
void sweep(const KdaChunkBackward& op,
           BackwardWorkspace<acc_t<T>>& ws,
           std::int64_t begin,
           std::int64_t end,
           std::int64_t document,
           std::int64_t h) {
  using A = acc_t<T>;
  const KdaSizes& n = ws.n;
  load_state<A>(n, ws.state, state_at(op.s0, document, h, TypeTag<A>{}));
  for (std::int64_t t = begin; t < end; t += n.C) {
    const KdaRecord<A> record(n, ws.records + (t - begin) / n.C * n.record_numel());
    std::copy_n(ws.state, n.Kp * n.ldv, record.s);
    forward_chunk<T>(n, input_at<T>(op, t, h, std::min(n.C, end - t)), ws.data, record, ws.state);
    if (t + n.C < end) cpu::kda_advance(n, ws.data, ws.state);
  }
}

template <class T>
void backward_chunk(const KdaChunkBackward& op,
                    BackwardWorkspace<acc_t<T>>& ws,
                    const KdaRecord<acc_t<T>>& record,
                    std::int64_t t,
                    std::int64_t tokens,
                    std::int64_t h) {
  using A = acc_t<T>;
  const KdaSizes& n = ws.n;
  const std::int64_t heads = op.q.dim(1), row = t * heads + h, k_stride = heads * n.K,
                     v_stride = heads * n.V;
  auto& gr = ws.gradients;
  const auto in = input_at<T>(op, t, h, tokens);
  cpu::kda_load(n, in, ws.data);
  cpu::kda_decays(n, ws.data);
  cpu::gather_rows(gr.d_o,
                   n.ldv,
                   ws.data.rows,
                   n.Vp,
                   op.d_o.template as<T>() + row * n.V,
                   tokens,
                   n.V,
                   v_stride);
  cpu::kda_chunk_backward(
      n, ws.data, record, gr, in.g, op.dg.template as<A>() + row * n.K, k_stride);
  cpu::scatter_rows(op.dq.template as<T>() + row * n.K, k_stride, gr.dq, n.ldk, tokens, n.K);
  cpu::scatter_rows(op.dk.template as<T>() + row * n.K, k_stride, gr.krow, n.ldk, tokens, n.K);
  cpu::scatter_rows(op.dv.template as<T>() + row * n.V, v_stride, gr.du, n.ldv, tokens, n.V);
  for (std::int64_t r = 0; r < tokens; ++r)
    op.dbeta.template as<A>()[row + r * heads] = gr.dbeta[r];
}

template <class T>
void backward_head(const KdaChunkBackward& op,
                   const Documents& documents,
                   BackwardWorkspace<acc_t<T>>& ws,
                   std::int64_t document,
                   std::int64_t h) {
  using A = acc_t<T>;
  const KdaSizes& n = ws.n;
  const std::int64_t heads = op.q.dim(1), begin = documents.begin(document),
                     end = documents.end(document);
  if (op.saved.empty()) sweep<T>(op, ws, begin, end, document, h);
  load_state<A>(
      n, ws.gradients.ds, last_state_at(op.ds_final, documents, document, h, TypeTag<A>{}));
  for (std::int64_t chunk = n.num_chunks(end - begin) - 1; chunk >= 0; --chunk) {
    const std::int64_t t = begin + chunk * n.C;
    // Records are only read here; KdaRecord has one form for both directions.
    A* memory =
        op.saved.empty()
            ? ws.records + chunk * n.record_numel()
            : const_cast<A*>(op.saved.template as<A>()) +
                  ((first_record(documents, n, document) + chunk) * heads + h) * n.record_numel();
    backward_chunk<T>(op, ws, KdaRecord<A>(n, memory), t, std::min(n.C, end - t), h);
  }
  if (A* s = state_at(op.ds0, document, h, TypeTag<A>{}))
    cpu::scatter_rows(s, n.V, ws.gradients.ds, n.ldv, n.K, n.V);
}

template <class T>
void backward(ThreadPool& pool,
              const KdaChunkBackward& op,
              acc_t<T>* scratch,
              std::int64_t per_thread,
              std::int64_t chunks) {
  const Documents documents(op.cu_seqlens, op.q.dim(0));
  const KdaSizes n = sizes_of(op);
  for_each_head(pool,
                documents.count,
                op.q.dim(1),
                [&](std::int64_t worker, std::int64_t document, std::int64_t h) {
                  BackwardWorkspace<acc_t<T>> ws(n, chunks, scratch + worker * per_thread);
                  backward_head<T>(op, documents, ws, document, h);
                });
}

}  // namespace

void launch(CpuContext& context, const KdaChunkForward& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t per_thread = ForwardWorkspace<float>(sizes_of(op), nullptr).carver.used();
  const auto scratch = context.scratch.take(
      {context.pool.num_threads(), per_thread}, op.g.dtype(), "kda_chunk.forward");
  context.stream.enqueue([op, scratch, per_thread, &pool = context.pool] {
    dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) {
      forward<T>(pool, op, scratch.as<acc_t<T>>(), per_thread);
    });
  });
}

void launch(CpuContext& context, const KdaChunkBackward& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t chunks = op.saved.empty() ? sizes_of(op).num_chunks(op.q.dim(0)) : 0;
  const std::int64_t per_thread =
      BackwardWorkspace<float>(sizes_of(op), chunks, nullptr).carver.used();
  const auto scratch = context.scratch.take(
      {context.pool.num_threads(), per_thread}, op.g.dtype(), "kda_chunk.backward");
  context.stream.enqueue([op, scratch, per_thread, chunks, &pool = context.pool] {
    dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) {
      backward<T>(pool, op, scratch.as<acc_t<T>>(), per_thread, chunks);
    });
  });
}

}  // namespace moesaic
