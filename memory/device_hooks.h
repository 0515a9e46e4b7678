#pragma once
// What memory/ needs from a device runtime. cuda/ implements it with the toolkit, cuda_absent.cpp without: it throws
// UsageError("built without CUDA").
#include <cstddef>
#include <string>

#include "core/base/tensor.h"
#include "memory/buffer.h"

namespace moesaic::cuda {

bool is_built() noexcept;     ///< whether this program holds CUDA code
int device_count() noexcept;  ///< 0 without CUDA, without a driver or without a device
/// Why `device` cannot run this build (not built with CUDA, no driver or too old a one, no such device, another
/// architecture than the kernels were compiled for), with what to do; empty when it can.
std::string device_problem(Device device);
/// Why a driver that supports CUDA `driver` (1000 x major + 10 x minor; 0: none) cannot run a program built with `runtime`,
/// with what to do; empty when it can: any driver of the same major version or a later one.
std::string driver_problem(int driver, int runtime);
/// "NVIDIA H200".
std::string device_name(Device device);
/// What the runtime tells about a device; clocks are its highest.
struct DeviceFacts {
  int major = 0, minor = 0;  ///< compute capability
  bool ecc = false;
  int clock_mhz = 0, memory_clock_mhz = 0;
  std::string uuid;  ///< "GPU-5f3a1c2e-…": the same whoever sees the device, under whatever number
};
DeviceFacts device_facts(Device device);
/// DeviceFacts::uuid alone.
std::string device_uuid(Device device);
/// The newest CUDA that the driver supports, and the one that this program was built with: 12040 is 12.4, 0 is none.
int driver_version() noexcept;
int runtime_version() noexcept;
/// Makes `device` the calling thread's current one, so that whatever the thread allocates or asks for belongs to it.
void select_device(Device device);
/// Bytes of the device as the driver counts them, whoever uses them.
struct DeviceMemory {
  std::size_t free = 0, total = 0;
};
DeviceMemory device_memory(Device device);
void* allocate(std::size_t bytes, Device device, MemoryKind kind);
void release(void* data, MemoryKind kind) noexcept;
/// Pins memory that the system gave, for copies to any device; false when the driver (or a limit) will not pin so much.
bool pin_pages(void* data, std::size_t bytes);
void unpin_pages(void* data) noexcept;

void* create_stream(Device device, bool high_priority);
void destroy_stream(void* stream) noexcept;
void synchronize_stream(void* stream);
void* create_event(Device device, bool timed = false);
void destroy_event(void* event) noexcept;
void record_event(void* event, void* stream);
void wait_event(void* stream, void* event);
bool event_reached(void* event);
void synchronize_event(void* event);
/// Between two timed events that were reached.
double elapsed_seconds(void* from, void* to);
void copy_async(void* to, const void* from, std::size_t bytes, void* stream);
/// A few kilobytes of the device to pinned memory, by a kernel: the copy engine takes copies to the host one after the other,
/// so that whoever waits for a count would wait for all large copies of other streams before it. False, and nothing done, for other memory, sizes and alignments.
bool copy_small_to_host(void* to, const void* from, std::size_t bytes, void* stream);
void fill_async(void* data, int byte, std::size_t bytes, void* stream);

}  // namespace moesaic::cuda
