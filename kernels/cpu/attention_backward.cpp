#include <cmath>

#include "kernels/cpu/attention_common.h"

namespace moesaic {
namespace {
using namespace cpu;

template <class A>
struct Backward {
  const AttentionBackward& op;
  AttentionInputs in;
  Visibility see;
  SelectionBits bits;
  PathRule rule;
  A* dkr;  // [H, Tk, dr], one slice per head
  const A* lse;

  const AttentionSizes& size() const { return in.size; }
  Rows d_out(std::int64_t head) const {
    return {op.d_o, head * size().dv, size().heads * size().dv, size().dv};
  }

  // What a (head, document) task keeps: q, d_o, dq of all the document's queries, and one key tile.
  struct Work {
    A *q, *d_o, *dq, *delta, *lse;
    A *key, *key_t, *value_t, *dk, *dv, *p, *ds;
  };
  static std::size_t slot_size(const AttentionSizes& s, const PathRule& rule) {
    const std::int64_t rows = tiles_of(rule.longest_dense(s.keys)) * kTile, k = kTile * s.dqk(),
                       v = kTile * s.dv;
    return slot_bytes<A>({rows * s.dqk(),
                          rows * s.dv,
                          rows * s.dqk(),
                          rows,
                          rows,
                          k,
                          k,
                          k,
                          v,
                          v,
                          kTile * kTile,
                          kTile * kTile});
  }
  Work take(Slots::Lease& lease, std::int64_t rows) const {
    const std::int64_t dqk = size().dqk(), dv = size().dv;
    Work w{};
    w.q = lease.take<A>(rows * dqk);
    w.d_o = lease.take<A>(rows * dv);
    w.dq = lease.take<A>(rows * dqk);
    w.delta = lease.take<A>(rows);
    w.lse = lease.take<A>(rows);
    w.key = lease.take<A>(kTile * dqk);
    w.key_t = lease.take<A>(kTile * dqk);
    w.dk = lease.take<A>(kTile * dqk);
    w.value_t = lease.take<A>(kTile * dv);
    w.dv = lease.take<A>(kTile * dv);
    w.p = lease.take<A>(kTile * kTile);
    w.ds = lease.take<A>(kTile * kTile);
    return w;
  }

  // q (scaled), d_o, delta = <d_o, o> and lse of a document's n query rows; rows up to `padded` are empty
  // rows: no probability.
  void load_document(const Work& w,
                     std::int64_t head,
                     std::int64_t first,
                     std::int64_t n,
                     std::int64_t padded) const {
    load_rows(w.q, size().dqk(), in.query(head).from(first), n, padded, static_cast<A>(op.scale));
    load_rows(w.d_o, size().dv, d_out(head).from(first), n, padded);
    std::fill_n(w.dq, padded * size().dqk(), A(0));
    const A* o = op.o.as<A>();
    for (std::int64_t t = 0; t < n; ++t) {
      const A* out = o + ((first + t) * size().heads + head) * size().dv;
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (std::int64_t c = 0; c < size().dv; ++c)
        sum += w.d_o[t * size().dv + c] * out[c];
      w.delta[t] = sum;
      // A row without keys has lse = -inf; +inf gives it probabilities of 0 as well.
      const A log_sum = lse[head * size().queries + first + t];
      w.lse[t] = log_sum == -std::numeric_limits<A>::infinity() ? -log_sum : log_sum;
    }
    std::fill(w.delta + n, w.delta + padded, A(0));
    std::fill(w.lse + n, w.lse + padded, std::numeric_limits<A>::infinity());
  }

  // p = exp(logit - lse) on visible pairs, ds = p (dp - delta); in place.
  void softmax_backward(const Work& w, std::int64_t row, const TileMask& mask) const {
    const bool full = mask.full();
    for (std::int64_t i = 0; i < kTile; ++i) {
      A* p = w.p + i * kTile;
      A* ds = w.ds + i * kTile;
      if (i >= mask.count) {  // past the document's end
        std::fill_n(p, kTile, A(0));
        std::fill_n(ds, kTile, A(0));
        continue;
      }
      const A log_sum = w.lse[row + i], delta = w.delta[row + i];
#pragma omp simd
      for (std::int64_t c = 0; c < kTile; ++c)
        p[c] = cpu::exp(p[c] - log_sum);
      if (!full) mask.hide(p, i, A(0));
#pragma omp simd
      for (std::int64_t c = 0; c < kTile; ++c)
        ds[c] = p[c] * (ds[c] - delta);
    }
  }

  // A document: its keys, its query rows, and where the first of these stands in it.
  struct Span {
    std::int64_t first, keys, row, rows, position;
  };
  Span span(std::int64_t doc) const {
    const std::int64_t first = see.cu[doc], row = see.query_begin(doc);
    return {first, see.cu[doc + 1] - first, row, see.query_end(doc) - row, see.first + row - first};
  }

