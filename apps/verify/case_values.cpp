#include "apps/verify/case_values.h"

#include <type_traits>

namespace moesaic::verify {
namespace {

template <class T, class In>
void write_elements(std::byte* to, const std::vector<In>& values) {
  auto* elements = reinterpret_cast<T*>(to);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if constexpr (std::is_same_v<T, bf16>) {
      elements[i] = bf16(static_cast<float>(values[i]));
    } else {
      elements[i] = static_cast<T>(values[i]);
    }
  }
}

}  // namespace

template <class In>
void write_values(DType dtype, std::byte* to, const std::vector<In>& values) {
  switch (dtype) {
    case DType::i32:
      return write_elements<std::int32_t>(to, values);
    case DType::i64:
      return write_elements<std::int64_t>(to, values);
    case DType::u8:
      return write_elements<std::uint8_t>(to, values);
    default:
      dispatch_float(dtype, [&]<class T>(TypeTag<T>) { write_elements<T>(to, values); });
  }
}

template <class Out>
std::vector<Out> read_values(const ConstTensorView& host) {
  std::vector<Out> values(static_cast<std::size_t>(host.numel()));
  const auto read = [&]<class T>(TypeTag<T>) {
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<Out>(host.as<T>()[i]);
  };
  switch (host.dtype()) {
    case DType::i32:
      read(TypeTag<std::int32_t>{});
      break;
    case DType::i64:
      read(TypeTag<std::int64_t>{});
      break;
    case DType::u8:
      read(TypeTag<std::uint8_t>{});
      break;
    default:
      dispatch_float(host.dtype(), read);
  }
  return values;
}

template void write_values(DType, std::byte*, const std::vector<double>&);
template void write_values(DType, std::byte*, const std::vector<std::int64_t>&);
template std::vector<double> read_values(const ConstTensorView&);
template std::vector<std::int64_t> read_values(const ConstTensorView&);

}  // namespace moesaic::verify
