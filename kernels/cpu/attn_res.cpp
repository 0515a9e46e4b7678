#include "kernels/ops/attn_res.h"

#include <array>
#include <cmath>

#include "kernels/cpu/math.h"
#include "kernels/cpu/norms.h"
#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

constexpr std::size_t kMaxSources = 512;

// om = query (.) norm, once per call in the accumulation type (SPEC 6.3).
template <class A, class W>
void fold(const ConstTensorView& query, const ConstTensorView& norm, A* om) {
  const W* q = query.as<W>();
  const W* n = norm.as<W>();
  for (std::int64_t c = 0; c < query.dim(0); ++c)
    om[c] = static_cast<A>(q[c]) * static_cast<A>(n[c]);
}

template <class A>
void softmax(A* score, std::int64_t n) {
  const A largest = *std::max_element(score, score + n);
  A sum = 0;
  for (std::int64_t i = 0; i < n; ++i)
    sum += score[i] = cpu::exp(score[i] - largest);
  for (std::int64_t i = 0; i < n; ++i)
    score[i] /= sum;
}

// out = sum_i p_i v_i of one token, by columns that fit the first-level cache in the accumulation type.
template <class T>
void mix_row(const std::vector<ConstTensorView>& sources,
             std::int64_t offset,
             const acc_t<T>* p,
             std::int64_t d,
             T* out) {
  using A = acc_t<T>;
  constexpr std::int64_t kColumns = 256;
  std::array<A, kColumns> sum;
  for (std::int64_t begin = 0; begin < d; begin += kColumns) {
    const std::int64_t columns = std::min(kColumns, d - begin);
    A* s = sum.data();
    std::fill_n(s, columns, A(0));
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const T* v = sources[i].as<T>() + offset + begin;
      const A weight = p[i];
#pragma omp simd
      for (std::int64_t c = 0; c < columns; ++c)
        s[c] += weight * static_cast<A>(v[c]);
    }
#pragma omp simd
    for (std::int64_t c = 0; c < columns; ++c)
      out[begin + c] = T(s[c]);
  }
}

// <RMSNorm(v), query> of one source.
template <class T>
acc_t<T> score_of(const T* v, const acc_t<T>* om, std::int64_t d, acc_t<T> eps) {
  using A = acc_t<T>;
  A squares = 0, dot = 0;
#pragma omp simd reduction(+ : squares, dot)
  for (std::int64_t c = 0; c < d; ++c) {
    const A x = static_cast<A>(v[c]);
    squares += x * x;
    dot += x * om[c];
  }
  return dot / std::sqrt(squares / static_cast<A>(d) + eps);
}

template <class T, class W>
void forward(ThreadPool& pool, const AttnResForward& op, const TensorView& folded) {
  using A = acc_t<T>;
  const std::int64_t d = op.h.dim(1), n = op.p.dim(1);
  A* om = folded.as<A>();
  fold<A, W>(op.query, op.norm, om);
  pool.parallel_for(op.h.dim(0), cpu::row_grain(n * d), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      A* p = op.p.as<A>() + t * n;
      for (std::int64_t i = 0; i < n; ++i) {
        p[i] = score_of<T>(
            op.sources[static_cast<std::size_t>(i)].as<T>() + t * d, om, d, static_cast<A>(op.eps));
      }
      softmax(p, n);
      mix_row<T>(op.sources, t * d, p, d, op.h.as<T>() + t * d);
    }
  });
}

/// What the gradient of one token needs of one source.
template <class A>
struct SourceSums {
  A rho, score, dp;
};

template <class T>
SourceSums<acc_t<T>> source_sums(
    const T* v, const T* dh, const acc_t<T>* om, std::int64_t d, acc_t<T> eps) {
  using A = acc_t<T>;
  A squares = 0, dot = 0, dp = 0;
#pragma omp simd reduction(+ : squares, dot, dp)
  for (std::int64_t c = 0; c < d; ++c) {
    const A x = static_cast<A>(v[c]);
    squares += x * x;
    dot += x * om[c];
    dp += x * static_cast<A>(dh[c]);
  }
  const A rho = A(1) / std::sqrt(squares / static_cast<A>(d) + eps);
  return {rho, dot * rho, dp};
}

// dv += weight dh + ds_rho om - back v  for one token of one source; accumulators differ in type from source to source.
template <class T, class G>
void add_source_gradient(G* dv,
                         const T* dh,
                         const T* v,
                         const acc_t<T>* om,
                         std::int64_t d,
                         acc_t<T> weight,
                         acc_t<T> ds_rho,
                         acc_t<T> back) {
  using A = acc_t<T>;
#pragma omp simd
  for (std::int64_t c = 0; c < d; ++c) {
    const A grad = weight * static_cast<A>(dh[c]) + ds_rho * om[c] - back * static_cast<A>(v[c]);
    dv[c] = G(static_cast<A>(dv[c]) + grad);
  }
}

