// make_device_communicator() in a build without NCCL.
#include "comm/device_communicator.h"
#include "core/base/error.h"

namespace moesaic {

std::unique_ptr<Communicator> make_device_communicator(Communicator&,
                                                       Device,
                                                       const DeviceCommOptions&) {
  throw UsageError(
      "this moesaic was built without NCCL, which several ranks on GPUs need; install NCCL "
      "(libnccl-dev) and build with -DMOESAIC_NCCL=ON, start one rank, or use run.device=cpu");
}

bool has_device_communicator() noexcept {
  return false;
}

std::string device_communicator_version() {
  return "none";
}

std::size_t device_communication_bytes(int) noexcept {
  return 0;
}

}  // namespace moesaic
