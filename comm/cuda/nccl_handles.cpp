#include "comm/cuda/nccl_handles.h"

#include <array>
#include <cstdlib>
#include <map>
#include <string>

#include <fmt/format.h>
#include <unistd.h>

#include "comm/machine_identity.h"
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

void refuse_shared(const std::vector<RankSite>& ranks) {
  std::map<std::string, std::size_t> first_user;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const std::string place = ranks[r].host + " " + ranks[r].device;
    const auto [user, is_new] = first_user.emplace(place, r);
    if (is_new) continue;
    throw UsageError(
        fmt::format("ranks {} and {} would use the same GPU ({}); start one rank per GPU, or set "
                    "comm.share_gpu=true to let them take turns (slow, for tests)",
                    user->second,
                    r,
                    place));
  }
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
  std::vector<RankSite> ranks;
  bool one_machine = true;
  for (const std::string& device_of_rank : host.all_gather_host(name + "\n" + bus_id(device))) {
    const auto end = device_of_rank.find('\n');
    ranks.push_back({device_of_rank.substr(0, end), device_of_rank.substr(end + 1)});
    one_machine = one_machine && ranks.back().host == name;
  }
  if (!options.share_gpu) refuse_shared(ranks);
  // Ordered reductions make no use of multicast; it would only take memory.
  set_default("NCCL_NVLS_ENABLE", "0");
  const std::string identity = machine_identities(
      ranks, options.ranks_per_node, options.share_gpu)[static_cast<std::size_t>(host.rank())];
  if (identity.empty()) return;
  set_default("NCCL_HOSTID", identity);
  if (one_machine) {
    set_default("NCCL_SOCKET_IFNAME", "lo");
    set_default("NCCL_IB_DISABLE", "1");
  }
}

}  // namespace moesaic::cuda