  void key_tile(const Work& w, std::int64_t head, const Span& d, std::int64_t s) const {
    const std::int64_t dqk = size().dqk(), dv = size().dv, first = d.first,
                       count = std::min(kTile, d.keys - s);
    in.load_key_transposed(w.key_t, head, first + s, count);
    in.load_key(w.key, head, first + s, count);
    load_transposed(w.value_t, in.value(head).from(first + s), count);
    std::fill_n(w.dk, kTile * dqk, A(0));
    std::fill_n(w.dv, kTile * dv, A(0));
    // Tiles of queries before see none of these keys.
    for (std::int64_t t = std::max<std::int64_t>(0, s - d.position) / kTile * kTile; t < d.rows;
         t += kTile) {
      const TileMask mask =
          bits.mask(d.row + t, std::min(kTile, d.rows - t), d.position + t, s / kTile);
      if (mask.none()) continue;
      const A* q = w.q + t * dqk;
      const A* d_o = w.d_o + t * dv;
      blas_gemm(false, false, kTile, kTile, dqk, A(1), q, dqk, w.key_t, kTile, A(0), w.p, kTile);
      blas_gemm(false, false, kTile, kTile, dv, A(1), d_o, dv, w.value_t, kTile, A(0), w.ds, kTile);
      softmax_backward(w, t, mask);
      blas_gemm(true, false, kTile, dv, kTile, A(1), w.p, kTile, d_o, dv, A(1), w.dv, dv);
      blas_gemm(true, false, kTile, dqk, kTile, A(1), w.ds, kTile, q, dqk, A(1), w.dk, dqk);
      blas_gemm(false,
                false,
                kTile,
                dqk,
                kTile,
                A(1),
                w.ds,
                kTile,
                w.key,
                dqk,
                A(1),
                w.dq + t * dqk,
                dqk);
    }
    store_keys(head, first + s, count, w.dk, dqk, w.dv, dv);
  }

  void store_keys(std::int64_t head,
                  std::int64_t row,
                  std::int64_t count,
                  const A* dk,
                  std::int64_t ld_k,
                  const A* dv,
                  std::int64_t ld_v) const {
    const Rows key = in.key(head).from(row), value = in.value(head).from(row);
    store_rows(op.dkvb, key.offset, key.stride, count, size().dn, dk, ld_k);
    store_rows(op.dkvb, value.offset, value.stride, count, size().dv, dv, ld_v);
    for (std::int64_t i = 0; i < count; ++i) {
      std::copy_n(
          dk + i * ld_k + size().dn, size().dr, dkr + (head * size().keys + row + i) * size().dr);
    }
  }
  void store_queries(std::int64_t head, std::int64_t row, std::int64_t count, const A* dq) const {
    const Rows query = in.query(head).from(row);
    store_rows(op.dq,
               query.offset,
               query.stride,
               count,
               size().dqk(),
               dq,
               size().dqk(),
               static_cast<A>(op.scale));
  }

  void document(Slots& slots, std::int64_t head, std::int64_t doc) const {
    const Span d = span(doc);
    if (d.keys == 0) return;
    if (rule.rows(d.rows, d.keys)) {
      dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { document_rows<T>(slots, head, d); });
      return;
    }
    Slots::Lease lease(slots);
    const std::int64_t padded = tiles_of(d.rows) * kTile;
    const Work w = take(lease, padded);
    load_document(w, head, d.row, d.rows, padded);
    for (std::int64_t s = 0; s < d.keys; s += kTile)
      key_tile(w, head, d, s);
    store_queries(head, d.row, d.rows, w.dq);
  }

