#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/data/document_bound.h"
#include "core/train/tier_plan.h"
#include "memory/buffer.h"

namespace moesaic {

/// What one rank of a training run allocates on its device, and for offloaded experts in host memory and in the file, found
/// by declaring the run on memory that is not there and running the host code of its steps on a dry stream: the code that
/// the run itself sizes its arenas with.
struct MemoryPlan {
  Device device;
  int ranks = 1;                  ///< of the layout that it is planned for
  std::vector<MemoryUse> parts;   ///< in the order of allocation, none empty
  std::size_t runtime = 0;        ///< estimate: CUDA context, kernels, libraries (0 on the CPU)
  std::size_t communication = 0;  ///< exchange buffers, and an estimate of the library's own
  /// With experts.offload: what ParameterStore::offload_experts() takes, and what that comes to.
  std::optional<ExpertTierOptions> tiers;
  std::vector<TierPart> tier_parts;
  /// Of the ranks that share out the state of offloaded experts with this one, the one that got most of it.
  std::optional<int> rank_of_states;
  std::optional<std::uint64_t> device_limit;  ///< that decided the size of the caches
  /// Host memory, pinned for a GPU, in which experts live and activations wait, and bytes of the file; by the tags of `parts`.
  std::vector<MemoryUse> host, file;
  std::size_t activations_out = 0, activations_in = 0;  ///< bytes that a step copies there and back
  std::size_t total() const;                            ///< on the device
  /// Indented lines, largest part first, and the sum; where something is offloaded, a column each for device, host memory and
  /// file.
  std::string table() const;
};

/// What the device and the machine have, where that is known.
struct MemoryLimits {
  std::optional<std::uint64_t> device;  ///< for all that the table counts; `device_key` sets it
  std::string device_key = "memory.device_budget";
  std::optional<std::uint64_t>
      device_free;  ///< as the driver counts it, with this process's context in place
  std::optional<std::uint64_t>
      host;  ///< for what this rank offloads, where memory.host_budget is not set
  bool least_caches =
      false;  ///< experts get the slots that they must have and no more, whatever the limits
};

/// The least of what all parts together may take on the device, and which key says so; empty: the device itself does.
struct DeviceLimit {
  std::uint64_t bytes = 0;
  std::string key;
};
/// Nothing where nothing is known. `runtime`: as MemoryPlan has it.
std::optional<DeviceLimit> device_limit(const config::Config& config,
                                        const MemoryLimits& limits,
                                        std::size_t runtime);
/// An estimate of the driver's context, the kernels of this program and the libraries' own memory; 0 on the CPU.
std::size_t runtime_bytes(Device device);

/// Plans a configuration that can be trained, for `rank` of `ranks` ranks in its layout. `documents`: of every source of
/// batches. No device is touched.
///
/// Offloaded experts get the caches that experts.device_cache says, or what memory.device_budget and `limits` leave beside
/// the rest of the run, or room for all of them where there is no limit. Throws MemoryShortage when that is too little for
/// them, or host memory too small for them and for offloaded activations; whether the rest fits is for the caller to say.
MemoryPlan plan_memory(const config::Config& config,
                       Device device,
                       const Precision& precision,
                       std::span<const data::DocumentBound> documents,
                       int ranks,
                       int rank = 0,
                       const MemoryLimits& limits = {});

}  // namespace moesaic
