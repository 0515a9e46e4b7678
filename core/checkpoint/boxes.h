#pragma once
// Pieces of tensors: a box of indices inside a whole tensor.
#include <cstddef>
#include <optional>
#include <string>

#include "core/base/tensor.h"

namespace moesaic {

/// Indices begin[d] <= i < begin[d] + extent[d] in every dimension d.
struct Box {
  Shape begin, extent;
  bool operator==(const Box&) const = default;
};

/// All of a tensor.
Box whole_box(const Shape& shape);
/// Whether the box lies in a tensor of this shape (ranks equal, no negative begin, no overflow).
bool is_inside(const Box& box, const Shape& whole);
/// What two boxes of one rank share; nothing when that is empty. Boxes of rank 0 share their one element.
std::optional<Box> intersection(const Box& a, const Box& b);
/// "[0:4,2:7]"
std::string to_string(const Box& box);

/// Copies the elements of `part` from row-major memory that holds the box `from_box` to memory that holds `to_box`; both
/// contain `part`.
void copy_box(std::byte* to,
              const Box& to_box,
              const std::byte* from,
              const Box& from_box,
              const Box& part,
              std::size_t element_bytes);

}  // namespace moesaic