  // --- the path of single rows: keys' gradients are summed in a buffer of the document, rows in
  // order
  static std::size_t rows_slot_size(const AttentionSizes& s) {
    return slot_bytes<A>({s.keys * s.dqk(), s.keys * s.dv, s.dqk(), s.dqk(), s.dv, s.keys, s.keys});
  }
  template <class T>
  void document_rows(Slots& slots, std::int64_t head, const Span& d) const {
    const std::int64_t n = d.keys, dqk = size().dqk(), dv = size().dv;
    Slots::Lease lease(slots);
    A* dk = lease.take<A>(n * dqk);
    A* dvalue = lease.take<A>(n * dv);
    Work w{};
    w.q = lease.take<A>(dqk);
    w.dq = lease.take<A>(dqk);
    w.d_o = lease.take<A>(dv);
    w.p = lease.take<A>(n);
    w.ds = lease.take<A>(n);
    std::fill_n(dk, n * dqk, A(0));
    std::fill_n(dvalue, n * dv, A(0));
    for (std::int64_t t = d.row; t < d.row + d.rows; ++t) {
      A delta = 0, log_sum = 0;
      w.delta = &delta;
      w.lse = &log_sum;
      load_document(w, head, t, 1, 1);
      row<T>(w, head, t, d.first, dk, dvalue);
      store_queries(head, t, 1, w.dq);
    }
    store_keys(head, d.first, n, dk, dqk, dvalue, dv);
  }
  template <class T>
  void row(const Work& w, std::int64_t head, std::int64_t t, std::int64_t first, A* dk, A* dvalue)
      const {
    const std::int64_t dn = size().dn, dr = size().dr, dv = size().dv, dqk = size().dqk();
    const std::int32_t* list = nullptr;
    std::int64_t n = see.first + t + 1 - first;
    if (see.selected != nullptr) {
      const auto range = see.visible_selection(t);
      list = range.begin;
      n = range.end - range.begin;
    }
    const Rows key = in.key(head), value = in.value(head);
    const T* kvb = in.kvb.as<T>();
    const T* shared = in.kr.empty() ? nullptr : in.kr.as<T>();
    row_dots(w.p, w.q, kvb + key.offset, key.stride, dn, shared, dr, list, first, n);
    row_dots(w.ds,
             w.d_o,
             kvb + value.offset,
             value.stride,
             dv,
             static_cast<const T*>(nullptr),
             0,
             list,
             first,
             n);
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) {
      w.p[i] = cpu::exp(w.p[i] - *w.lse);
      w.ds[i] = w.p[i] * (w.ds[i] - *w.delta);
    }
    add_rows(w.dq, w.ds, kvb + key.offset, key.stride, dn, list, first, n);
    if (dr > 0) add_rows(w.dq + dn, w.ds, shared, dr, dr, list, first, n);
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t s = list != nullptr ? list[i] - first : i;
      const A p = w.p[i], ds = w.ds[i];
      A* to_k = dk + s * dqk;
      A* to_v = dvalue + s * dv;
#pragma omp simd
      for (std::int64_t c = 0; c < dqk; ++c)
        to_k[c] += ds * w.q[c];
#pragma omp simd
      for (std::int64_t c = 0; c < dv; ++c)
        to_v[c] += p * w.d_o[c];
    }
  }
};

// dkr = sum over heads, heads in order.
template <class A>
void sum_heads(ThreadPool& pool, const AttentionSizes& size, TensorView dkr, A* parts) {
  pool.parallel_for(size.keys, kTile, [&](std::int64_t begin, std::int64_t end) {
    A* sum = parts + begin * size.dr;
    const std::int64_t n = (end - begin) * size.dr;
    for (std::int64_t h = 1; h < size.heads; ++h) {
      const A* part = sum + h * size.keys * size.dr;
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i)
        sum[i] += part[i];
    }
    store_rows(dkr, begin * size.dr, size.dr, end - begin, size.dr, sum, size.dr);
  });
}

template <class A>
void backward(CpuContext& context, const AttentionBackward& op) {
  const AttentionSizes size = attention_sizes(op.q, op.kvb, op.kvb.dim(2) - op.o.dim(2));
  const PathRule rule{op.path, selection_size(op.selected)};
  const std::int64_t documents = op.cu_seqlens.dim(0) - 1;
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const std::size_t slot =
      std::max(Backward<A>::rows_slot_size(size), Backward<A>::slot_size(size, rule));
  const TensorView slot_memory = context.scratch.take(
      {threads, static_cast<std::int64_t>(slot)}, DType::u8, "attention tiles");
  const TensorView dkr =
      context.scratch.take({size.heads, size.keys, size.dr}, dtype_of<A>, "attention dkr per head");
  const TensorView words = SelectionBits::take(context.scratch, rule, size.queries, size.keys);
  context.stream.enqueue([=, &pool = context.pool] {
    const Visibility see = visibility(op.cu_seqlens, size.queries, size.keys, op.selected);
    const Backward<A> b{op,
                        {size, op.q, op.kvb, op.kr},
                        see,
                        {pool, words, see, rule},
                        rule,
                        dkr.as<A>(),
                        op.lse.as<A>()};
    Slots slots(slot_memory.data(), slot, threads);
    pool.parallel_for(size.heads * documents, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        b.document(slots, i / documents, i % documents);
    });
    if (size.dr > 0) sum_heads(pool, size, op.dkr, dkr.as<A>());
  });
}

}  // namespace

void launch(CpuContext& context, const AttentionBackward& op) {
  op.q.dtype() == DType::f64 ? backward<double>(context, op) : backward<float>(context, op);
}

}  // namespace moesaic
