// Sparse MLA in the absorbed form: a query's selected rows are gathered into one matrix, and its heads are the rows of
// matrix products with it.
#include "kernels/ops/sparse_mla.h"

#include <cmath>

#include "kernels/cpu/thread_pool.h"
#include "kernels/cpu/tiles.h"

namespace moesaic {
namespace {
using namespace cpu;

struct Sizes {
  std::int64_t queries, keys, heads, width, dc, k;
  std::int64_t padded() const { return tiles_of(k) * kTile; }  // gathered rows at most
};
template <class Op>
Sizes sizes_of(const Op& op) {
  return {op.q.dim(0), op.kv.dim(0), op.q.dim(1), op.q.dim(2), op.o.dim(2), op.selected.dim(1)};
}

// A query's visible keys and, gathered, their rows: `padded` of them, the rows past `n` zero.
template <class A>
struct Gathered {
  const std::int32_t* list;
  std::int64_t n, padded;
  Gathered(A* rows, const Sizes& size, const Visibility& see, ConstTensorView kv, std::int64_t t) {
    const auto range = see.visible_selection(t);
    list = range.begin;
    n = range.end - range.begin;
    padded = tiles_of(n) * kTile;
    for (std::int64_t i = 0; i < n; ++i)
      load_rows(rows + i * size.width, size.width, {kv, list[i] * size.width, 0, size.width}, 1, 1);
    std::fill(rows + n * size.width, rows + padded * size.width, A(0));
  }
};

// rows [heads, width] of query t.
Rows heads_of(ConstTensorView x, std::int64_t t) {
  return {x, t * x.dim(1) * x.dim(2), x.dim(2), x.dim(2)};
}

template <class A>
struct Forward {
  const SparseMlaForward& op;
  Sizes size;
  Visibility see;
  A* largest;  // [Tq, H]: of the scaled logits

  static std::size_t slot_size(const Sizes& s) {
    return slot_bytes<A>(
        {s.heads * s.width, s.padded() * s.width, s.heads * s.padded(), s.heads * s.dc});
  }

  void query(Slots& slots, std::int64_t t) const {
    Slots::Lease lease(slots);
    const std::int64_t heads = size.heads, width = size.width, dc = size.dc;
    A* q = lease.take<A>(heads * width);
    A* rows = lease.take<A>(size.padded() * width);
    A* p = lease.take<A>(heads * size.padded());
    A* o = lease.take<A>(heads * dc);
    const Gathered<A> keys(rows, size, see, op.kv, t);
    const std::int64_t n = keys.n, ld = keys.padded;
    load_rows(q, width, heads_of(op.q, t), heads, heads, static_cast<A>(op.scale));
    if (n > 0) blas_gemm(false, true, heads, ld, width, A(1), q, width, rows, width, A(0), p, ld);
    for (std::int64_t h = 0; h < heads; ++h)
      softmax(p + h * ld, n, ld, t, h);
    if (n > 0) {
      blas_gemm(false, false, heads, dc, ld, A(1), p, ld, rows, width, A(0), o, dc);
    } else {
      std::fill_n(o, heads * dc, A(0));
    }
    store_rows(op.o, t * heads * dc, dc, heads, dc, o, dc);
  }

  void softmax(A* p, std::int64_t n, std::int64_t padded, std::int64_t t, std::int64_t h) const {
    const A maximum = cpu::largest(p, n);
    A total = 0;
#pragma omp simd reduction(+ : total)
    for (std::int64_t i = 0; i < n; ++i) {
      p[i] = cpu::exp(p[i] - maximum);
      total += p[i];
    }
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i)
      p[i] /= total;
    std::fill(p + n, p + padded, A(0));
    largest[t * size.heads + h] = maximum;
    op.lse.as<A>()[h * size.queries + t] = n > 0 ? maximum + std::log(total) : maximum;
  }

