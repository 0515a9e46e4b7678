#include "kernels/ops/glu.h"

#include "kernels/cpu/math.h"
#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

/// h = a(g) b(u) and its partial derivatives.
template <class A>
struct GluPoint {
  A h, d_gate, d_up;
};

template <class A>
struct SwiGlu {
  explicit SwiGlu(const GluActivation&) {}
  A value(A g, A u) const { return g * cpu::sigmoid(g) * u; }
  GluPoint<A> point(A g, A u) const {
    A s, c;
    cpu::sigmoid_pair(g, s, c);
    const A silu = g * s;
    return {silu * u, u * (s + silu * c), silu};
  }
};

template <class A>
struct SituGlu {
  explicit SituGlu(const GluActivation& a)
      : b1(static_cast<A>(a.beta1)), b2(static_cast<A>(a.beta2)), inv1(static_cast<A>(1.0 / a.beta1)), inv2(static_cast<A>(1.0 / a.beta2)) {}
  A value(A g, A u) const { return b1 * cpu::tanh(g * inv1) * cpu::sigmoid(g) * (b2 * cpu::tanh(u * inv2)); }
  GluPoint<A> point(A g, A u) const {
    A s, c;
    cpu::sigmoid_pair(g, s, c);
    const A gate = b1 * cpu::tanh(g * inv1), up = b2 * cpu::tanh(u * inv2);
    const A a = gate * s;
    return {a * up, up * (cpu::tanh_slope(g * inv1) * s + a * c), a * cpu::tanh_slope(u * inv2)};
  }
  A b1, b2, inv1, inv2;
};

std::int64_t used_rows(std::int64_t bound, const ConstTensorView& row_count) {
  if (row_count.empty()) return bound;
  const std::int64_t rows = row_count.as<std::int32_t>()[0];
  MOESAIC_CHECK(0 <= rows && rows <= bound, "row_count outside the rows");
  return rows;
}

template <class T, template <class> class Act>
void forward(ThreadPool& pool, const GluForward& op) {
  using A = acc_t<T>;
  const std::int64_t width = op.h.dim(1);
  const Act<A> act(op.activation);
  const T* in = op.gate_up.as<T>();
  T* out = op.h.as<T>();
  pool.parallel_for(used_rows(op.h.dim(0), op.row_count), cpu::row_grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const T* g = in + 2 * t * width;
      const T* u = g + width;
      T* h = out + t * width;
#pragma omp simd
      for (std::int64_t c = 0; c < width; ++c) h[c] = T(act.value(static_cast<A>(g[c]), static_cast<A>(u[c])));
    }
  });
}

template <class T, template <class> class Act>
void backward(ThreadPool& pool, const GluBackward& op) {
  using A = acc_t<T>;
  const std::int64_t width = op.dh.dim(1);
  const Act<A> act(op.activation);
  const A* weight = op.row_weight.as<A>();
  A* dweight = op.drow_weight.as<A>();
  pool.parallel_for(used_rows(op.dh.dim(0), op.row_count), cpu::row_grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      const T* g = op.gate_up.as<T>() + 2 * t * width;
      const T* u = g + width;
      T* dg = op.dgate_up.as<T>() + 2 * t * width;
      T* du = dg + width;
      const T* r = op.dh.as<T>() + t * width;
      T* h = op.h.empty() ? nullptr : op.h.as<T>() + t * width;
      const A w = weight == nullptr ? A(1) : weight[t];
      const A h_factor = op.weight_h ? w : A(1);
      A sum = 0;
      // Per column everything is read before it is written, so that outputs may lie on inputs.
#pragma omp simd reduction(+ : sum)
      for (std::int64_t c = 0; c < width; ++c) {
        const GluPoint<A> p = act.point(static_cast<A>(g[c]), static_cast<A>(u[c]));
        const A grad = static_cast<A>(r[c]);
        sum += grad * p.h;
        dg[c] = T(w * grad * p.d_gate);
        du[c] = T(w * grad * p.d_up);
        if (h != nullptr) h[c] = T(h_factor * p.h);
      }
      if (dweight != nullptr) dweight[t] = sum;
    }
  });
}

}  // namespace

void launch(CpuContext& context, const GluForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.h.dtype(), [&]<class T>(TypeTag<T>) {
      op.activation.kind == GluKind::situ ? forward<T, SituGlu>(pool, op) : forward<T, SwiGlu>(pool, op);
    });
  });
}

void launch(CpuContext& context, const GluBackward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.dh.dtype(), [&]<class T>(TypeTag<T>) {
      op.activation.kind == GluKind::situ ? backward<T, SituGlu>(pool, op) : backward<T, SwiGlu>(pool, op);
    });
  });
}

}  // namespace moesaic
