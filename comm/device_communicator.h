#pragma once
#include <cstddef>
#include <memory>
#include <string>

#include "comm/communicator.h"

namespace moesaic {

struct DeviceCommOptions {
  Reduction reduction = Reduction::ordered;
  bool share_gpu = false;  ///< several ranks may use one device (they take turns; for tests)
  /// With `share_gpu`: so many consecutive ranks pose as a node, and meet those of others through the network; 0 = none do.
  int ranks_per_node = 0;
  /// Where exchanges between devices are noted for the watchdog, as in CommOptions; may be null.
  Activity* activity = nullptr;
};

/// The ranks of `host` with their tensors on `device`, through NCCL: ranks exchange device memory, on a stream of this
/// communicator that all of its groups share, in the order of the calls. Host values, splits and abort go through `host`,
/// which must outlive the result and is where the communicator meets: all ranks call this. A group of one rank has no
/// NCCL communicator.
///
/// ordered reductions: slices by all-to-all, a local sum in rank order in the accumulation type, all-gather. library: the
/// order that NCCL's algorithm takes (f64, f32, bf16, i64, i32).
///
/// Throws UsageError when this build has no NCCL, or two ranks would use one device and `share_gpu` is not set.
std::unique_ptr<Communicator> make_device_communicator(Communicator& host,
                                                       Device device,
                                                       const DeviceCommOptions& options);

/// Whether this program can make one for several ranks.
bool has_device_communicator() noexcept;
/// "2.28.3", or "none".
std::string device_communicator_version();
/// Device memory that one takes for `ranks` ranks: its staging, and an estimate of the library's buffers.
std::size_t device_communication_bytes(int ranks) noexcept;

}  // namespace moesaic
