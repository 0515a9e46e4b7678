#pragma once
// Operands of the KDA core for tests: normalised queries and keys, gates and betas of several kinds, packed documents.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ops/kda_chunk.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {

inline DType kda_wide(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

/// Gates: g of every token and channel. Keys: similar to each other or not; the same keys with beta near 1 and slow decays
/// are what makes the triangular systems of a chunk as ill-conditioned as they get.
enum class KdaGates { bounded, tiny, softplus, extreme };
enum class KdaKeys { random, same };

struct KdaCase {
  std::vector<std::int32_t> cu;
  std::int64_t heads, K, V;
  int chunk_size;
  DType dtype;
  bool states = true;  ///< given and wanted: s0, s_final, ds_final, ds0
  bool saved = true;
  KdaGates gates = KdaGates::bounded;
  KdaKeys keys = KdaKeys::random;
  bool in_place = false;  ///< s_final in s0, dv in d_o, ds0 in ds_final
  bool ends = false;      ///< states of the first document (s0, ds0) and of the last one alone

  std::int64_t tokens() const { return cu.back(); }
  std::int64_t documents() const { return static_cast<std::int64_t>(cu.size()) - 1; }
  Shape k_shape() const { return {tokens(), heads, K}; }
  Shape v_shape() const { return {tokens(), heads, V}; }
  Shape state_shape() const { return {ends ? 1 : documents(), heads, K, V}; }
};

/// NaN: whatever is read without having been written shows.
inline void fill_poison(TensorView view) {
  std::memset(view.data(), 0xff, view.bytes());
}

template <class F>
void fill_with(TensorView view, const F& f) {
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < view.numel(); ++i)
      view.as<T>()[i] = T(f(i));
  });
}
/// Rows of length one, times `scale`; `same`: all rows of a head close to one direction.
inline void fill_unit_rows(TensorView view, std::uint64_t key, double scale, bool same) {
  const std::int64_t heads = view.dim(1), size = view.dim(2);
  std::vector<double> row(static_cast<std::size_t>(size));
  for (std::int64_t r = 0; r < view.numel() / size; ++r) {
    double sum = 1e-6;
    for (std::int64_t c = 0; c < size; ++c) {
      double x = standard_normal(key, static_cast<std::uint64_t>(r * size + c));
      if (same)
        x = 0.05 * x + standard_normal(key + 100, static_cast<std::uint64_t>(r % heads * size + c));
      row[static_cast<std::size_t>(c)] = x;
      sum += x * x;
    }
    dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
      for (std::int64_t c = 0; c < size; ++c)
        view.as<T>()[r * size + c] = T(scale * row[static_cast<std::size_t>(c)] / std::sqrt(sum));
    });
  }
}
inline double gate_value(KdaGates kind, std::uint64_t i) {
  const double x = standard_normal(31, i), pick = standard_normal(32, i);
  switch (kind) {
    case KdaGates::bounded:
      return -5.0 / (1.0 + std::exp(-x));
    case KdaGates::tiny:
      return -1e-4 * std::fabs(x);
    case KdaGates::softplus:
      return -std::exp(0.5 * pick) * std::log1p(std::exp(x - 2.0));
    case KdaGates::extreme:  // forgets, nearly forgets, keeps
      return pick > 1.5   ? -1600.0
             : pick > 1.0 ? -88.0 * std::fabs(x)
             : pick > 0.5 ? -25.0
                          : -0.01 * std::fabs(x);
  }
  return 0.0;
}

