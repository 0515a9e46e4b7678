#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "core/config/config.h"
#include "core/data/document_bound.h"
#include "core/model/model.h"
#include "core/train/activation_offload.h"
#include "core/train/optimizer.h"
#include "core/train/phases.h"

namespace moesaic {

/// Bytes that a step needs beside parameters, gradients and optimizer state.
struct StepMemory {
  std::size_t scratch = 0;   ///< temporaries of ops
  std::size_t exchange = 0;  ///< of exchanges beside them
  // Of updates of offloaded experts, where they run beside the next forward, or in the backward:
  std::size_t updates = 0;  ///< temporaries of ops, on each of so many streams
  int update_streams = 0;
  std::size_t transient = 0;  ///< unsaved activations and gradients of activations
  std::size_t slot = 0;  ///< saved activations of one micro-batch; with a schedule, of all slots
  // Of a schedule:
  std::size_t deferred = 0;    ///< what one backward leaves for its second part
  int num_deferred = 0;        ///< how many of them there are at once
  std::size_t bundles = 0;     ///< what is received, and gradients in transit
  std::size_t piece_sums = 0;  ///< RunContext::piece_sums
  // Of activations that leave:
  std::size_t offload = 0;                      ///< where they are while they are used
  std::size_t offload_host = 0;                 ///< their homes in host memory
  std::size_t offload_out = 0, offload_in = 0;  ///< bytes that a step copies there and back
};

/// What a run keeps beside them for its batches, for the phase that needs most.
struct StepBuffers {
  std::size_t batches = 0;  ///< bytes of all micro-batches of a rank's step
  std::size_t margins = 0;  ///< bytes that the exact balancing rule needs
};
StepBuffers step_buffers(const std::vector<Phase>& phases,
                         Model& model,
                         const ParameterStore& params,
                         int ranks);

/// Of the losses of a step, and of its layers.
std::size_t losses_bytes(const Model& model);

struct StepExtents {
  std::int64_t tokens = 0;             ///< of a micro-batch, or a piece of it
  std::int64_t pieces = 1;             ///< as in Bounds
  std::int64_t sequence = 0;           ///< no document is longer; 0 = tokens
  std::int64_t step_tokens = 0;        ///< of the global batch
  std::int64_t most_documents = 0;     ///< of a micro-batch
  bool mtp = false;                    ///< micro-batches carry targets of the MTP module
  ExpertExchange* exchange = nullptr;  ///< as in Bounds
  std::vector<int> slots;              ///< of a schedule, by the chunks here; else empty
  StepPasses passes = StepPasses::of_one_chunk();
  std::int64_t rounds = 1;       ///< how often a step makes the passes
  bool splits_backward = false;  ///< weight gradients wait
  bool overlap = false;          ///< exchanges have a stream of their own
};

/// Plans the model for micro-batches of `extents.tokens` tokens and finds what a step takes from the arenas, by running
/// the very host code of forward, backward and update on a dry stream. `optimizer` may be null (evaluation, generation).
StepMemory measure_step(Model& model,
                        ParameterStore& params,
                        Optimizer* optimizer,
                        Device device,
                        int num_threads,
                        const StepExtents& extents,
                        const RecomputePolicy& policy,
                        KernelPath path = KernelPath::automatic);

/// The most of every kind over all phases of a run, at the position in the mesh that `params` has.
StepMemory measure_run(const config::Config& config,
                       const std::vector<Phase>& phases,
                       std::span<const data::DocumentBound> documents,
                       Model& model,
                       ParameterStore& params,
                       Optimizer* optimizer,
                       Device device,
                       const RecomputePolicy& policy,
                       KernelPath path = KernelPath::automatic,
                       int ranks_per_node = 0);

}  // namespace moesaic
