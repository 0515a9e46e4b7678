#include "kernels/ops/op.h"

#include <fmt/format.h>

namespace moesaic {

void throw_no_cuda_kernel(const char* op) {
  throw UsageError(fmt::format("op '{}' has no CUDA kernel yet; use run.device=cpu", op));
}

}  // namespace moesaic