struct KdaTwins {
  explicit KdaTwins(const KdaCase& c)
      : q(c.k_shape(), c.dtype),
        k(c.k_shape(), c.dtype),
        v(c.v_shape(), c.dtype),
        o(c.v_shape(), c.dtype),
        d_o(c.v_shape(), c.dtype),
        dq(c.k_shape(), c.dtype),
        dk(c.k_shape(), c.dtype),
        dv(c.v_shape(), c.dtype),
        g(c.k_shape(), kda_wide(c.dtype)),
        dg(c.k_shape(), kda_wide(c.dtype)),
        beta({c.tokens(), c.heads}, kda_wide(c.dtype)),
        dbeta({c.tokens(), c.heads}, kda_wide(c.dtype)),
        s0(c.state_shape(), kda_wide(c.dtype)),
        s_final(c.state_shape(), kda_wide(c.dtype)),
        ds_final(c.state_shape(), kda_wide(c.dtype)),
        ds0(c.state_shape(), kda_wide(c.dtype)),
        saved({kda_saved_numel(c.tokens(), c.documents(), c.heads, c.K, c.V, c.chunk_size)},
              kda_wide(c.dtype)),
        cu({static_cast<std::int64_t>(c.cu.size())}, DType::i32) {
    const bool same = c.keys == KdaKeys::same;
    fill_unit_rows(q.initial.view(), 1, 1.0 / std::sqrt(static_cast<double>(c.K)), same);
    fill_unit_rows(k.initial.view(), 2, 1.0, same);
    fill_normal(v.initial.view(), 3);
    fill_normal(d_o.initial.view(), 4);
    fill_with(g.initial.view(),
              [&](std::int64_t i) { return gate_value(c.gates, static_cast<std::uint64_t>(i)); });
    fill_with(beta.initial.view(), [&](std::int64_t i) {
      const double x = standard_normal(5, static_cast<std::uint64_t>(i));
      return 1.0 / (1.0 + std::exp(-(same ? 4.0 + 0.3 * x : x)));
    });
    fill_normal(s0.initial.view(), 6, 0.3);
    fill_normal(ds_final.initial.view(), 7, 0.3);
    for (const auto* twin : {&o, &dq, &dk, &dv, &dg, &dbeta, &s_final, &ds0, &saved})
      fill_poison(twin->initial.view());
    std::copy(c.cu.begin(), c.cu.end(), cu.initial.data<std::int32_t>());
  }
  std::vector<const Twin*> all() const {
    return {&q,
            &k,
            &v,
            &o,
            &d_o,
            &dq,
            &dk,
            &dv,
            &g,
            &dg,
            &beta,
            &dbeta,
            &s0,
            &s_final,
            &ds_final,
            &ds0,
            &saved,
            &cu};
  }
  Twin q, k, v, o, d_o, dq, dk, dv, g, dg, beta, dbeta, s0, s_final, ds_final, ds0, saved, cu;
};

template <class Side>
KdaChunkForward kda_forward(const KdaCase& c, const KdaTwins& t, const Side& side) {
  return {.o = side(t.o),
          .s_final = c.states ? side(c.in_place ? t.s0 : t.s_final) : TensorView(),
          .saved = c.saved ? side(t.saved) : TensorView(),
          .q = side(t.q),
          .k = side(t.k),
          .v = side(t.v),
          .g = side(t.g),
          .beta = side(t.beta),
          .s0 = c.states ? side(t.s0) : TensorView(),
          .cu_seqlens = side(t.cu),
          .chunk_size = c.chunk_size};
}
/// `saved` as forward left it on that side.
template <class Side>
KdaChunkBackward kda_backward(const KdaCase& c,
                              const KdaTwins& t,
                              const Side& side,
                              ConstTensorView saved) {
  return {.dq = side(t.dq),
          .dk = side(t.dk),
          .dv = side(c.in_place ? t.d_o : t.dv),
          .dg = side(t.dg),
          .dbeta = side(t.dbeta),
          .ds0 = c.states ? side(c.in_place ? t.ds_final : t.ds0) : TensorView(),
          .d_o = side(t.d_o),
          .ds_final = c.states ? side(t.ds_final) : TensorView(),
          .q = side(t.q),
          .k = side(t.k),
          .v = side(t.v),
          .g = side(t.g),
          .beta = side(t.beta),
          .s0 = c.states ? side(t.s0) : TensorView(),
          .saved = saved,
          .cu_seqlens = side(t.cu),
          .chunk_size = c.chunk_size};
}

}  // namespace moesaic::test
