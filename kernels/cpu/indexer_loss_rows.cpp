#include "kernels/cpu/indexer_loss.h"

namespace moesaic::cpu {
namespace {

template <class A>
struct RowsLoss {
  const IndexerLoss& op;
  AttentionInputs attention;
  IndexerInputs indexer;
  Visibility see;
  PathRule rule;
  A factor;
  A* kl;       // [Tq]
  A* d_index;  // [Tq, k]: factor * (softmax - target) of the visible selected keys, in their order
  std::uint64_t* positive;  // [Tq, k, head_words]: bit j = the dot of indexer head j is positive

  // Whether the document that holds `position` is walked by rows.
  bool mine(std::int64_t position) const {
    const std::int64_t doc = see.document_of(position), n = see.cu[doc + 1] - see.cu[doc];
    return rule.rows(n, n);
  }
  std::int64_t head_words() const { return (indexer.heads() + 63) / 64; }
  static std::int64_t padded(std::int64_t k) { return tiles_of(k) * kTile; }

  static std::size_t slot_size(const AttentionSizes& a, const IndexerInputs& i, std::int64_t k) {
    const std::int64_t n = padded(k);
    return slot_bytes<A>(
        {n, n, n, a.dqk(), i.width(), i.heads(), n * i.dim(), n * i.heads(), i.width(), i.heads()});
  }

  // sum_h exp(logit_h - lse_h) over the listed keys.
  template <class T>
  void add_target(
      A* target, A* logit, A* q, std::int64_t t, const std::int32_t* list, std::int64_t n) const {
    std::fill_n(target, n, A(0));
    const T* kvb = attention.kvb.as<T>();
    const T* shared = attention.kr.empty() ? nullptr : attention.kr.as<T>();
    const AttentionSizes& size = attention.size;
    for (std::int64_t h = 0; h < size.heads; ++h) {
      load_rows(q, size.dqk(), attention.query(h).from(t), 1, 1, static_cast<A>(op.scale));
      const Rows key = attention.key(h);
      row_dots(logit, q, kvb + key.offset, key.stride, size.dn, shared, size.dr, list, 0, n);
      const A log_sum = op.lse.as<A>()[h * attention.size.queries + t];
#pragma omp simd
      for (std::int64_t i = 0; i < n; ++i)
        target[i] += cpu::exp(logit[i] - log_sum);
    }
  }

  // Loss, dqi and dw of query t.
  void query(Slots& slots, std::int64_t t) const {
    kl[t] = 0;
    if (!mine(see.first + t)) return;
    if (!op.counts(t)) return clear_query_gradients(op, t, t + 1);
    Slots::Lease lease(slots);
    const std::int64_t heads = indexer.heads(), dim = indexer.dim(), ld = padded(see.k);
    A* target = lease.take<A>(ld);
    A* logit = lease.take<A>(ld);
    A* index = lease.take<A>(ld);
    A* q = lease.take<A>(attention.size.dqk());
    A* qi = lease.take<A>(indexer.width());
    A* w = lease.take<A>(heads);
    A* keys = lease.take<A>(ld * dim);
    A* dots = lease.take<A>(ld * heads);
    A* dqi = lease.take<A>(indexer.width());
    A* dw = lease.take<A>(heads);
    const auto range = see.visible_selection(t);
    const std::int64_t n = range.end - range.begin, whole = padded(n);
    if (n > 0) {
      dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) {
        add_target<T>(target, logit, q, t, range.begin, n);
      });
      load_rows(qi, indexer.width(), indexer.query().from(t), 1, 1);
      load_rows(w, heads, indexer.weight().from(t), 1, 1, static_cast<A>(indexer.factor()));
      for (std::int64_t i = 0; i < n; ++i)
        load_rows(keys + i * dim, dim, indexer.key().from(range.begin[i]), 1, 1);
      std::fill(keys + n * dim, keys + whole * dim, A(0));
      blas_gemm(false, true, heads, whole, dim, A(1), qi, dim, keys, dim, A(0), dots, whole);
      score_row(index, w, dots, whole, heads, n);
      kl[t] = kl_row(target, index, n, factor);
    }
    if (op.dqi.empty()) return;
    for (std::int64_t j = 0; j < heads; ++j)
      dw[j] = head_gradient(dots + j * whole, index, w[j], n, whole);
    std::fill_n(dqi, indexer.width(), A(0));
    if (n > 0) {
      save(t, index, dots, n, whole);
      blas_gemm(false, false, heads, dim, whole, A(1), dots, whole, keys, dim, A(0), dqi, dim);
    }
    store_rows(
        op.dqi, t * indexer.width(), indexer.width(), 1, indexer.width(), dqi, indexer.width());
    store_rows(op.dw, t * heads, heads, 1, heads, dw, heads, static_cast<A>(indexer.factor()));
  }