  void combine_max() const {
    if (op.max_logit.empty()) return;
    A* out = op.max_logit.as<A>();
    for (std::int64_t h = 0; h < size.heads; ++h) {
      A m = op.accumulate_max ? out[h] : -std::numeric_limits<A>::infinity();
      for (std::int64_t t = 0; t < size.queries; ++t)
        m = std::max(m, largest[t * size.heads + h]);
      out[h] = m;
    }
  }
};

template <class A>
void forward(CpuContext& context, const SparseMlaForward& op) {
  const Sizes size = sizes_of(op);
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const std::size_t slot = Forward<A>::slot_size(size);
  const TensorView slot_memory = context.scratch.take(
      {threads, static_cast<std::int64_t>(slot)}, DType::u8, "sparse mla rows");
  const TensorView maxima =
      context.scratch.take({size.queries, size.heads}, dtype_of<A>, "sparse mla maxima");
  context.stream.enqueue([=, &pool = context.pool] {
    const Forward<A> f{
        op, size, visibility(op.cu_seqlens, size.queries, size.keys, op.selected), maxima.as<A>()};
    Slots slots(slot_memory.data(), slot, threads);
    pool.parallel_for(size.queries, 4, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        f.query(slots, t);
    });
    f.combine_max();
  });
}

// Queries go in blocks: first each query forms its p, ds and dq, then each key, which has one owner, takes up the block's
// contributions, queries in order.
template <class A>
struct Backward {
  static constexpr std::int64_t kBlock = 64;
  static constexpr std::int64_t kKeysPerTask = 64;

  const SparseMlaBackward& op;
  Sizes size;
  Visibility see;
  A* p;    // [kBlock, H, k]
  A* ds;   // [kBlock, H, k]
  A* dkv;  // [Tk, width]

  static std::size_t slot_size(const Sizes& s) {
    return slot_bytes<A>({s.heads * s.width,
                          s.padded() * s.width,
                          s.heads * s.padded(),
                          s.heads * s.padded(),
                          s.heads * s.dc,
                          s.heads * s.dc,
                          s.heads * s.width});
  }
  A* saved(A* of, std::int64_t t, std::int64_t h) const {
    return of + (t % kBlock * size.heads + h) * size.k;
  }

  void query(Slots& slots, std::int64_t t) const {
    Slots::Lease lease(slots);
    const std::int64_t heads = size.heads, width = size.width, dc = size.dc;
    A* q = lease.take<A>(heads * width);
    A* rows = lease.take<A>(size.padded() * width);
    A* probabilities = lease.take<A>(heads * size.padded());
    A* gradients = lease.take<A>(heads * size.padded());
    A* d_o = lease.take<A>(heads * dc);
    A* o = lease.take<A>(heads * dc);
    A* dq = lease.take<A>(heads * width);
    const Gathered<A> keys(rows, size, see, op.kv, t);
    const std::int64_t ld = keys.padded;
    load_rows(q, width, heads_of(op.q, t), heads, heads, static_cast<A>(op.scale));
    load_rows(d_o, dc, heads_of(op.d_o, t), heads, heads);
    load_rows(o, dc, heads_of(op.o, t), heads, heads);
    std::fill_n(dq, heads * width, A(0));
    if (keys.n > 0) {
      blas_gemm(
          false, true, heads, ld, width, A(1), q, width, rows, width, A(0), probabilities, ld);
      blas_gemm(false, true, heads, ld, dc, A(1), d_o, dc, rows, width, A(0), gradients, ld);
      for (std::int64_t h = 0; h < heads; ++h)
        softmax_backward(
            probabilities + h * ld, gradients + h * ld, d_o + h * dc, o + h * dc, t, h, keys.n, ld);
      blas_gemm(false, false, heads, width, ld, A(1), gradients, ld, rows, width, A(0), dq, width);
    }
    store_rows(op.dq, t * heads * width, width, heads, width, dq, width, static_cast<A>(op.scale));
  }

  void softmax_backward(A* prob,
                        A* grad,
                        const A* d_o,
                        const A* o,
                        std::int64_t t,
                        std::int64_t h,
                        std::int64_t n,
                        std::int64_t padded) const {
    A delta = 0;
#pragma omp simd reduction(+ : delta)
    for (std::int64_t c = 0; c < size.dc; ++c)
      delta += d_o[c] * o[c];
    const A log_sum = op.lse.as<A>()[h * size.queries + t];
#pragma omp simd
    for (std::int64_t i = 0; i < n; ++i) {
      prob[i] = cpu::exp(prob[i] - log_sum);
      grad[i] = prob[i] * (grad[i] - delta);
    }
    std::fill(grad + n, grad + padded, A(0));
    std::copy_n(prob, n, saved(p, t, h));
    std::copy_n(grad, n, saved(ds, t, h));
  }

