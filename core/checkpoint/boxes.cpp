#include "core/checkpoint/boxes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic {
namespace {

using Index = std::array<std::int64_t, Shape::kMaxRank>;

std::int64_t offset_in(const Box& box, const Index& at) {
  std::int64_t offset = 0;
  for (int d = 0; d < box.extent.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    offset = offset * box.extent.dim[i] + at[i] - box.begin.dim[i];
  }
  return offset;
}

// The next row (all but the last dimension) of a box; false after the last.
bool next_row(const Box& box, Index& at) {
  for (int d = box.extent.rank - 2; d >= 0; --d) {
    const auto i = static_cast<std::size_t>(d);
    if (++at[i] < box.begin.dim[i] + box.extent.dim[i]) return true;
    at[i] = box.begin.dim[i];
  }
  return false;
}

}  // namespace

Box whole_box(const Shape& shape) {
  Box box{shape, shape};
  std::fill(box.begin.dim.begin(), box.begin.dim.end(), 0);
  return box;
}

bool is_inside(const Box& box, const Shape& whole) {
  if (box.begin.rank != whole.rank || box.extent.rank != whole.rank) return false;
  for (int d = 0; d < whole.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    if (box.begin.dim[i] < 0 || box.extent.dim[i] < 0 || box.begin.dim[i] > whole.dim[i] ||
        box.extent.dim[i] > whole.dim[i] - box.begin.dim[i])
      return false;
  }
  return true;
}

std::optional<Box> intersection(const Box& a, const Box& b) {
  MOESAIC_CHECK(a.extent.rank == b.extent.rank, "boxes of one rank");
  Box shared = a;
  for (int d = 0; d < a.extent.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    const std::int64_t begin = std::max(a.begin.dim[i], b.begin.dim[i]);
    const std::int64_t end =
        std::min(a.begin.dim[i] + a.extent.dim[i], b.begin.dim[i] + b.extent.dim[i]);
    if (end <= begin) return std::nullopt;
    shared.begin.dim[i] = begin;
    shared.extent.dim[i] = end - begin;
  }
  return shared;
}

std::string to_string(const Box& box) {
  std::string text;
  for (int d = 0; d < box.extent.rank; ++d) {
    const auto i = static_cast<std::size_t>(d);
    text += fmt::format(
        "{}{}:{}", d == 0 ? "" : ",", box.begin.dim[i], box.begin.dim[i] + box.extent.dim[i]);
  }
  return "[" + text + "]";
}

void copy_box(std::byte* to,
              const Box& to_box,
              const std::byte* from,
              const Box& from_box,
              const Box& part,
              std::size_t element_bytes) {
  const int rank = part.extent.rank;
  const std::size_t row =
      element_bytes *
      static_cast<std::size_t>(rank == 0 ? 1 : part.extent.dim[static_cast<std::size_t>(rank - 1)]);
  Index at{};
  std::copy_n(part.begin.dim.begin(), rank, at.begin());
  do {
    std::memcpy(to + static_cast<std::size_t>(offset_in(to_box, at)) * element_bytes,
                from + static_cast<std::size_t>(offset_in(from_box, at)) * element_bytes,
                row);
  } while (next_row(part, at));
}

}  // namespace moesaic
