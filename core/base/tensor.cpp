#include "core/base/tensor.h"

#include <fmt/format.h>

namespace moesaic {

std::size_t byte_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::u16:
      return 2;
    case DType::e4m3:
    case DType::e5m2:
    case DType::u8:
      return 1;
  }
  return 0;
}

const char* name(DType dtype) noexcept {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::e4m3:
      return "e4m3";
    case DType::e5m2:
      return "e5m2";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
    case DType::u16:
      return "u16";
  }
  return "?";
}

Precision precision_from_name(const std::string& text) {
  if (text == "f64") return kF64;
  if (text == "f32") return kF32;
  if (text == "bf16") return kBf16;
  throw UsageError(fmt::format("precision '{}' is not known; use f64, f32 or bf16", text));
}

std::string to_string(Device device) {
  return device.kind == Device::Kind::cpu ? "cpu" : fmt::format("cuda:{}", device.ordinal);
}

Shape::Shape(std::initializer_list<std::int64_t> extents) {
  MOESAIC_CHECK(extents.size() <= kMaxRank, "more dimensions than a Shape holds");
  for (const auto e : extents) {
    MOESAIC_CHECK(e >= 0, "negative extent");
    dim[static_cast<std::size_t>(rank++)] = e;
  }
}

std::int64_t Shape::numel() const noexcept {
  std::int64_t n = 1;
  for (int i = 0; i < rank; ++i)
    n *= dim[static_cast<std::size_t>(i)];
  return n;
}

std::string to_string(const Shape& shape) {
  std::string s = "[";
  for (int i = 0; i < shape.rank; ++i)
    s += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  return s + "]";
}

void check_shape(const ConstTensorView& view, const Shape& shape, const char* what) {
  MOESAIC_CHECK(
      view.shape() == shape,
      fmt::format("{} has shape {}, expected {}", what, to_string(view.shape()), to_string(shape)));
}

void check_dtype(const ConstTensorView& view, DType dtype, const char* what) {
  MOESAIC_CHECK(view.dtype() == dtype,
                fmt::format("{} is {}, expected {}", what, name(view.dtype()), name(dtype)));
}

}  // namespace moesaic
