#include <cmath>

#include "kernels/cpu/attention_common.h"

namespace moesaic {
namespace {
using namespace cpu;

template <class A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();

template <class A>
struct Forward {
  const AttentionForward& op;
  AttentionInputs in;
  Visibility see;
  SelectionBits bits;
  PathRule rule;
  A* o;
  A* lse;

  const AttentionSizes& size() const { return in.size; }

  // Running softmax of one block of queries: state per row.
  struct Block {
    A* q;        // [kTile, dqk], scaled
    A* logit;    // [kTile, kTile]
    A* sum;      // [kTile, dv]
    A* maximum;  // [kTile]
    A* total;    // [kTile]
  };

  static std::size_t slot_size(const AttentionSizes& s, const PathRule& rule) {
    const std::int64_t rows = tiles_of(rule.longest_dense(s.keys)) * kTile,
                       row_keys = rule.k > 0 ? rule.k : s.keys;
    const std::size_t by_rows = slot_bytes<A>({row_keys, s.dqk()});
    return std::max(by_rows,
                    slot_bytes<A>({rows * s.dqk(),
                                   rows * s.dv,
                                   kTile * s.dqk(),
                                   kTile * kTile,
                                   kTile * s.dv,
                                   kTile,
                                   kTile}));
  }

  // Folds one tile of logits into the running softmax; afterwards the tile holds exp(logit -
  // maximum).
  void fold(const Block& b, const TileMask& mask) const {
    const bool full = mask.full();
    for (std::int64_t i = 0; i < mask.count; ++i) {
      A* row = b.logit + i * kTile;
      if (!full) mask.hide(row, i, -kInfinity<A>);
      const A seen = std::max(b.maximum[i], cpu::largest(row, kTile));
      if (seen == -kInfinity<A>) {  // nothing visible yet
        std::fill_n(row, kTile, A(0));
        continue;
      }
      if (seen != b.maximum[i]) {
        const A shrink = cpu::exp(b.maximum[i] - seen);
        b.total[i] *= shrink;
        A* out = b.sum + i * size().dv;
#pragma omp simd
        for (std::int64_t c = 0; c < size().dv; ++c)
          out[c] *= shrink;
        b.maximum[i] = seen;
      }
      A total = 0;
#pragma omp simd reduction(+ : total)
      for (std::int64_t c = 0; c < kTile; ++c) {
        row[c] = cpu::exp(row[c] - seen);
        total += row[c];
      }
      b.total[i] += total;
    }
  }

  void finish(const Block& b,
              std::int64_t head,
              std::int64_t row,
              std::int64_t count,
              A& largest_seen) const {
    for (std::int64_t i = 0; i < count; ++i) {
      const A inverse = b.total[i] > A(0) ? A(1) / b.total[i] : A(0);
      A* out = o + ((row + i) * size().heads + head) * size().dv;
      for (std::int64_t c = 0; c < size().dv; ++c)
        out[c] = b.sum[i * size().dv + c] * inverse;
      lse[head * size().queries + row + i] =
          b.total[i] > A(0) ? b.maximum[i] + std::log(b.total[i]) : -kInfinity<A>;
      largest_seen = std::max(largest_seen, b.maximum[i]);
    }
  }

  /// One head of one document; returns its largest logit.
  A document(Slots& slots, std::int64_t head, std::int64_t doc) const {
    const std::int64_t begin = see.query_begin(doc), end = see.query_end(doc);
    if (begin >= end) return -kInfinity<A>;
    if (!rule.rows(end - begin, see.cu[doc + 1] - see.cu[doc])) return tiled(slots, head, doc);
    A largest_seen = -kInfinity<A>;
    dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) {
      for (std::int64_t row = begin; row < end; ++row)
        largest_seen = std::max(largest_seen, single_row<T>(slots, head, row));
    });
    return largest_seen;
  }

  A tiled(Slots& slots, std::int64_t head, std::int64_t doc) const {
    A largest_seen = -kInfinity<A>;
    const std::int64_t key_begin = see.cu[doc], keys = see.cu[doc + 1] - key_begin;
    const std::int64_t row_begin = see.query_begin(doc), row_end = see.query_end(doc);
    const std::int64_t dqk = size().dqk(), dv = size().dv;
    Slots::Lease lease(slots);
    A* keys_t = lease.take<A>(tiles_of(keys) * kTile * dqk);
    A* values = lease.take<A>(tiles_of(keys) * kTile * dv);
    const Block b{lease.take<A>(kTile * dqk),
                  lease.take<A>(kTile * kTile),
                  lease.take<A>(kTile * dv),
                  lease.take<A>(kTile),
                  lease.take<A>(kTile)};
    for (std::int64_t s = 0; s < keys; s += kTile) {
      in.load_key_transposed(keys_t + s * dqk, head, key_begin + s, std::min(kTile, keys - s));
      load_rows(values + s * dv,
                dv,
                in.value(head).from(key_begin + s),
                std::min(kTile, keys - s),
                kTile);
    }
    for (std::int64_t row = row_begin; row < row_end; row += kTile) {
      const std::int64_t count = std::min(kTile, row_end - row),
                         position = see.first + row - key_begin;
      load_rows(b.q, dqk, in.query(head).from(row), count, kTile, static_cast<A>(op.scale));
      std::fill_n(b.sum, kTile * dv, A(0));
      std::fill_n(b.total, kTile, A(0));
      std::fill_n(b.maximum, kTile, -kInfinity<A>);
      for (std::int64_t s = 0; s < position + count; s += kTile) {
        const TileMask mask = bits.mask(row, count, position, s / kTile);
        if (mask.none()) continue;
        blas_gemm(false,
                  false,
                  kTile,
                  kTile,
                  dqk,
                  A(1),
                  b.q,
                  dqk,
                  keys_t + s * dqk,
                  kTile,
                  A(0),
                  b.logit,
                  kTile);
        fold(b, mask);
        // Rows beyond count hold logits of zero queries: harmless, their sums are never read.
        blas_gemm(false,
                  false,
                  kTile,
                  dv,
                  kTile,
                  A(1),
                  b.logit,
                  kTile,
                  values + s * dv,
                  dv,
                  A(1),
                  b.sum,
                  dv);
      }
      finish(b, head, row, count, largest_seen);
    }
    return largest_seen;
  }

