#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/data/document_bound.h"
#include "memory/buffer.h"

namespace moesaic {

/// What one rank of a training run allocates on its device, found by declaring the run on memory that is not there and
/// running the host code of its steps on a dry stream: the code that the run itself sizes its arenas with.
struct MemoryPlan {
  Device device;
  int ranks = 1;                  ///< of the layout that it is planned for
  std::vector<MemoryUse> parts;   ///< in the order of allocation, none empty
  std::size_t runtime = 0;        ///< estimate: CUDA context, kernels, libraries (0 on the CPU)
  std::size_t communication = 0;  ///< exchange buffers, and an estimate of the library's own
  std::vector<MemoryUse>
      host;  ///< host memory, pinned for a GPU, in which tensors wait; none empty
  std::size_t activations_out = 0, activations_in = 0;  ///< bytes that a step copies there and back
  std::size_t total() const;
  /// Indented lines, largest part first, and the sum.
  std::string table() const;
};

/// Plans a configuration that can be trained, for `rank` of `ranks` ranks in its layout. `documents`: of every source of
/// batches. No device is touched.
MemoryPlan plan_memory(const config::Config& config,
                       Device device,
                       const Precision& precision,
                       std::span<const data::DocumentBound> documents,
                       int ranks,
                       int rank = 0);

}  // namespace moesaic
