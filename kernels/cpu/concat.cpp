#include "kernels/ops/concat.h"

#include <cstring>

namespace moesaic {

void launch(CpuContext& context, const ConcatColumns& op) {
  context.stream.enqueue([op] {
    const std::size_t size = byte_size(op.y.dtype());
    const auto m = static_cast<std::size_t>(op.a.dim(1)) * size,
               n = static_cast<std::size_t>(op.b.dim(1)) * size;
    for (std::int64_t t = 0; t < op.y.dim(0); ++t) {
      std::byte* row = op.y.data() + static_cast<std::size_t>(t) * (m + n);
      std::memcpy(row, op.a.data() + static_cast<std::size_t>(t) * m, m);
      std::memcpy(row + m, op.b.data() + static_cast<std::size_t>(t) * n, n);
    }
  });
}

void launch(CpuContext& context, const SplitColumns& op) {
  context.stream.enqueue([op] {
    const std::size_t size = byte_size(op.y.dtype());
    const auto m = static_cast<std::size_t>(op.a.dim(1)) * size,
               n = static_cast<std::size_t>(op.b.dim(1)) * size;
    for (std::int64_t t = 0; t < op.y.dim(0); ++t) {
      const std::byte* row = op.y.data() + static_cast<std::size_t>(t) * (m + n);
      std::memcpy(op.a.data() + static_cast<std::size_t>(t) * m, row, m);
      std::memcpy(op.b.data() + static_cast<std::size_t>(t) * n, row + m, n);
    }
  });
}

}  // namespace moesaic