// With s = <xh, om>:  dv += p dh + ds rho om - ds rho^2 s/d v;  dom += ds rho v.
template <class T>
void backward_token(const AttnResBackward& op, std::int64_t t, const acc_t<T>* om, acc_t<T>* dom) {
  using A = acc_t<T>;
  const std::int64_t d = op.dh.dim(1);
  const T* dh = op.dh.as<T>() + t * d;
  const A* p = op.p.as<A>() + t * op.p.dim(1);
  std::array<SourceSums<A>, kMaxSources> sums;
  A mean_dp = 0;  // <dh, h>
  for (std::size_t i = 0; i < op.sources.size(); ++i) {
    sums[i] = source_sums<T>(op.sources[i].as<T>() + t * d, dh, om, d, static_cast<A>(op.eps));
    mean_dp += p[i] * sums[i].dp;
  }
  for (std::size_t i = 0; i < op.sources.size(); ++i) {
    const T* v = op.sources[i].as<T>() + t * d;
    const A weight = p[i], ds_rho = weight * (sums[i].dp - mean_dp) * sums[i].rho;
    const A back = ds_rho * sums[i].rho * sums[i].score / static_cast<A>(d);
    if (dom != nullptr) {
#pragma omp simd
      for (std::int64_t c = 0; c < d; ++c)
        dom[c] += ds_rho * static_cast<A>(v[c]);
    }
    const TensorView& to = op.dsources[i];
    if (to.empty()) continue;
    if (to.dtype() == dtype_of<T>) {
      add_source_gradient<T, T>(to.as<T>() + t * d, dh, v, om, d, weight, ds_rho, back);
    } else {
      add_source_gradient<T, A>(to.as<A>() + t * d, dh, v, om, d, weight, ds_rho, back);
    }
  }
}

// `vectors` holds om, then dom, then one partial dom per block of tokens.
template <class T, class W>
void backward(ThreadPool& pool, const AttnResBackward& op, const TensorView& vectors) {
  using A = acc_t<T>;
  const std::int64_t tokens = op.dh.dim(0), d = op.dh.dim(1);
  A* om = vectors.as<A>();
  fold<A, W>(op.query, op.norm, om);
  A* dom = om + d;
  A* partial = op.dquery.empty() ? nullptr : dom + d;
  pool.parallel_for(tokens, cpu::kSumBlock, [&](std::int64_t begin, std::int64_t end) {
    A* sum = partial == nullptr ? nullptr : partial + begin / cpu::kSumBlock * d;
    if (sum != nullptr) std::fill_n(sum, d, A(0));
    for (std::int64_t t = begin; t < end; ++t)
      backward_token<T>(op, t, om, sum);
  });
  if (partial == nullptr) return;
  std::fill_n(dom, d, A(0));
  cpu::add_block_sums(pool, partial, cpu::sum_blocks(tokens), d, dom);
  const W* query = op.query.as<W>();
  const W* norm = op.norm.as<W>();
  for (std::int64_t c = 0; c < d; ++c) {
    op.dquery.as<A>()[c] += dom[c] * static_cast<A>(norm[c]);
    op.dnorm.as<A>()[c] += dom[c] * static_cast<A>(query[c]);
  }
}

}  // namespace

void launch(CpuContext& context, const AttnResForward& op) {
  const Arena::Mark mark(context.scratch);
  const TensorView folded = context.scratch.take({op.h.dim(1)}, op.p.dtype(), "attn_res.query");
  context.stream.enqueue([op, folded, &pool = context.pool] {
    dispatch_float(op.h.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.query.dtype(),
                         [&]<class W>(TypeTag<W>) { forward<T, W>(pool, op, folded); });
    });
  });
}

void launch(CpuContext& context, const AttnResBackward& op) {
  const Arena::Mark mark(context.scratch);
  const std::int64_t blocks = op.dquery.empty() ? 0 : cpu::sum_blocks(op.dh.dim(0));
  const TensorView vectors =
      context.scratch.take({2 + blocks, op.dh.dim(1)}, op.p.dtype(), "attn_res.sums");
  context.stream.enqueue([op, vectors, &pool = context.pool] {
    dispatch_float(op.dh.dtype(), [&]<class T>(TypeTag<T>) {
      dispatch_weight<T>(op.query.dtype(),
                         [&]<class W>(TypeTag<W>) { backward<T, W>(pool, op, vectors); });
    });
  });
}

}  // namespace moesaic