  // dots -> da = w dI 1[dot > 0]; returns sum dI relu(dot).
  static A head_gradient(A* dots, const A* d, A weight, std::int64_t n, std::int64_t whole) {
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = 0; i < n; ++i) {
      sum += d[i] * (dots[i] < A(0) ? A(0) : dots[i]);
      dots[i] = dots[i] > A(0) ? weight * d[i] : A(0);
    }
    std::fill(dots + n, dots + whole, A(0));
    return sum;
  }

  // What the keys' gradients need. A da of 0 adds nothing, so "da is not 0" serves as the sign of
  // the dot.
  void save(std::int64_t t, const A* d, const A* da, std::int64_t n, std::int64_t whole) const {
    std::copy_n(d, n, d_index + t * see.k);
    std::uint64_t* bits = positive + t * see.k * head_words();
    std::fill_n(bits, n * head_words(), 0);
    for (std::int64_t j = 0; j < indexer.heads(); ++j) {
      for (std::int64_t i = 0; i < n; ++i) {
        bits[i * head_words() + j / 64] |= static_cast<std::uint64_t>(da[j * whole + i] != A(0))
                                           << (j % 64);
      }
    }
  }

  // dki of keys [begin, end), document by document.
  void keys(Slots& slots, std::int64_t begin, std::int64_t end, A* dkey) const {
    while (begin < end) {
      const std::int64_t document_end = see.cu[see.document_of(begin) + 1],
                         part_end = std::min(end, document_end);
      if (mine(begin)) document_keys(slots, begin, part_end, document_end, dkey);
      begin = part_end;
    }
  }

  // dki of keys [begin, end) of one document: queries in order, every pair once.
  void document_keys(Slots& slots,
                     std::int64_t begin,
                     std::int64_t end,
                     std::int64_t document_end,
                     A* dkey) const {
    Slots::Lease lease(slots);
    const std::int64_t dim = indexer.dim(), heads = indexer.heads();
    A* qi = lease.take<A>(indexer.width());
    A* w = lease.take<A>(heads);
    std::fill(dkey + begin * dim, dkey + end * dim, A(0));
    const std::int64_t last = std::min(document_end - see.first, op.last_query());
    for (std::int64_t t = std::max({std::int64_t{0}, begin - see.first, op.query_begin}); t < last;
         ++t) {
      const auto range = see.visible_selection(t);
      const auto* from = std::lower_bound(range.begin, range.end, static_cast<std::int32_t>(begin));
      const auto* to = std::lower_bound(from, range.end, static_cast<std::int32_t>(end));
      if (from == to) continue;
      load_rows(qi, indexer.width(), indexer.query().from(t), 1, 1);
      load_rows(w, heads, indexer.weight().from(t), 1, 1, static_cast<A>(indexer.factor()));
      for (const auto* s = from; s != to; ++s)
        add_pair(t * see.k + (s - range.begin), w, qi, dkey + *s * dim);
    }
    store_rows(op.dki, begin * dim, dim, end - begin, dim, dkey + begin * dim, dim);
  }
  // sum += over the indexer heads with a positive dot: w_j dI q_j.
  void add_pair(std::int64_t pair, const A* w, const A* qi, A* sum) const {
    const std::int64_t dim = indexer.dim();
    for (std::int64_t word = 0; word < head_words(); ++word) {
      for (std::uint64_t bits = positive[pair * head_words() + word]; bits != 0; bits &= bits - 1) {
        const std::int64_t j = word * 64 + std::countr_zero(bits);
        const A da = w[j] * d_index[pair];
#pragma omp simd
        for (std::int64_t c = 0; c < dim; ++c)
          sum[c] += da * qi[j * dim + c];
      }
    }
  }
};

}  // namespace

template <class A>
void indexer_loss_rows(CpuContext& context, const IndexerLoss& op) {
  constexpr std::int64_t kKeysPerTask = 512;
  const AttentionSizes size = attention_sizes(op.q, op.kvb, op.dn);
  const IndexerInputs indexer{op.qi, op.ki, op.w};
  const std::int64_t k = op.selected.dim(1), n = size.queries;
  const bool gradients = !op.dqi.empty();
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const std::size_t slot = RowsLoss<A>::slot_size(size, indexer, k);
  const TensorView slot_memory =
      context.scratch.take({threads, static_cast<std::int64_t>(slot)}, DType::u8, "indexer rows");
  const TensorView kl = context.scratch.take({n}, dtype_of<A>, "indexer loss per query");
  TensorView d_index, positive, dkey;
  if (gradients) {
    d_index = context.scratch.take({n, k}, dtype_of<A>, "indexer score gradients");
    positive =
        context.scratch.take({n, k, (indexer.heads() + 63) / 64}, DType::i64, "indexer signs");
    dkey = context.scratch.take({size.keys, indexer.dim()}, dtype_of<A>, "indexer key gradients");
  }
  context.stream.enqueue([=, &pool = context.pool] {
    const RowsLoss<A> loss{op,
                           {size, op.q, op.kvb, op.kr},
                           indexer,
                           visibility(op.cu_seqlens, n, size.keys, op.selected),
                           path_rule(op),
                           static_cast<A>(op.weight / divisor(op.tokens)),
                           kl.as<A>(),
                           d_index.as<A>(),
                           reinterpret_cast<std::uint64_t*>(positive.data())};
    Slots slots(slot_memory.data(), slot, threads);
    pool.parallel_for(n, 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        loss.query(slots, t);
    });
    if (gradients) {
      auto* sums = dkey.as<A>();
      pool.parallel_for(size.keys, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
        loss.keys(slots, begin, end, sums);
      });
    }
    add_rows_to_scalar(op.kl, loss.kl, n);
  });
}
template void indexer_loss_rows<float>(CpuContext&, const IndexerLoss&);
template void indexer_loss_rows<double>(CpuContext&, const IndexerLoss&);

}  // namespace moesaic::cpu
