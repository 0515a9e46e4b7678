#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/checkpoint_path.h"
#include "apps/ckpt/ckpt.h"
#include "apps/config_changes.h"
#include "core/checkpoint/reader.h"

namespace moesaic::apps {
namespace {

struct Line {
  std::string name;
  std::string what;     ///< "only in A", "f32 [2, 3] and f32 [3, 3]"; empty: compared
  double largest = 0;   ///< |a - b|; NaN where one side is not a number
  double relative = 0;  ///< to the largest |a|
  std::int64_t differs = 0, elements = 0;
};

std::string kind(const CheckpointReader::Tensor& t) {
  return fmt::format("{} {}", name(t.dtype), to_string(t.shape));
}

Line compare(CheckpointReader& a, CheckpointReader& b, const std::string& name) {
  const auto x = a.tensors().find(name), y = b.tensors().find(name);
  Line line{.name = name};
  if (x == a.tensors().end() || y == b.tensors().end()) {
    line.what = x == a.tensors().end() ? "only in B" : "only in A";
  } else if (x->second.dtype != y->second.dtype || x->second.shape != y->second.shape) {
    line.what = kind(x->second) + " and " + kind(y->second);
  } else {
    const DType dtype = x->second.dtype;
    const std::byte* p = a.read(x->second);
    const std::byte* q = b.read(y->second);
    line.elements = x->second.shape.numel();
    if (x->second.bytes == 0 || std::memcmp(p, q, x->second.bytes) == 0) return line;
    const std::size_t size = byte_size(dtype);
    double scale = 0;
    for (std::int64_t i = 0; i < line.elements; ++i) {
      const auto at = static_cast<std::size_t>(i) * size;
      const double u = value_at(p, dtype, i), v = value_at(q, dtype, i);
      scale = std::max(scale, std::abs(u));
      if (std::memcmp(p + at, q + at, size) == 0) continue;
      ++line.differs;
      const double d = std::abs(u - v);
      line.largest = std::isnan(d) || std::isnan(line.largest) ? NAN : std::max(line.largest, d);
    }
    line.relative = scale > 0 ? line.largest / scale : line.largest;
  }
  return line;
}

std::vector<std::string> all_names(const CheckpointReader& a, const CheckpointReader& b) {
  std::vector<std::string> names;
  for (const auto& [name, t] : a.tensors())
    names.push_back(name);
  for (const auto& [name, t] : b.tensors()) {
    if (!a.tensors().contains(name)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

nlohmann::ordered_json number(double x) {
  if (std::isfinite(x)) return x;
  return std::isnan(x) ? "nan" : "inf";
}

void print_changes(const CheckpointReader& a, const CheckpointReader& b) {
  if (a.manifest().step != b.manifest().step)
    std::cout << fmt::format("step: {} -> {}\n", a.manifest().step, b.manifest().step);
  for (const ConfigChange& c : config_changes(a.manifest().config, b.manifest().config))
    std::cout << fmt::format("config {}: {} -> {}\n", c.key, c.before, c.after);
}

}  // namespace

int ckpt_diff(const std::string& a, const std::string& b, bool json) {
  CheckpointReader left(find_checkpoint(a)), right(find_checkpoint(b));
  auto list = nlohmann::ordered_json::array();
  std::int64_t equal = 0, other = 0;
  if (!json) print_changes(left, right);
  for (const std::string& name : all_names(left, right)) {
    const Line line = compare(left, right, name);
    if (line.what.empty() && line.differs == 0) {
      ++equal;
      continue;
    }
    ++other;
    if (json) {
      list.push_back({{"name", name},
                      {"what", line.what},
                      {"max_abs_difference", number(line.largest)},
                      {"relative_to_max", number(line.relative)},
                      {"different", line.differs},
                      {"elements", line.elements}});
    } else if (!line.what.empty()) {
      std::cout << fmt::format("{}: {}\n", name, line.what);
    } else {
      std::cout << fmt::format(
          "{}: max |difference| {:.3e} ({:.1e} of the largest |A|), {} of {} elements differ\n",
          name,
          line.largest,
          line.relative,
          line.differs,
          line.elements);
    }
  }
  if (json) {
    std::cout << nlohmann::ordered_json{{"equal_tensors", equal}, {"different_tensors", list}}.dump(
                     1)
              << "\n";
  } else {
    std::cout << fmt::format("{} tensors have equal bits, {} differ\n", equal, other);
  }
  return other == 0 ? 0 : 1;
}

}  // namespace moesaic::apps
