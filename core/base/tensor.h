#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "core/base/dtype.h"
#include "core/base/error.h"

namespace moesaic {

struct Device {
  enum class Kind : std::uint8_t { cpu, cuda };
  Kind kind = Kind::cpu;
  std::int16_t ordinal = 0;
  bool operator==(const Device&) const = default;
};
constexpr Device kCpu{Device::Kind::cpu, 0};
std::string to_string(Device device);

/// Up to five extents, row-major. Rank 0 is a scalar with one element.
struct Shape {
  static constexpr int kMaxRank = 5;
  std::array<std::int64_t, kMaxRank> dim{};
  int rank = 0;

  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents);
  std::int64_t operator[](int i) const noexcept { return dim[static_cast<std::size_t>(i)]; }
  std::int64_t numel() const noexcept;
  bool operator==(const Shape&) const = default;
};
std::string to_string(const Shape& shape);

/// A dense row-major window on memory that somebody else owns: pointer, dtype, shape, device. Trivially copyable, passed
/// by value. Never allocates, never frees, never synchronises.
template <class Byte>  // std::byte, or const std::byte for a read-only view
class BasicTensorView {
 public:
  BasicTensorView() = default;
  BasicTensorView(Byte* data, DType dtype, Shape shape, Device device = kCpu) noexcept
      : data_(data), shape_(shape), dtype_(dtype), device_(device) {}
  /// A writable view is usable wherever a read-only one is wanted, never the reverse.
  template <class Other>
  requires(std::is_const_v<Byte> && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& v)
  noexcept  // NOLINT(google-explicit-constructor)
      : BasicTensorView(v.data(), v.dtype(), v.shape(), v.device()) {}

  /// Typed pointer; throws InternalError when T is not the element type. Null for an empty view.
  template <class T>
  auto* as() const {
    MOESAIC_CHECK(data_ == nullptr || dtype_of<T> == dtype_,
                  std::string("tensor holds ") + name(dtype_) + ", not " + name(dtype_of<T>));
    if constexpr (std::is_const_v<Byte>) {
      return reinterpret_cast<const T*>(data_);
    } else {
      return reinterpret_cast<T*>(data_);
    }
  }
  /// Rows [begin, end) of dimension 0; no copy.
  BasicTensorView rows(std::int64_t begin, std::int64_t end) const {
    MOESAIC_CHECK(shape_.rank > 0 && 0 <= begin && begin <= end && end <= shape_[0],
                  "row range outside the tensor");
    BasicTensorView v = *this;
    v.shape_.dim[0] = end - begin;
    if (data_ != nullptr) v.data_ = data_ + begin * row_bytes();
    return v;
  }
  /// The same elements under another shape; throws when the counts differ.
  BasicTensorView reshaped(Shape shape) const {
    MOESAIC_CHECK(shape.numel() == shape_.numel(), "reshape changes the number of elements");
    BasicTensorView v = *this;
    v.shape_ = shape;
    return v;
  }

  const Shape& shape() const noexcept { return shape_; }
  std::int64_t dim(int i) const noexcept { return shape_[i]; }
  int rank() const noexcept { return shape_.rank; }
  std::int64_t numel() const noexcept { return shape_.numel(); }
  DType dtype() const noexcept { return dtype_; }
  Device device() const noexcept { return device_; }
  Byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept {
    return byte_size(dtype_) * static_cast<std::size_t>(shape_.numel());
  }
  /// True for a view that was not given (an optional argument of an op).
  bool empty() const noexcept { return data_ == nullptr; }

 private:
  std::ptrdiff_t row_bytes() const noexcept {
    std::int64_t n = 1;
    for (int i = 1; i < shape_.rank; ++i)
      n *= shape_[i];
    return static_cast<std::ptrdiff_t>(n * static_cast<std::int64_t>(byte_size(dtype_)));
  }
  Byte* data_ = nullptr;
  Shape shape_;
  DType dtype_ = DType::f32;
  Device device_;
};

using TensorView = BasicTensorView<std::byte>;
using ConstTensorView = BasicTensorView<const std::byte>;

/// Throws InternalError naming `what` unless `view` has this shape (and dtype). Used by the check() of ops.
void check_shape(const ConstTensorView& view, const Shape& shape, const char* what);
void check_dtype(const ConstTensorView& view, DType dtype, const char* what);

}  // namespace moesaic
