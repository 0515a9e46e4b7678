#pragma once
// Host tensors, a CPU backend with poisoned scratch, and the token-by-token recurrence, for the
// tests of the KDA ops.
#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "kernels/backend.h"
#include "kernels/ops/kda_chunk.h"
#include "memory/buffer.h"
#include "tests/support/catch.h"

namespace moesaic::kda_test {

using Values = std::vector<double>;

/// A tensor with memory of its own, filled from and read back as doubles.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Shape shape, DType dtype)
      : buffer_(byte_size(dtype) * static_cast<std::size_t>(shape.numel()) + 64, kCpu, "test"),
        view_(buffer_.view(shape, dtype)) {
    std::fill_n(
        buffer_.data(), view_.bytes(), std::byte{0xff});  // NaN: results must be overwritten
  }
  Tensor(Shape shape, DType dtype, const Values& values) : Tensor(shape, dtype) { fill(values); }

  void fill(const Values& values) const {
    REQUIRE(static_cast<std::int64_t>(values.size()) == view_.numel());
    dispatch_float(view_.dtype(), [&]<class T>(TypeTag<T>) {
      for (std::size_t i = 0; i < values.size(); ++i)
        view_.as<T>()[i] = T(values[i]);
    });
  }
  void zero() const { fill(Values(static_cast<std::size_t>(view_.numel()), 0.0)); }
  Values values() const {
    Values v(static_cast<std::size_t>(view_.numel()));
    dispatch_float(view_.dtype(), [&]<class T>(TypeTag<T>) {
      for (std::size_t i = 0; i < v.size(); ++i)
        v[i] = static_cast<double>(view_.as<T>()[i]);
    });
    return v;
  }
  operator TensorView() const { return view_; }       // NOLINT
  operator ConstTensorView() const { return view_; }  // NOLINT

 private:
  Buffer buffer_;
  TensorView view_;
};

inline Tensor documents_tensor(const std::vector<std::int32_t>& cu) {
  Tensor t({static_cast<std::int64_t>(cu.size())}, DType::i32);
  std::copy(cu.begin(), cu.end(), static_cast<TensorView>(t).as<std::int32_t>());
  return t;
}

inline DType wide(DType t) {
  return t == DType::f64 ? DType::f64 : DType::f32;
}

class Cpu {
 public:
  explicit Cpu(int threads = 1)
      : owner_({.num_threads = threads, .scratch_bytes = std::size_t{96} << 20, .name = "test"}) {}
  template <class Op>
  void run(const Op& op) {
    owner_.scratch().poison();
    moesaic::run(owner_.backend(), op);
    owner_.stream().synchronize();
  }

 private:
  BackendOwner owner_;
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  Values normal(std::int64_t n, double scale = 1.0) {
    std::normal_distribution<double> d(0.0, scale);
    Values v(static_cast<std::size_t>(n));
    for (auto& x : v)
      x = d(engine_);
    return v;
  }
  Values uniform(std::int64_t n, double low, double high) {
    std::uniform_real_distribution<double> d(low, high);
    Values v(static_cast<std::size_t>(n));
    for (auto& x : v)
      x = d(engine_);
    return v;
  }

 private:
  std::mt19937 engine_;
};

inline double dot(const Values& a, const Values& b) {
  double s = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    s += a[i] * b[i];
  return s;
}

/// |a - b| / |b|, relative to 1 when b is zero; infinite when a is not finite.
inline double relative_error(const Values& a, const Values& b) {
  REQUIRE(a.size() == b.size());
  double diff = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return INFINITY;
    diff += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(diff) / (norm > 0 ? std::sqrt(norm) : 1.0);
}

/// Central differences of f at x, for every element.
inline Values central_differences(Values x,
                                  double step,
                                  const std::function<double(const Values&)>& f) {
  Values d(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double at = x[i];
    x[i] = at + step;
    const double up = f(x);
    x[i] = at - step;
    const double down = f(x);
    x[i] = at;
    d[i] = (up - down) / (2 * step);
  }
  return d;
}

/// Operands of the core for T tokens; queries and keys normalised.
struct CoreCase {
  std::int64_t H = 2, K = 8, V = 6;
  std::vector<std::int32_t> cu;
  Values q = {}, k = {}, v = {}, g = {}, beta = {}, s0 = {}, d_o = {}, ds_final = {};

  std::int64_t tokens() const { return cu.back(); }
  std::int64_t documents() const { return static_cast<std::int64_t>(cu.size()) - 1; }
  Shape keys() const { return {tokens(), H, K}; }
  Shape rows() const { return {tokens(), H, V}; }
  Shape heads() const { return {tokens(), H}; }
  Shape states() const { return {documents(), H, K, V}; }
};

inline void normalise(Values& x, std::int64_t width, double scale) {
  for (std::size_t r = 0; r < x.size(); r += static_cast<std::size_t>(width)) {
    double s = 1e-6;
    for (std::int64_t c = 0; c < width; ++c)
      s += x[r + static_cast<std::size_t>(c)] * x[r + static_cast<std::size_t>(c)];
    for (std::int64_t c = 0; c < width; ++c)
      x[r + static_cast<std::size_t>(c)] *= scale / std::sqrt(s);
  }
}

