#include <cstring>
#include <string>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "memory/cuda/check.h"
#include "memory/device_hooks.h"

namespace moesaic::cuda {
namespace {

// What cmake/cuda_option.cmake compiles for.
constexpr int kBuiltForMajor = 9, kBuiltForMinor = 0;

std::string describe(cudaError_t status, const char* call) {
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess) device = -1;
  return fmt::format("{} failed on cuda:{} with {} ({}): {}",
                     call,
                     device,
                     cudaGetErrorName(status),
                     static_cast<int>(status),
                     cudaGetErrorString(status));
}

cudaStream_t as_stream(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t as_event(void* event) {
  return static_cast<cudaEvent_t>(event);
}

}  // namespace

void check_call(int status, const char* call) {
  const auto error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) return;
  cudaGetLastError();  // takes an error that is not sticky off the thread; the next check must not
                       // find it again
  switch (error) {
    case cudaErrorMemoryAllocation:
      throw ResourceError(describe(error, call));
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInvalidDevice:
      throw UsageError(describe(error, call) +
                       "; use run.device=cpu, or a machine with a CUDA device and driver");
    default:
      throw InternalError(describe(error, call));
  }
}

void log_failed_call(int status, const char* call) noexcept {
  const auto error = static_cast<cudaError_t>(status);
  // The runtime may be gone already when objects of static storage die; there is nothing left to
  // release then.
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  try {
    spdlog::error("{}", describe(error, call));
  } catch (...) {  // logging is the last resort here
  }
}

void use_device(Device device) {
  MOESAIC_CHECK(device.kind == Device::Kind::cuda, to_string(device) + " is not a CUDA device");
  MOESAIC_CUDA_CALL(cudaSetDevice(device.ordinal));
}

bool is_built() noexcept {
  return true;
}

int device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::string device_problem(Device device) {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess) driver = 0;
  if (cudaRuntimeGetVersion(&runtime) != cudaSuccess) runtime = 0;
  cudaGetLastError();
  if (std::string problem = driver_problem(driver, runtime); !problem.empty()) return problem;
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    cudaGetLastError();
    return fmt::format(
        "no CUDA device can be used: {} ({}); check 'nvidia-smi' and "
        "CUDA_VISIBLE_DEVICES, or use the CPU",
        cudaGetErrorString(status),
        cudaGetErrorName(status));
  }
  if (device.ordinal >= count) {
    return fmt::format("there is no {}: {} CUDA device(s) are visible; check CUDA_VISIBLE_DEVICES",
                       to_string(device),
                       count);
  }
  int major = 0, minor = 0;
  MOESAIC_CUDA_CALL(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.ordinal));
  MOESAIC_CUDA_CALL(
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.ordinal));
  if (major != kBuiltForMajor || minor != kBuiltForMinor) {
    return fmt::format(
        "{} ({}) has compute capability {}.{}, but the kernels of this moesaic were "
        "built for {}.{} (Hopper); use such a device, or the CPU",
        to_string(device),
        device_name(device),
        major,
        minor,
        kBuiltForMajor,
        kBuiltForMinor);
  }
  return "";
}

std::string device_name(Device device) {
  cudaDeviceProp properties{};
  MOESAIC_CUDA_CALL(cudaGetDeviceProperties(&properties, device.ordinal));
  return properties.name;
}

// "GPU-5f3a1c2e-…", as nvidia-smi writes it.
std::string device_uuid(Device device) {
  cudaDeviceProp properties{};
  MOESAIC_CUDA_CALL(cudaGetDeviceProperties(&properties, device.ordinal));
  std::string text = "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", static_cast<unsigned char>(properties.uuid.bytes[i]));
  }
  return text;
}

DeviceFacts device_facts(Device device) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    MOESAIC_CUDA_CALL(cudaDeviceGetAttribute(&value, which, device.ordinal));
    return value;
  };
  return {.major = attribute(cudaDevAttrComputeCapabilityMajor),
          .minor = attribute(cudaDevAttrComputeCapabilityMinor),
          .ecc = attribute(cudaDevAttrEccEnabled) != 0,
          .clock_mhz = attribute(cudaDevAttrClockRate) / 1000,
          .memory_clock_mhz = attribute(cudaDevAttrMemoryClockRate) / 1000,
          .uuid = device_uuid(device)};
}

