#pragma once
// NCCL's and the runtime's handles behind a communicator, and the check of their calls.
#include <memory>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include "comm/cuda/exchange_watch.h"
#include "comm/device_communicator.h"
#include "memory/buffer.h"

namespace moesaic::cuda {

/// Throws InternalError with the call's text, NCCL's name for the result and its last message.
void check_nccl(ncclResult_t result, const char* call);

/// What all groups of a rank share: the stream on which every exchange takes place, in program order, and the memory
/// through which reductions go, piece by piece.
class ExchangeStream {
 public:
  /// `fail`, `activity`: as ExchangeWatch takes them.
  ExchangeStream(Device device,
                 Reduction reduction,
                 Activity* activity,
                 std::function<void(const std::string&)> fail);
  ~ExchangeStream();
  ExchangeStream(const ExchangeStream&) = delete;
  ExchangeStream& operator=(const ExchangeStream&) = delete;

  /// What comes next here starts after all that `stream` has been given.
  void after(Stream& stream);
  /// What `stream` is given next starts after all that was enqueued here.
  void before(Stream& stream);
  cudaStream_t get() const noexcept { return stream_; }
  std::byte* staging() const noexcept { return staging_.data(); }
  Device device() const noexcept { return device_; }
  Reduction reduction() const noexcept { return reduction_; }
  void synchronize();
  ExchangeWatch& watch() noexcept { return watch_; }

 private:
  Device device_;
  Reduction reduction_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t arrived_ = nullptr, done_ = nullptr;
  Buffer staging_;
  ExchangeWatch watch_;
};

/// Bytes of ExchangeStream::staging().
constexpr std::int64_t kStagingBytes = std::int64_t{128} << 20;

/// Refuses a library that is older than the one that this program was built with: what it lacks would be missed in the
/// middle of a run.
void check_version();
/// Refuses ranks that share a device unless it is allowed, and then gives them identities with which NCCL accepts them
/// (comm/machine_identity.h); ranks that pose as nodes get one per node.
/// Before the first call of NCCL; all ranks of `host` call it.
void check_devices(Communicator& host, Device device, const DeviceCommOptions& options);

}  // namespace moesaic::cuda

#define MOESAIC_NCCL(call) ::moesaic::cuda::check_nccl(call, #call)
