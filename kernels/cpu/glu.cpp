#include "kernels/ops/glu.h"

#include "kernels/cpu/math.h"
#include "kernels/cpu/rows.h"

namespace moesaic {
namespace {

// An activation gives h = a(g) b(u) and, as point(), h with its partial derivatives. point() writes into scalars, not into
// a struct: compilers do not vectorise loops over private structs.

template <class A>
struct SwiGlu {
  explicit SwiGlu(const GluActivation&) {}
  A value(A g, A u) const { return g * cpu::sigmoid(g) * u; }
  void point(A g, A u, A& h, A& d_gate, A& d_up) const {
    A s, c;
    cpu::sigmoid_pair(g, s, c);
    const A silu = g * s;
    h = silu * u;
    d_gate = u * (s + silu * c);
    d_up = silu;
  }
};

template <class A>
struct SituGlu {
  explicit SituGlu(const GluActivation& a)
      : b1(static_cast<A>(a.beta1)),
        b2(static_cast<A>(a.beta2)),
        inv1(static_cast<A>(1.0 / a.beta1)),
        inv2(static_cast<A>(1.0 / a.beta2)) {}
  A value(A g, A u) const {
    return b1 * cpu::tanh(g * inv1) * cpu::sigmoid(g) * (b2 * cpu::tanh(u * inv2));
  }
  void point(A g, A u, A& h, A& d_gate, A& d_up) const {
    A s, c;
    cpu::sigmoid_pair(g, s, c);
    A tanh_g, tanh_u, slope_g, slope_u;
    cpu::tanh_and_slope(g * inv1, tanh_g, slope_g);
    cpu::tanh_and_slope(u * inv2, tanh_u, slope_u);
    const A up = b2 * tanh_u;
    const A a = b1 * tanh_g * s;
    h = a * up;
    d_gate = up * (slope_g * s + a * c);
    d_up = a * slope_u;
  }
  A b1, b2, inv1, inv2;
};

struct Rows {
  std::int64_t begin, end;
  std::int64_t count() const { return end - begin; }
};
template <class Op>
Rows used_rows(std::int64_t bound, const Op& op) {
  const auto value = [](const ConstTensorView& row, std::int64_t otherwise) {
    return row.empty() ? otherwise : std::int64_t{row.template as<std::int32_t>()[0]};
  };
  const Rows rows{value(op.first_row, 0), value(op.row_count, bound)};
  MOESAIC_CHECK(0 <= rows.begin && rows.begin <= rows.end && rows.end <= bound,
                "first_row and row_count outside the rows");
  return rows;
}

template <class T, template <class> class Act>
void forward(ThreadPool& pool, const GluForward& op) {
  using A = acc_t<T>;
  const std::int64_t width = op.h.dim(1);
  const Act<A> act(op.activation);
  const T* in = op.gate_up.as<T>();
  T* out = op.h.as<T>();
  const Rows rows = used_rows(op.h.dim(0), op);
  pool.parallel_for(rows.count(), cpu::row_grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = rows.begin + begin; t < rows.begin + end; ++t) {
      const T* g = in + 2 * t * width;
      const T* u = g + width;
      T* h = out + t * width;
#pragma omp simd
      for (std::int64_t c = 0; c < width; ++c)
        h[c] = T(act.value(static_cast<A>(g[c]), static_cast<A>(u[c])));
    }
  });
}

// kWithH is a template parameter because a store under a condition keeps the loop from being vectorised.
template <class T, template <class> class Act, bool kWithH>
void backward(ThreadPool& pool, const GluBackward& op) {
  using A = acc_t<T>;
  const std::int64_t width = op.dh.dim(1);
  const Act<A> act(op.activation);
  const A* weight = op.row_weight.as<A>();
  A* dweight = op.drow_weight.as<A>();
  const Rows rows = used_rows(op.dh.dim(0), op);
  pool.parallel_for(rows.count(), cpu::row_grain(width), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = rows.begin + begin; t < rows.begin + end; ++t) {
      const Act<A> f = act;  // a copy that no store can change, so that the loop is vectorised
      const T* g = op.gate_up.as<T>() + 2 * t * width;
      const T* u = g + width;
      T* dg = op.dgate_up.as<T>() + 2 * t * width;
      T* du = dg + width;
      const T* r = op.dh.as<T>() + t * width;
      T* h = kWithH ? op.h.as<T>() + t * width : nullptr;
      const A w = weight == nullptr ? A(1) : weight[t];
      const A h_factor = op.weight_h ? w : A(1);
      A sum = 0;
      // Per column everything is read before it is written, so that outputs may lie on inputs.
#pragma omp simd reduction(+ : sum)
      for (std::int64_t c = 0; c < width; ++c) {
        A value, d_gate, d_up;
        f.point(static_cast<A>(g[c]), static_cast<A>(u[c]), value, d_gate, d_up);
        const A grad = static_cast<A>(r[c]);
        sum += grad * value;
        dg[c] = T(w * grad * d_gate);
        du[c] = T(w * grad * d_up);
        if constexpr (kWithH) h[c] = T(h_factor * value);
      }
      if (dweight != nullptr) dweight[t] = sum;
    }
  });
}

}  // namespace

void launch(CpuContext& context, const GluForward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.h.dtype(), [&]<class T>(TypeTag<T>) {
      op.activation.kind == GluKind::situ ? forward<T, SituGlu>(pool, op)
                                          : forward<T, SwiGlu>(pool, op);
    });
  });
}

void launch(CpuContext& context, const GluBackward& op) {
  context.stream.enqueue([op, &pool = context.pool] {
    dispatch_float(op.dh.dtype(), [&]<class T>(TypeTag<T>) {
      const auto with_activation = [&]<template <class> class Act>() {
        op.h.empty() ? backward<T, Act, false>(pool, op) : backward<T, Act, true>(pool, op);
      };
      op.activation.kind == GluKind::situ ? with_activation.template operator()<SituGlu>()
                                          : with_activation.template operator()<SwiGlu>();
    });
  });
}

}  // namespace moesaic
