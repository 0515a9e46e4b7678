#include "apps/verify/case_compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <fmt/format.h>

namespace moesaic::verify {
namespace {

template <class T, class Out>
std::vector<Out> read_as(const ConstTensorView& view) {
  std::vector<Out> values(static_cast<std::size_t>(view.numel()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    T element;  // the file does not promise alignment
    std::memcpy(&element, view.data() + i * sizeof(T), sizeof(T));
    values[i] = static_cast<Out>(element);
  }
  return values;
}

double norm(const std::vector<double>& values) {
  double largest = 0;
  for (const double v : values)
    largest = std::max(largest, std::abs(v));
  if (largest == 0 || !std::isfinite(largest)) return largest;
  double sum = 0;  // scaled, so that neither 1e-200 nor 1e200 is lost in its square
  for (const double v : values)
    sum += (v / largest) * (v / largest);
  return largest * std::sqrt(sum);
}

}  // namespace

bool is_result(const std::string& name) {
  const std::string kind = kind_of(name);
  return kind == "out" || kind == "aux" || kind == "traj" || kind == "final" ||
         kind.starts_with("grad");
}

std::string kind_of(const std::string& name) {
  return name.substr(0, name.find('.'));
}

std::vector<double> read_reals(const SafetensorsFile& file, const std::string& name) {
  const ConstTensorView view = file.view(name);
  switch (view.dtype()) {
    case DType::f64:
      return read_as<double, double>(view);
    case DType::f32:
      return read_as<float, double>(view);
    case DType::bf16:
      return read_as<bf16, double>(view);
    case DType::i64:
      return read_as<std::int64_t, double>(view);
    case DType::i32:
      return read_as<std::int32_t, double>(view);
    case DType::u8:
      return read_as<std::uint8_t, double>(view);
    default:
      throw InputError(fmt::format(
          "{}: tensor '{}' has dtype {}", file.path().string(), name, moesaic::name(view.dtype())));
  }
}

std::vector<std::int64_t> read_ints(const SafetensorsFile& file, const std::string& name) {
  const ConstTensorView view = file.view(name);
  switch (view.dtype()) {
    case DType::i64:
      return read_as<std::int64_t, std::int64_t>(view);
    case DType::i32:
      return read_as<std::int32_t, std::int64_t>(view);
    case DType::u8:
      return read_as<std::uint8_t, std::int64_t>(view);
    default:
      throw InputError(fmt::format("{}: tensor '{}' should hold integers, not {}",
                                   file.path().string(),
                                   name,
                                   moesaic::name(view.dtype())));
  }
}

std::map<std::string, double> largest_norms(const SafetensorsFile& file) {
  std::map<std::string, double> largest;
  for (const auto& [name, tensor] : file.tensors()) {
    if (!is_result(name) || !is_floating(tensor.dtype)) continue;
    double& entry = largest[kind_of(name)];
    entry = std::max(entry, norm(read_reals(file, name)));
  }
  return largest;
}

Difference difference(const std::vector<double>& got,
                      const std::vector<double>& want,
                      double largest_norm_of_kind) {
  Difference d;
  d.stored_zero = std::all_of(want.begin(), want.end(), [](double v) { return v == 0.0; });
  std::vector<double> delta(want.size());
  for (std::size_t i = 0; i < want.size(); ++i) {
    // A limit that both sides reach (log 0 and the like) is agreement; inf - inf is not a number.
    delta[i] = got[i] == want[i] ? 0.0 : got[i] - want[i];
    if (!std::isfinite(delta[i])) {
      d.relative = d.absolute = std::numeric_limits<double>::infinity();
      return d;
    }
    d.absolute = std::max(d.absolute, std::abs(delta[i]));
  }
  const double scale = std::max(norm(want), 1e-6 * largest_norm_of_kind);
  d.relative = d.absolute == 0 ? 0.0 : norm(delta) / scale;
  return d;
}

double relative_limit(DType compute, bool stored_in_f32, double length) {
  if (compute == DType::f64) return stored_in_f32 ? 2e-7 : 1e-9;
  return compute == DType::f32 ? 32 * std::ldexp(1.0, -24) * std::sqrt(length)
                               : 2 * std::ldexp(1.0, -8) * std::sqrt(length);
}

double zero_floor(DType compute) {
  return compute == DType::f64 ? 1e-9 : compute == DType::f32 ? 1e-6 : 1e-3;
}

double longest_extent(const SafetensorsFile& file) {
  std::int64_t longest = 16;
  for (const auto& [name, tensor] : file.tensors()) {
    for (int i = 0; i < tensor.shape.rank; ++i)
      longest = std::max(longest, tensor.shape[i]);
  }
  return static_cast<double>(longest);
}

}  // namespace moesaic::verify
