#pragma once
// The activations of gated linear units, for every kernel that applies them: alone (glu.cu) and at the end of a grouped
// product. bf16 results have the same bits in all of them: their operations are spelled out one by one, so that the compiler
// cannot contract them in one kernel and not in another.
#include <type_traits>

#include "kernels/cuda/gate_math.cuh"
#include "kernels/cuda/vectors.cuh"
#include "kernels/ops/glu.h"

namespace moesaic::cuda {

__device__ __forceinline__ float product(float a, float b) {
  return __fmul_rn(a, b);
}
__device__ __forceinline__ double product(double a, double b) {
  return __dmul_rn(a, b);
}
/// a b + c, rounded once.
__device__ __forceinline__ float fused(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double fused(double a, double b, double c) {
  return __fma_rn(a, b, c);
}
/// 2^x and 1 / x within 2 units of the last place; subnormal results are 0. Volatile: they stay in the order in which they
/// are written, for all elements of a piece before the next step, so that a warp alone finds independent work while it waits
/// for one (the assembler, short of registers in the fused kernels, would take element after element).
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
constexpr float kLog2E = 1.44269504F;

/// An activation gives h = a(g) b(u) for N elements and, as points(), h with its partial derivatives. This one: g sigma(g) u.
template <class A, bool kFast>
struct SwiGlu {
  explicit SwiGlu(const GluActivation&) {}
  template <int N>
  __device__ __forceinline__ void values(const A (&g)[N], const A (&u)[N], A (&h)[N]) const {
    A s[N], c[N];
    sigmoids(g, s, c);
#pragma unroll
    for (int i = 0; i < N; ++i)
      h[i] = product(product(g[i], s[i]), u[i]);
  }
  template <int N>
  __device__ __forceinline__ void points(
      const A (&g)[N], const A (&u)[N], A (&h)[N], A (&d_gate)[N], A (&d_up)[N]) const {
    A s[N], c[N];
    sigmoids(g, s, c);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      d_up[i] = product(g[i], s[i]);
      h[i] = product(d_up[i], u[i]);
      d_gate[i] = product(u[i], fused(d_up[i], c[i], s[i]));
    }
  }

 private:
  template <int N>
  static __device__ __forceinline__ void sigmoids(const A (&g)[N], A (&s)[N], A (&complement)[N]) {
    if constexpr (kFast) {
      float e[N], r[N];
#pragma unroll
      for (int i = 0; i < N; ++i)
        e[i] = fast_exp2(product(fabsf(g[i]), -kLog2E));
#pragma unroll
      for (int i = 0; i < N; ++i)
        r[i] = fast_reciprocal(__fadd_rn(1.0F, e[i]));
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float small = product(e[i], r[i]);
        s[i] = g[i] < 0.0F ? small : r[i];
        complement[i] = g[i] < 0.0F ? r[i] : small;
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i)
        sigmoid_pair<false>(g[i], s[i], complement[i]);
    }
  }
};

/// b1 tanh(g / b1) sigma(g) * b2 tanh(u / b2).
template <class A, bool kFast>
struct SituGlu {
  explicit SituGlu(const GluActivation& a)
      : b1(static_cast<A>(a.beta1)),
        b2(static_cast<A>(a.beta2)),
        inv1(static_cast<A>(1.0 / a.beta1)),
        inv2(static_cast<A>(1.0 / a.beta2)) {}
  template <int N>
  __device__ __forceinline__ void values(const A (&g)[N], const A (&u)[N], A (&h)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      A tanh_g, tanh_u, unused;
      tanh_and_slope<false>(g[i] * inv1, tanh_g, unused);
      tanh_and_slope<false>(u[i] * inv2, tanh_u, unused);
      h[i] = b1 * tanh_g * sigmoid<false>(g[i]) * (b2 * tanh_u);
    }
  }
  template <int N>
  __device__ __forceinline__ void points(
      const A (&g)[N], const A (&u)[N], A (&h)[N], A (&d_gate)[N], A (&d_up)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      A s, c;
      sigmoid_pair<false>(g[i], s, c);
      A tanh_g, tanh_u, slope_g, slope_u;
      tanh_and_slope<false>(g[i] * inv1, tanh_g, slope_g);
      tanh_and_slope<false>(u[i] * inv2, tanh_u, slope_u);
      const A up = b2 * tanh_u;
      const A a = b1 * tanh_g * s;
      h[i] = a * up;
      d_gate[i] = up * (slope_g * s + a * c);
      d_up[i] = a * slope_u;
    }
  }
  A b1, b2, inv1, inv2;
};

