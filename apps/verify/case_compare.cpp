#include "apps/verify/case_compare.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

namespace moesaic::verify {
namespace {

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

std::vector<std::int64_t> read_ints(const CaseData& data, const std::string& name) {
  const CaseTensor& tensor = data.at(name);
  if (tensor.is_floating)
    throw InputError(fmt::format("{}: tensor '{}' should hold integers", data.name, name));
  std::vector<std::int64_t> values;
  values.reserve(tensor.values.size());
  for (const double v : tensor.values)
    values.push_back(static_cast<std::int64_t>(v));
  return values;
}

double round_input(DType dtype, bool stays_f32, double value) {
  const DType to = dtype == DType::bf16 && stays_f32 ? DType::f32 : dtype;
  return dispatch_float(to, [&]<class T>(TypeTag<T>) {
    return static_cast<double>(T(static_cast<acc_t<T>>(value)));
  });
}

std::map<std::string, double> largest_norms(const CaseData& data) {
  std::map<std::string, double> largest;
  for (const auto& [name, tensor] : data.tensors) {
    if (!is_result(name) || !tensor.is_floating) continue;
    double& entry = largest[kind_of(name)];
    entry = std::max(entry, norm(tensor.values));
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

RowDifference worst_row(const std::vector<double>& got,
                        const std::vector<double>& want,
                        std::int64_t rows) {
  RowDifference worst;
  const auto width = want.size() / static_cast<std::size_t>(std::max<std::int64_t>(rows, 1));
  const double usual = norm(want) / std::sqrt(static_cast<double>(rows));
  for (std::int64_t r = 0; r < rows && usual > 0; ++r) {
    double error = 0, size = 0;
    for (std::size_t i = static_cast<std::size_t>(r) * width, end = i + width; i < end; ++i) {
      const double d = got[i] == want[i] ? 0.0 : got[i] - want[i];
      error += d * d;
      size += want[i] * want[i];
    }
    const double relative = std::sqrt(error) / std::max(std::sqrt(size), usual);
    if (!(relative <= worst.relative)) worst = {r, relative};
  }
  return worst;
}

double relative_limit(DType compute, bool stored_in_f32, double length) {
  if (compute == DType::f64) return stored_in_f32 ? 2e-7 : 1e-9;
  return compute == DType::f32 ? 32 * std::ldexp(1.0, -24) * std::sqrt(length)
                               : 2 * std::ldexp(1.0, -8) * std::sqrt(length);
}

double zero_floor(DType compute) {
  return compute == DType::f64 ? 1e-9 : compute == DType::f32 ? 1e-6 : 1e-3;
}

double longest_extent(const CaseData& data) {
  std::int64_t longest = 16;
  for (const auto& [name, tensor] : data.tensors) {
    for (int i = 0; i < tensor.shape.rank; ++i)
      longest = std::max(longest, tensor.shape[i]);
  }
  return static_cast<double>(longest);
}

double generated_limit(DType compute, const GeneratedAccuracy& accuracy) {
  if (compute == DType::bf16) return 2 * std::ldexp(1.0, -8) * std::sqrt(accuracy.roundings);
  const auto length = static_cast<double>(std::max<std::int64_t>(accuracy.longest_sum, 16));
  return relative_limit(compute, false, length);
}

double kink_limit(DType compute) {
  if (compute == DType::f64) return relative_limit(compute, false, 1);
  return compute == DType::f32 ? 16 * std::ldexp(1.0, -12) : 4 * std::ldexp(1.0, -4);
}

bool has_kink(const CaseData& data, const std::string& result) {
  return data.generated && std::any_of(data.generated->kinks.begin(),
                                       data.generated->kinks.end(),
                                       [&](const std::string& part) {
                                         return result.find(part) != std::string::npos;
                                       });
}

double limit_of(DType compute, const CaseData& data, const std::string& result) {
  if (!data.generated) return relative_limit(compute, data.stored_in_f32, longest_extent(data));
  const double limit = generated_limit(compute, *data.generated);
  return has_kink(data, result) ? std::max(limit, kink_limit(compute)) : limit;
}

}  // namespace moesaic::verify