  // One query row of one head over exactly its keys; scratch: logits [keys], scaled query [dqk].
  template <class T>
  A single_row(Slots& slots, std::int64_t head, std::int64_t row) const {
    Slots::Lease lease(slots);
    A* p = lease.take<A>(rule.k > 0 ? rule.k : size().keys);
    A* q = lease.take<A>(size().dqk());
    const std::int64_t position = see.first + row, begin = see.cu[see.document_of(position)];
    const std::int32_t* list = nullptr;
    std::int64_t n = position + 1 - begin;
    if (see.selected != nullptr) {
      const auto range = see.visible_selection(row);
      list = range.begin;
      n = range.end - range.begin;
    }
    load_rows(q, size().dqk(), in.query(head).from(row), 1, 1, static_cast<A>(op.scale));
    const Rows key = in.key(head), value = in.value(head);
    const T* kvb = in.kvb.as<T>();
    row_dots(p,
             q,
             kvb + key.offset,
             key.stride,
             size().dn,
             in.kr.empty() ? nullptr : in.kr.as<T>(),
             size().dr,
             list,
             begin,
             n);
    const A maximum = cpu::largest(p, n);
    A* out = o + (row * size().heads + head) * size().dv;
    std::fill_n(out, size().dv, A(0));
    A& log_sum = lse[head * size().queries + row];
    log_sum = -kInfinity<A>;
    if (maximum == -kInfinity<A>) return maximum;
    A total = 0;
#pragma omp simd reduction(+ : total)
    for (std::int64_t i = 0; i < n; ++i) {
      p[i] = cpu::exp(p[i] - maximum);
      total += p[i];
    }
    add_rows(out, p, kvb + value.offset, value.stride, size().dv, list, begin, n);
    for (std::int64_t c = 0; c < size().dv; ++c)
      out[c] /= total;
    log_sum = maximum + std::log(total);
    return maximum;
  }
};

template <class A>
void combine_max(const AttentionForward& op, const A* parts, std::int64_t per_head) {
  if (op.max_logit.empty()) return;
  auto* out = op.max_logit.as<A>();
  for (std::int64_t h = 0; h < op.q.dim(1); ++h) {
    const A m = cpu::largest(parts + h * per_head, per_head);
    out[h] = op.accumulate_max ? std::max(out[h], m) : m;
  }
}

template <class A>
void forward(CpuContext& context, const AttentionForward& op) {
  const AttentionSizes size = attention_sizes(op.q, op.kvb, op.kvb.dim(2) - op.o.dim(2));
  const PathRule rule{op.path, selection_size(op.selected)};
  const std::int64_t documents = op.cu_seqlens.dim(0) - 1;
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const std::size_t slot = Forward<A>::slot_size(size, rule);
  const TensorView slot_memory = context.scratch.take(
      {threads, static_cast<std::int64_t>(slot)}, DType::u8, "attention tiles");
  const TensorView maxima =
      context.scratch.take({size.heads, documents}, dtype_of<A>, "attention maxima");
  const TensorView words = SelectionBits::take(context.scratch, rule, size.queries, size.keys);
  context.stream.enqueue([=, &pool = context.pool] {
    const Visibility see = visibility(op.cu_seqlens, size.queries, size.keys, op.selected);
    const Forward<A> f{op,
                       {size, op.q, op.kvb, op.kr},
                       see,
                       {pool, words, see, rule},
                       rule,
                       op.o.as<A>(),
                       op.lse.as<A>()};
    Slots slots(slot_memory.data(), slot, threads);
    auto* parts = maxima.as<A>();
    pool.parallel_for(size.heads * documents, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i)
        parts[i] = f.document(slots, i / documents, i % documents);
    });
    combine_max(op, parts, documents);
  });
}

}  // namespace

void launch(CpuContext& context, const AttentionForward& op) {
  op.q.dtype() == DType::f64 ? forward<double>(context, op) : forward<float>(context, op);
}

}  // namespace moesaic
