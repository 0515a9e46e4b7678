#pragma once
// A CPU backend with tensors for tests of single ops.
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "tests/support/catch.h"

namespace moesaic::test {

class Rig {
 public:
  explicit Rig(int threads = 1)
      : owner_({.device = kCpu,
                .num_threads = threads,
                .scratch_bytes = std::size_t{32} << 20,
                .name = "test"}) {}

  /// Runs one op to its end; scratch memory is full of NaN before it.
  template <class Op>
  void run(const Op& op) {
    owner_.scratch().poison();
    moesaic::run(owner_.backend(), op);
    owner_.stream().synchronize();
  }

  /// Shows every later op to `observer`, until null.
  void observe(OpObserver* observer) { owner_.observe(observer); }

  TensorView zeros(Shape shape, DType dtype) {
    const auto bytes = byte_size(dtype) * static_cast<std::size_t>(shape.numel());
    return memory_.emplace_back(std::max<std::size_t>(bytes, 1), kCpu, "test").view(shape, dtype);
  }
  /// All bits set: NaN, or -1.
  TensorView poisoned(Shape shape, DType dtype) {
    const TensorView view = zeros(shape, dtype);
    std::memset(view.data(), 0xff, view.bytes());
    return view;
  }
  TensorView values(const std::vector<double>& v, Shape shape, DType dtype) {
    const TensorView view = zeros(shape, dtype);
    write(view, v);
    return view;
  }
  TensorView random(Shape shape, DType dtype, std::uint64_t seed, double scale = 1.0) {
    std::vector<double> v(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < v.size(); ++i)
      v[i] = scale * standard_normal(seed, i);
    return values(v, shape, dtype);
  }
  TensorView ints(const std::vector<std::int32_t>& v) {
    const TensorView view = zeros({static_cast<std::int64_t>(v.size())}, DType::i32);
    std::copy(v.begin(), v.end(), view.as<std::int32_t>());
    return view;
  }

 private:
  static void write(const TensorView& view, const std::vector<double>& v) {
    dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
      for (std::size_t i = 0; i < v.size(); ++i)
        view.as<T>()[i] = T(v[i]);
    });
  }
  BackendOwner owner_;
  std::vector<Buffer> memory_;
};

inline std::vector<double> read(const ConstTensorView& view) {
  std::vector<double> v(static_cast<std::size_t>(view.numel()));
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::size_t i = 0; i < v.size(); ++i)
      v[i] = static_cast<double>(static_cast<acc_t<T>>(view.as<T>()[i]));
  });
  return v;
}

inline bool same_bits(const ConstTensorView& a, const ConstTensorView& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

inline double inner(const ConstTensorView& a, const ConstTensorView& b) {
  const auto x = read(a), y = read(b);
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    sum += x[i] * y[i];
  return sum;
}

/// Central differences of `loss` in up to 30 elements of the f64 tensor x against `gradient`.
inline void check_gradient(const TensorView& x,
                           const ConstTensorView& gradient,
                           const std::function<double()>& loss) {
  const auto g = read(gradient);
  double* v = x.as<double>();
  const auto n = static_cast<std::size_t>(x.numel());
  REQUIRE(g.size() == n);
  const std::size_t step = std::max<std::size_t>(1, n / 30);
  for (std::size_t i = 0; i < n; i += step) {
    constexpr double kStep = 1e-5;
    const double old = v[i];
    v[i] = old + kStep;
    const double up = loss();
    v[i] = old - kStep;
    const double down = loss();
    v[i] = old;
    const double numeric = (up - down) / (2 * kStep);
    INFO("element " << i << ": gradient " << g[i] << ", differences " << numeric);
    CHECK(std::abs(numeric - g[i]) <= 2e-8 * (1 + std::abs(g[i])));
  }
}

/// `compute` gives the same bits on one thread and on three.
inline void check_threads(const std::function<std::vector<TensorView>(Rig&)>& compute) {
  Rig one(1), three(3);
  const auto a = compute(one), b = compute(three);
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("result " << i);
    CHECK(same_bits(a[i], b[i]));
    for (const double v : read(a[i]))
      REQUIRE(std::isfinite(v));
  }
}

/// Largest |a - b|.
inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::abs(a[i] - b[i]);
    largest = std::isnan(d) ? INFINITY : std::max(largest, d);
  }
  return largest;
}

}  // namespace moesaic::test
