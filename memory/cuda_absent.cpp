#include "core/base/error.h"
#include "memory/device_hooks.h"

namespace moesaic::cuda {
namespace {
[[noreturn]] void absent() {
  throw UsageError(
      "this moesaic was built without CUDA; use run.device=cpu, or build with -DMOESAIC_CUDA=ON");
}
}  // namespace

bool is_built() noexcept {
  return false;
}
int device_count() noexcept {
  return 0;
}
std::string device_problem(Device) {
  return "this moesaic was built without CUDA; build with -DMOESAIC_CUDA=ON, or use the CPU";
}
std::string device_name(Device) {
  absent();
}
DeviceFacts device_facts(Device) {
  absent();
}
std::string device_uuid(Device) {
  absent();
}
int driver_version() noexcept {
  return 0;
}
int runtime_version() noexcept {
  return 0;
}
void select_device(Device) {
  absent();
}
DeviceMemory device_memory(Device) {
  absent();
}
void* allocate(std::size_t, Device, MemoryKind) {
  absent();
}
void release(void*, MemoryKind) noexcept {}
bool pin_pages(void*, std::size_t) {
  absent();
}
void unpin_pages(void*) noexcept {}
void* create_stream(Device, bool) {
  absent();
}
void destroy_stream(void*) noexcept {}
void synchronize_stream(void*) {
  absent();
}
void* create_event(Device, bool) {
  absent();
}
void destroy_event(void*) noexcept {}
void record_event(void*, void*) {
  absent();
}
void wait_event(void*, void*) {
  absent();
}
bool event_reached(void*) {
  absent();
}
void synchronize_event(void*) {
  absent();
}
double elapsed_seconds(void*, void*) {
  absent();
}
void copy_async(void*, const void*, std::size_t, void*) {
  absent();
}
bool copy_small_to_host(void*, const void*, std::size_t, void*) {
  absent();
}
void fill_async(void*, int, std::size_t, void*) {
  absent();
}

}  // namespace moesaic::cuda
