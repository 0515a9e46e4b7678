#pragma once
#include <cstdint>

#include "core/model/model.h"
#include "core/train/optimizer.h"

namespace moesaic {

/// Bytes that a step needs beside parameters, gradients and optimizer state.
struct StepMemory {
  std::size_t scratch = 0;    ///< temporaries of ops
  std::size_t transient = 0;  ///< unsaved activations and gradients of activations
  std::size_t slot = 0;       ///< saved activations of one micro-batch
};

struct StepExtents {
  std::int64_t tokens = 0;       ///< of a micro-batch
  std::int64_t step_tokens = 0;  ///< of the global batch
  bool mtp = false;              ///< micro-batches carry targets of the MTP module
};

/// Plans the model for micro-batches of `extents.tokens` tokens and finds what a step takes from the arenas, by running
/// the very host code of forward, backward and update on a dry stream. `optimizer` may be null (evaluation, generation).
StepMemory measure_step(Model& model,
                        ParameterStore& params,
                        Optimizer* optimizer,
                        Device device,
                        int num_threads,
                        const StepExtents& extents,
                        const RecomputePolicy& policy);

}  // namespace moesaic