inline CoreCase random_case(std::vector<std::int32_t> cu,
                            std::int64_t H,
                            std::int64_t K,
                            std::int64_t V,
                            unsigned seed,
                            double g_low = -2.0) {
  CoreCase c{.H = H, .K = K, .V = V, .cu = std::move(cu)};
  Random random(seed);
  const std::int64_t T = c.tokens();
  c.q = random.normal(T * H * K);
  c.k = random.normal(T * H * K);
  normalise(c.q, K, 1.0 / std::sqrt(static_cast<double>(K)));
  normalise(c.k, K, 1.0);
  c.v = random.normal(T * H * V);
  c.g = random.uniform(T * H * K, g_low, 0.0);
  c.beta = random.uniform(T * H, 0.05, 0.95);
  c.s0 = random.normal(c.states().numel());
  c.d_o = random.normal(T * H * V);
  c.ds_final = random.normal(c.states().numel());
  return c;
}

struct CoreResult {
  Values o = {}, s_final = {}, dq = {}, dk = {}, dv = {}, dg = {}, dbeta = {}, ds0 = {};
};

/// The definition (SPEC 1.1), token by token, in double.
inline CoreResult recurrence(const CoreCase& c) {
  CoreResult r;
  r.o.assign(static_cast<std::size_t>(c.rows().numel()), 0.0);
  r.s_final = c.s0;
  for (std::int64_t n = 0; n < c.documents(); ++n) {
    for (std::int64_t h = 0; h < c.H; ++h) {
      double* S = r.s_final.data() + (n * c.H + h) * c.K * c.V;
      for (std::int64_t t = c.cu[static_cast<std::size_t>(n)];
           t < c.cu[static_cast<std::size_t>(n) + 1];
           ++t) {
        const std::int64_t row = t * c.H + h;
        for (std::int64_t j = 0; j < c.V; ++j) {
          double read = 0, out = 0;
          for (std::int64_t i = 0; i < c.K; ++i) {
            S[i * c.V + j] *= std::exp(c.g[static_cast<std::size_t>(row * c.K + i)]);
            read += S[i * c.V + j] * c.k[static_cast<std::size_t>(row * c.K + i)];
          }
          const double u = c.beta[static_cast<std::size_t>(row)] *
                           (c.v[static_cast<std::size_t>(row * c.V + j)] - read);
          for (std::int64_t i = 0; i < c.K; ++i) {
            S[i * c.V + j] += c.k[static_cast<std::size_t>(row * c.K + i)] * u;
            out += S[i * c.V + j] * c.q[static_cast<std::size_t>(row * c.K + i)];
          }
          r.o[static_cast<std::size_t>(row * c.V + j)] = out;
        }
      }
    }
  }
  return r;
}

struct CoreOptions {
  DType dtype = DType::f64;
  int chunk_size = 64;
  bool save = false;
  bool backward = true;
};

/// Forward and backward of the chunk ops.
inline CoreResult run_core(Cpu& cpu, const CoreCase& c, const CoreOptions& options = {}) {
  const DType t = options.dtype, a = wide(t);
  const Tensor q(c.keys(), t, c.q), k(c.keys(), t, c.k), v(c.rows(), t, c.v), g(c.keys(), a, c.g),
      beta(c.heads(), a, c.beta), s0(c.states(), a, c.s0);
  const Tensor o(c.rows(), t), s_final(c.states(), a), cu = documents_tensor(c.cu);
  Tensor saved;
  if (options.save)
    saved =
        Tensor({kda_saved_numel(c.tokens(), c.documents(), c.H, c.K, c.V, options.chunk_size)}, a);
  cpu.run(KdaChunkForward{.o = o,
                          .s_final = s_final,
                          .saved = saved,
                          .q = q,
                          .k = k,
                          .v = v,
                          .g = g,
                          .beta = beta,
                          .s0 = s0,
                          .cu_seqlens = cu,
                          .chunk_size = options.chunk_size});
  CoreResult r{.o = o.values(), .s_final = s_final.values()};
  if (!options.backward) return r;
  const Tensor d_o(c.rows(), t, c.d_o), ds_final(c.states(), a, c.ds_final);
  const Tensor dq(c.keys(), t), dk(c.keys(), t), dv(c.rows(), t), dg(c.keys(), a),
      dbeta(c.heads(), a), ds0(c.states(), a);
  cpu.run(KdaChunkBackward{.dq = dq,
                           .dk = dk,
                           .dv = dv,
                           .dg = dg,
                           .dbeta = dbeta,
                           .ds0 = ds0,
                           .d_o = d_o,
                           .ds_final = ds_final,
                           .q = q,
                           .k = k,
                           .v = v,
                           .g = g,
                           .beta = beta,
                           .s0 = s0,
                           .saved = saved,
                           .cu_seqlens = cu,
                           .chunk_size = options.chunk_size});
  r.dq = dq.values();
  r.dk = dk.values();
  r.dv = dv.values();
  r.dg = dg.values();
  r.dbeta = dbeta.values();
  r.ds0 = ds0.values();
  return r;
}

/// The largest relative error over all results present in both.
inline double worst_error(const CoreResult& a, const CoreResult& b) {
  double worst = 0;
  const std::pair<const Values*, const Values*> pairs[] = {{&a.o, &b.o},
                                                           {&a.s_final, &b.s_final},
                                                           {&a.dq, &b.dq},
                                                           {&a.dk, &b.dk},
                                                           {&a.dv, &b.dv},
                                                           {&a.dg, &b.dg},
                                                           {&a.dbeta, &b.dbeta},
                                                           {&a.ds0, &b.ds0}};
  for (const auto& [x, y] : pairs) {
    if (!x->empty() && !y->empty()) worst = std::max(worst, relative_error(*x, *y));
  }
  return worst;
}

}  // namespace moesaic::kda_test