/// The same for bf16. Exponentials and reciprocals set the pace, so there are few: the two denominators of the gate share a
/// reciprocal, and where |u / b2| is small in all N elements, as it mostly is, the odd series of tanh does without.
template <>
struct SituGlu<float, true> {
  explicit SituGlu(const GluActivation& a)
      : b1(static_cast<float>(a.beta1)),
        b2(static_cast<float>(a.beta2)),
        inv1(static_cast<float>(1.0 / a.beta1)),
        inv2(static_cast<float>(1.0 / a.beta2)) {}
  template <int N>
  __device__ __forceinline__ void values(const float (&g)[N],
                                         const float (&u)[N],
                                         float (&h)[N]) const {
    float tanh_u[N], unused[N];
    linear_parts(u, tanh_u, unused);
    Gates<N> gate;
    gate_parts(g, gate);
#pragma unroll
    for (int i = 0; i < N; ++i)
      h[i] = product(product(product(b1, gate.tanh[i]), gate.sigma[i]), product(b2, tanh_u[i]));
  }
  template <int N>
  __device__ __forceinline__ void points(const float (&g)[N],
                                         const float (&u)[N],
                                         float (&h)[N],
                                         float (&d_gate)[N],
                                         float (&d_up)[N]) const {
    float tanh_u[N], slope_u[N];
    linear_parts(u, tanh_u, slope_u);
    Gates<N> gate;
    gate_parts(g, gate);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float up = product(b2, tanh_u[i]),
                  a = product(product(b1, gate.tanh[i]), gate.sigma[i]);
      h[i] = product(a, up);
      d_gate[i] = product(up, fused(gate.slope[i], gate.sigma[i], product(a, gate.complement[i])));
      d_up[i] = product(a, slope_u[i]);
    }
  }

 private:
  template <int N>
  struct Gates {
    float tanh[N], slope[N], sigma[N], complement[N];
  };
  static constexpr float kSmall = 0.35F;  // above it 1 - e loses less than two bits

  // tanh of small numbers.
  template <int N>
  static __device__ __forceinline__ void series(const float (&x)[N], float (&value)[N]) {
    constexpr float kTerms[] = {0.0218694885F, -0.0539682540F, 0.133333333F, -0.333333333F, 1.0F};
    float z[N], p[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      z[i] = product(x[i], x[i]);
      p[i] = -0.00886323553F;
    }
#pragma unroll
    for (const float term : kTerms) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        p[i] = fused(z[i], p[i], term);
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
      value[i] = product(x[i], p[i]);
  }
  template <int N>
  __device__ __forceinline__ void gate_parts(const float (&g)[N], Gates<N>& gate) const {
    float x[N], e[N], e_tanh[N], r[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = product(g[i], inv1);
      e[i] = fast_exp2(product(fabsf(g[i]), -kLog2E));
      e_tanh[i] = fast_exp2(product(fabsf(x[i]), -2.0F * kLog2E));
    }
#pragma unroll
    for (int i = 0; i < N; ++i)  // of 1 to 4
      r[i] = fast_reciprocal(product(__fadd_rn(1.0F, e[i]), __fadd_rn(1.0F, e_tanh[i])));
    series(x, gate.tanh);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float high = product(r[i], __fadd_rn(1.0F, e_tanh[i])), low = product(e[i], high),
                  q = product(r[i], __fadd_rn(1.0F, e[i]));
      const float large = copysignf(product(__fadd_rn(1.0F, -e_tanh[i]), q), x[i]);
      gate.tanh[i] = fabsf(x[i]) < kSmall ? gate.tanh[i] : large;
      gate.slope[i] = product(product(4.0F, e_tanh[i]), product(q, q));
      gate.sigma[i] = g[i] < 0.0F ? low : high;
      gate.complement[i] = g[i] < 0.0F ? high : low;
    }
  }
  template <int N>
  __device__ __forceinline__ void linear_parts(const float (&u)[N],
                                               float (&value)[N],
                                               float (&slope)[N]) const {
    float x[N];
    bool all_small = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = product(u[i], inv2);
      all_small = all_small && fabsf(x[i]) < kSmall;
    }
    series(x, value);
#pragma unroll
    for (int i = 0; i < N; ++i)
      slope[i] = fused(-value[i], value[i], 1.0F);
    if (all_small) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float e = fast_exp2(product(fabsf(x[i]), -2.0F * kLog2E)),
                  q = fast_reciprocal(__fadd_rn(1.0F, e));
      const bool small = fabsf(x[i]) < kSmall;
      value[i] = small ? value[i] : copysignf(product(__fadd_rn(1.0F, -e), q), x[i]);
      slope[i] = small ? slope[i] : product(product(4.0F, e), product(q, q));
    }
  }
  float b1, b2, inv1, inv2;
};

/// The activation of N neighbouring elements of a row.
template <class A, int N, class T, class Act>
__device__ __forceinline__ Vec<T, N> glu_values(const Act& act,
                                                const Vec<T, N>& gate,
                                                const Vec<T, N>& up) {
  A g[N], u[N], h[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    g[i] = widen<A>(gate.v[i]);
    u[i] = widen<A>(up.v[i]);
  }
  act.values(g, u, h);
  Vec<T, N> result;
#pragma unroll
  for (int i = 0; i < N; ++i)
    result.v[i] = round_to<T>(h[i]);
  return result;
}

/// What GluBackward makes of N neighbouring elements of a row, in place: the gradients of gate and up, and h times its
/// factor where the gradient of h was. Returns their part of the gradient of the row's weight.
template <class A, int N, class T, class Act>
__device__ __forceinline__ A
glu_gradients(const Act& act, A weight, A h_factor, Vec<T, N>& gate, Vec<T, N>& up, Vec<T, N>& dh) {
  A g[N], u[N], h[N], d_gate[N], d_up[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    g[i] = widen<A>(gate.v[i]);
    u[i] = widen<A>(up.v[i]);
  }
  act.points(g, u, h, d_gate, d_up);
  A sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const A grad = widen<A>(dh.v[i]), weighted = product(weight, grad);
    sum = fused(grad, h[i], sum);
    gate.v[i] = round_to<T>(product(weighted, d_gate[i]));
    up.v[i] = round_to<T>(product(weighted, d_up[i]));
    dh.v[i] = round_to<T>(product(h_factor, h[i]));
  }
  return sum;
}

/// The gradient of a row's weight is a sum over the row. Its order: 8 neighbouring pieces of N elements (a group, by
/// lanes_sum) at a time; of the groups every kRowClasses-th ascending; the classes in fours, (0 + 1) + (2 + 3), the fours
/// ascending. Narrow rows have four classes.
constexpr int kGroupPieces = 8;
constexpr int row_classes(std::int64_t width, int n) {
  return width <= std::int64_t{2} * kWarp * n ? kWarp / kGroupPieces : 16;
}

}  // namespace moesaic::cuda
