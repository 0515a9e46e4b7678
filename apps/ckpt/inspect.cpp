#include <algorithm>
#include <cmath>
#include <iostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/checkpoint_path.h"
#include "apps/ckpt/ckpt.h"
#include "core/checkpoint/reader.h"
#include "core/nn/tape.h"

namespace moesaic::apps {
namespace {

using nlohmann::ordered_json;

struct Numbers {
  double norm = 0;     ///< square root of the sum of squares
  double largest = 0;  ///< magnitude, among finite elements
  std::int64_t not_finite = 0;
};

Numbers numbers_of(const std::byte* data, DType dtype, std::int64_t count) {
  Numbers n;
  double squares = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const double x = value_at(data, dtype, i);
    if (!std::isfinite(x)) {
      ++n.not_finite;
      continue;
    }
    squares += x * x;
    n.largest = std::max(n.largest, std::abs(x));
  }
  n.norm = std::sqrt(squares);
  return n;
}

std::vector<std::int64_t> extents(const Shape& s) {
  return {s.dim.begin(), s.dim.begin() + s.rank};
}

void print_values(const CheckpointReader& reader) {
  const Manifest& m = reader.manifest();
  std::cout << fmt::format("{}: step {}\n", reader.path().string(), m.step);
  for (const auto& [name, value] : m.values.integers)
    std::cout << fmt::format("  {} = {}\n", name, value);
  for (const auto& [name, value] : m.values.reals)
    std::cout << fmt::format("  {} = {}\n", name, value);
  for (const auto& [name, value] : m.values.texts)
    std::cout << fmt::format("  {} = {}\n", name, value);
  for (const auto& f : m.files)
    std::cout << fmt::format("  {} {}\n", f.name, binary_bytes(static_cast<double>(f.bytes)));
}

void print_tensors(CheckpointReader& reader, const std::string& pattern) {
  std::size_t width = 4;
  for (const auto& [name, t] : reader.tensors())
    width = glob_match(pattern, name) ? std::max(width, name.size()) : width;
  std::cout << fmt::format("{:<{}} {:>6} {:>18} {:>12} {:>12} {:>12}\n",
                           "name",
                           width,
                           "type",
                           "shape",
                           "bytes",
                           "norm",
                           "max |x|");
  double bytes = 0;
  std::int64_t count = 0;
  for (const auto& [name, t] : reader.tensors()) {
    if (!glob_match(pattern, name)) continue;
    const Numbers n = numbers_of(reader.read(t), t.dtype, t.shape.numel());
    std::cout << fmt::format("{:<{}} {:>6} {:>18} {:>12} {:>12.6g} {:>12.6g}{}{}\n",
                             name,
                             width,
                             moesaic::name(t.dtype),
                             to_string(t.shape),
                             t.bytes,
                             n.norm,
                             n.largest,
                             t.pieces.size() > 1 ? fmt::format("  {} pieces", t.pieces.size()) : "",
                             n.not_finite > 0 ? fmt::format("  {} NOT FINITE", n.not_finite) : "");
    bytes += static_cast<double>(t.bytes);
    ++count;
  }
  std::cout << fmt::format("{} tensors, {}\n", count, binary_bytes(bytes));
}

ordered_json to_json(CheckpointReader& reader, const std::string& pattern) {
  const Manifest& m = reader.manifest();
  auto tensors = ordered_json::array();
  for (const auto& [name, t] : reader.tensors()) {
    if (!glob_match(pattern, name)) continue;
    const Numbers n = numbers_of(reader.read(t), t.dtype, t.shape.numel());
    tensors.push_back({{"name", name},
                       {"dtype", moesaic::name(t.dtype)},
                       {"shape", extents(t.shape)},
                       {"bytes", t.bytes},
                       {"pieces", t.pieces.size()},
                       {"norm", n.norm},
                       {"max_abs", n.largest},
                       {"not_finite", n.not_finite}});
  }
  return {{"step", m.step},
          {"integers", m.values.integers},
          {"reals", m.values.reals},
          {"texts", m.values.texts},
          {"tensors", tensors}};
}

}  // namespace

int ckpt_inspect(const std::string& path, const InspectOptions& options) {
  CheckpointReader reader(find_checkpoint(path));
  if (options.config) {
    std::cout << reader.manifest().config;
  } else if (options.json) {
    std::cout << to_json(reader, options.pattern).dump(1) << "\n";
  } else {
    print_values(reader);
    print_tensors(reader, options.pattern);
  }
  return 0;
}

}  // namespace moesaic::apps
