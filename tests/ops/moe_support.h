#pragma once
// Tensors and a runner for the tests of the mixture-of-experts and optimizer ops on the CPU.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/base/random.h"
#include "kernels/backend.h"
#include "memory/buffer.h"
#include "tests/support/catch.h"

namespace moesaic::moe_test {

/// Runs ops at once, each on scratch full of NaN.
class CpuRunner {
 public:
  explicit CpuRunner(int num_threads = 1)
      : owner_({.mode = Stream::Mode::immediate,
                .num_threads = num_threads,
                .scratch_bytes = std::size_t{64} << 20,
                .name = "test"}) {}
  template <class Op>
  void operator()(const Op& op) {
    owner_.scratch().poison();
    run(owner_.backend(), op);
    owner_.stream().synchronize();
  }

 private:
  BackendOwner owner_;
};

/// A tensor that owns its memory, full of NaN (-1 for integers) unless values are given.
class Tensor {
 public:
  Tensor(Shape shape, DType dtype)
      : buffer_(
            std::max<std::size_t>(1, byte_size(dtype) * static_cast<std::size_t>(shape.numel())),
            kCpu,
            "test"),
        view_(buffer_.view(shape, dtype)) {
    std::memset(view_.data(), 0xff, view_.bytes());
  }
  template <class T>
  Tensor(Shape shape, DType dtype, const std::vector<T>& values) : Tensor(shape, dtype) {
    MOESAIC_CHECK(static_cast<std::int64_t>(values.size()) == shape.numel(),
                  "as many values as elements");
    for (std::size_t i = 0; i < values.size(); ++i)
      set(static_cast<std::int64_t>(i), static_cast<double>(values[i]));
  }
  operator TensorView() const { return view_; }       // NOLINT(google-explicit-constructor)
  operator ConstTensorView() const { return view_; }  // NOLINT(google-explicit-constructor)
  TensorView view() const { return view_; }

  double at(std::int64_t i) const {
    switch (view_.dtype()) {
      case DType::f64:
        return view_.as<double>()[i];
      case DType::f32:
        return static_cast<double>(view_.as<float>()[i]);
      case DType::bf16:
        return static_cast<double>(static_cast<float>(view_.as<bf16>()[i]));
      case DType::i64:
        return static_cast<double>(view_.as<std::int64_t>()[i]);
      case DType::i32:
        return view_.as<std::int32_t>()[i];
      default:
        return view_.as<std::uint8_t>()[i];
    }
  }
  void set(std::int64_t i, double v) const {
    switch (view_.dtype()) {
      case DType::f64:
        view_.as<double>()[i] = v;
        break;
      case DType::f32:
        view_.as<float>()[i] = static_cast<float>(v);
        break;
      case DType::bf16:
        view_.as<bf16>()[i] = bf16(v);
        break;
      case DType::i64:
        view_.as<std::int64_t>()[i] = static_cast<std::int64_t>(v);
        break;
      case DType::i32:
        view_.as<std::int32_t>()[i] = static_cast<std::int32_t>(v);
        break;
      default:
        view_.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(v);
    }
  }
  std::vector<double> values() const {
    std::vector<double> out;
    for (std::int64_t i = 0; i < view_.numel(); ++i)
      out.push_back(at(i));
    return out;
  }
  std::vector<std::int64_t> ints() const {
    std::vector<std::int64_t> out;
    for (std::int64_t i = 0; i < view_.numel(); ++i)
      out.push_back(static_cast<std::int64_t>(at(i)));
    return out;
  }

 private:
  Buffer buffer_;
  TensorView view_;
};

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.view().bytes() == b.view().bytes() &&
         std::memcmp(a.view().data(), b.view().data(), a.view().bytes()) == 0;
}

inline Tensor normal(Shape shape, DType dtype, std::uint64_t key, double spread = 1.0) {
  Tensor t(shape, dtype);
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    t.set(i, spread * standard_normal(key, static_cast<std::uint64_t>(i)));
  return t;
}
inline Tensor filled(Shape shape, DType dtype, double value) {
  Tensor t(shape, dtype);
  for (std::int64_t i = 0; i < shape.numel(); ++i)
    t.set(i, value);
  return t;
}
inline Tensor one(DType dtype, double value) {
  return filled({1}, dtype, value);
}
inline Tensor copy_of(const Tensor& t) {
  Tensor c(t.view().shape(), t.view().dtype());
  std::memcpy(c.view().data(), t.view().data(), t.view().bytes());
  return c;
}

/// |got - want| / |want|; infinite when anything is not finite.
inline double relative_error(const std::vector<double>& got, const std::vector<double>& want) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  if (got.size() != want.size() || !std::isfinite(difference))
    return std::numeric_limits<double>::infinity();
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

}  // namespace moesaic::moe_test