int driver_version() noexcept {
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess) return version;
  cudaGetLastError();
  return 0;
}

int runtime_version() noexcept {
  int version = 0;
  if (cudaRuntimeGetVersion(&version) == cudaSuccess) return version;
  cudaGetLastError();
  return 0;
}

void select_device(Device device) {
  use_device(device);
}

DeviceMemory device_memory(Device device) {
  use_device(device);
  DeviceMemory memory;
  MOESAIC_CUDA_CALL(cudaMemGetInfo(&memory.free, &memory.total));
  return memory;
}

// Out of memory is a null pointer: Buffer knows the tag and what else is allocated, and makes the
// message.
void* allocate(std::size_t bytes, Device device, MemoryKind kind) {
  void* data = nullptr;
  if (kind == MemoryKind::pinned_host) {
    const cudaError_t status = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return nullptr;
    }
    MOESAIC_CUDA_CALL(status);
    std::memset(data, 0, bytes);
    return data;
  }
  MOESAIC_CHECK(kind == MemoryKind::device, "pageable memory does not belong to a CUDA device");
  use_device(device);
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  MOESAIC_CUDA_CALL(status);
  return data;
}

void release(void* data, MemoryKind kind) noexcept {
  if (kind == MemoryKind::pinned_host) {
    MOESAIC_CUDA_TEARDOWN(cudaFreeHost(data));
  } else {
    MOESAIC_CUDA_TEARDOWN(cudaFree(data));
  }
}

bool pin_pages(void* data, std::size_t bytes) {
  const cudaError_t status = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
  if (status == cudaErrorMemoryAllocation || status == cudaErrorOperatingSystem) {
    cudaGetLastError();
    return false;
  }
  MOESAIC_CUDA_CALL(status);
  return true;
}

void unpin_pages(void* data) noexcept {
  MOESAIC_CUDA_TEARDOWN(cudaHostUnregister(data));
}

void* create_stream(Device device, bool high_priority) {
  use_device(device);
  int lowest = 0, highest = 0;
  MOESAIC_CUDA_CALL(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream = nullptr;
  MOESAIC_CUDA_CALL(cudaStreamCreateWithPriority(
      &stream, cudaStreamNonBlocking, high_priority ? highest : lowest));
  return stream;
}
void destroy_stream(void* stream) noexcept {
  MOESAIC_CUDA_TEARDOWN(cudaStreamDestroy(as_stream(stream)));
}
void synchronize_stream(void* stream) {
  MOESAIC_CUDA_CALL(cudaStreamSynchronize(as_stream(stream)));
}

void* create_event(Device device, bool timed) {
  use_device(device);
  cudaEvent_t event = nullptr;
  MOESAIC_CUDA_CALL(
      cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming));
  return event;
}
void destroy_event(void* event) noexcept {
  MOESAIC_CUDA_TEARDOWN(cudaEventDestroy(as_event(event)));
}
void record_event(void* event, void* stream) {
  MOESAIC_CUDA_CALL(cudaEventRecord(as_event(event), as_stream(stream)));
}
void wait_event(void* stream, void* event) {
  MOESAIC_CUDA_CALL(cudaStreamWaitEvent(as_stream(stream), as_event(event), cudaEventWaitDefault));
}
bool event_reached(void* event) {
  const cudaError_t status = cudaEventQuery(as_event(event));
  if (status == cudaErrorNotReady) return false;
  MOESAIC_CUDA_CALL(status);
  return true;
}
void synchronize_event(void* event) {
  MOESAIC_CUDA_CALL(cudaEventSynchronize(as_event(event)));
}

double elapsed_seconds(void* from, void* to) {
  float milliseconds = 0;
  MOESAIC_CUDA_CALL(cudaEventElapsedTime(&milliseconds, as_event(from), as_event(to)));
  return static_cast<double>(milliseconds) * 1e-3;
}

void copy_async(void* to, const void* from, std::size_t bytes, void* stream) {
  MOESAIC_CUDA_CALL(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream)));
}
void fill_async(void* data, int byte, std::size_t bytes, void* stream) {
  MOESAIC_CUDA_CALL(cudaMemsetAsync(data, byte, bytes, as_stream(stream)));
}

}  // namespace moesaic::cuda