  // The contributions of queries [from, to) to keys [begin, end).
  template <class T>
  void keys(std::int64_t from, std::int64_t to, std::int64_t begin, std::int64_t end) const {
    for (std::int64_t t = from; t < to; ++t) {
      const auto range = see.visible_selection(t);
      const auto* first =
          std::lower_bound(range.begin, range.end, static_cast<std::int32_t>(begin));
      for (const auto* s = first; s != range.end && *s < end; ++s)
        add_pair<T>(t, s - range.begin, dkv + *s * size.width);
    }
  }
  template <class T>
  void add_pair(std::int64_t t, std::int64_t i, A* sum) const {
    const auto scale = static_cast<A>(op.scale);
    for (std::int64_t h = 0; h < size.heads; ++h) {
      const T* q = op.q.as<T>() + (t * size.heads + h) * size.width;
      const T* d_o = op.d_o.as<T>() + (t * size.heads + h) * size.dc;
      const A x = scale * saved(ds, t, h)[i], y = saved(p, t, h)[i];
#pragma omp simd
      for (std::int64_t c = 0; c < size.width; ++c)
        sum[c] += x * static_cast<A>(q[c]);
#pragma omp simd
      for (std::int64_t c = 0; c < size.dc; ++c)
        sum[c] += y * static_cast<A>(d_o[c]);
    }
  }

  void run(ThreadPool& pool, Slots& slots) const {
    std::fill_n(dkv, size.keys * size.width, A(0));
    for (std::int64_t from = 0; from < size.queries; from += kBlock) {
      const std::int64_t to = std::min(from + kBlock, size.queries);
      pool.parallel_for(to - from, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t t = from + begin; t < from + end; ++t)
          query(slots, t);
      });
      // These queries see no later keys.
      pool.parallel_for(see.first + to, kKeysPerTask, [&](std::int64_t begin, std::int64_t end) {
        dispatch_float(op.q.dtype(), [&]<class T>(TypeTag<T>) { keys<T>(from, to, begin, end); });
      });
    }
    store_rows(op.dkv, 0, size.width, size.keys, size.width, dkv, size.width);
  }
};

template <class A>
void backward(CpuContext& context, const SparseMlaBackward& op) {
  const Sizes size = sizes_of(op);
  const Arena::Mark mark(context.scratch);
  const int threads = context.pool.num_threads();
  MOESAIC_CHECK(threads <= Slots::kMax, "too many threads");
  const std::size_t slot = Backward<A>::slot_size(size);
  const TensorView slot_memory = context.scratch.take(
      {threads, static_cast<std::int64_t>(slot)}, DType::u8, "sparse mla rows");
  const Shape pairs{Backward<A>::kBlock, size.heads, size.k};
  const TensorView p = context.scratch.take(pairs, dtype_of<A>, "sparse mla probabilities"),
                   ds = context.scratch.take(pairs, dtype_of<A>, "sparse mla ds"),
                   dkv = context.scratch.take(
                       {size.keys, size.width}, dtype_of<A>, "sparse mla key gradients");
  context.stream.enqueue([=, &pool = context.pool] {
    const Backward<A> b{op,
                        size,
                        visibility(op.cu_seqlens, size.queries, size.keys, op.selected),
                        p.as<A>(),
                        ds.as<A>(),
                        dkv.as<A>()};
    Slots slots(slot_memory.data(), slot, threads);
    b.run(pool, slots);
  });
}

}  // namespace

void launch(CpuContext& context, const SparseMlaForward& op) {
  op.q.dtype() == DType::f64 ? forward<double>(context, op) : forward<float>(context, op);
}

void launch(CpuContext& context, const SparseMlaBackward& op) {
  op.q.dtype() == DType::f64 ? backward<double>(context, op) : backward<float>(context, op);
}

}  // namespace moesaic
