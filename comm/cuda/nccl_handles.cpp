#include "comm/cuda/nccl_handles.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <string>

#include <fmt/format.h>
#include <unistd.h>

#include "memory/cuda/check.h"

namespace moesaic::cuda {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown host";
  return name.data();
}

std::string bus_id(Device device) {
  std::array<char, 64> id{};
  MOESAIC_CUDA_CALL(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), device.ordinal));
  return id.data();
}

// What the user has set stands.
void set_default(const char* variable, const std::string& value) {
  setenv(variable, value.c_str(), 0);
}

}  // namespace

void check_nccl(ncclResult_t result, const char* call) {
  if (result == ncclSuccess) return;
  throw InternalError(fmt::format("{} failed with code {}: {}; {}",
                                  call,
                                  static_cast<int>(result),
                                  ncclGetErrorString(result),
                                  ncclGetLastError(nullptr)));
}

ExchangeStream::ExchangeStream(Device device,
                               Reduction reduction,
                               Activity* activity,
                               std::function<void(const std::string&)> fail)
    : device_(device),
      reduction_(reduction),
      staging_(kStagingBytes, device, "communication"),
      watch_(device, activity, std::move(fail)) {
  use_device(device);
  // The exchange gets its multiprocessors before the kernels that it runs beside.
  int least = 0, greatest = 0;
  MOESAIC_CUDA_CALL(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  MOESAIC_CUDA_CALL(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
  MOESAIC_CUDA_CALL(cudaEventCreateWithFlags(&arrived_, cudaEventDisableTiming));
  MOESAIC_CUDA_CALL(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
}

ExchangeStream::~ExchangeStream() {
  MOESAIC_CUDA_TEARDOWN(cudaEventDestroy(done_));
  MOESAIC_CUDA_TEARDOWN(cudaEventDestroy(arrived_));
  MOESAIC_CUDA_TEARDOWN(cudaStreamDestroy(stream_));
}

void ExchangeStream::after(Stream& stream) {
  use_device(device_);
  MOESAIC_CUDA_CALL(cudaEventRecord(arrived_, static_cast<cudaStream_t>(stream.native())));
  MOESAIC_CUDA_CALL(cudaStreamWaitEvent(stream_, arrived_, cudaEventWaitDefault));
}

void ExchangeStream::before(Stream& stream) {
  MOESAIC_CUDA_CALL(cudaEventRecord(done_, stream_));
  MOESAIC_CUDA_CALL(
      cudaStreamWaitEvent(static_cast<cudaStream_t>(stream.native()), done_, cudaEventWaitDefault));
}

void ExchangeStream::synchronize() {
  MOESAIC_CUDA_CALL(cudaStreamSynchronize(stream_));
}

void check_version() {
  const auto text = [](int code) {
    return fmt::format("{}.{}.{}", code / 10000, code % 10000 / 100, code % 100);
  };
  int found = 0;
  MOESAIC_NCCL(ncclGetVersion(&found));
  if (found / 100 >= NCCL_VERSION_CODE / 100) return;  // patches do not count
  throw UsageError(fmt::format(
      "the NCCL library that was found is version {}, but this program was built with {}; install "
      "that version or a newer one, or let LD_LIBRARY_PATH name the folder where it is",
      text(found),
      text(NCCL_VERSION_CODE)));
}

void check_devices(Communicator& host, Device device, const DeviceCommOptions& options) {
  if (const char* blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
      blocking != nullptr && std::string(blocking) == "1") {
    throw UsageError(
        "CUDA_LAUNCH_BLOCKING=1 makes exchanges between GPUs wait for ever; unset it for runs of "
        "several ranks");
  }
  const std::string name = host_name();
  const auto all = host.all_gather_host(name + " " + bus_id(device));
  std::map<std::string, int> users;  // of each device, by the ranks before this one
  int before_me = 0;
  bool is_shared = false, one_machine = true;
  for (int r = 0; r < host.size(); ++r) {
    const std::string& place = all[static_cast<std::size_t>(r)];
    const int before = users[place]++;
    if (r == host.rank()) before_me = before;
    is_shared = is_shared || before > 0;
    one_machine = one_machine && place.starts_with(name + " ");
    if (before > 0 && !options.share_gpu) {
      throw UsageError(
          fmt::format("ranks {} and {} would use the same GPU ({}); start one rank per GPU, or set "
                      "comm.share_gpu=true to let them take turns (slow, for tests)",
                      std::find(all.begin(), all.end(), place) - all.begin(),
                      r,
                      place));
    }
  }
  // Ordered reductions make no use of multicast; it would only take memory.
  set_default("NCCL_NVLS_ENABLE", "0");
  if (!is_shared) return;
  // NCCL refuses two ranks of one machine on one device. Ranks that share one say that they are on different machines,
  // and meet through the network.
  set_default("NCCL_HOSTID", fmt::format("{}/{}", name, before_me));
  if (one_machine) {
    set_default("NCCL_SOCKET_IFNAME", "lo");
    set_default("NCCL_IB_DISABLE", "1");
  }
}

}  // namespace moesaic::cuda
