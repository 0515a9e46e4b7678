#pragma once
// What memory/ needs from a device runtime. cuda/ implements it with the toolkit, cuda_absent.cpp without: it throws
// UsageError("built without CUDA").
#include <cstddef>

#include "core/base/tensor.h"
#include "memory/buffer.h"

namespace moesaic::cuda {

int device_count() noexcept;  ///< 0 without CUDA, without a driver or without a device
void* allocate(std::size_t bytes, Device device, MemoryKind kind);
void release(void* data, MemoryKind kind) noexcept;

void* create_stream(Device device);
void destroy_stream(void* stream) noexcept;
void synchronize_stream(void* stream);
void* create_event(Device device);
void destroy_event(void* event) noexcept;
void record_event(void* event, void* stream);
void wait_event(void* stream, void* event);
bool event_reached(void* event);
void synchronize_event(void* event);
void copy_async(void* to, const void* from, std::size_t bytes, void* stream);
void fill_async(void* data, int byte, std::size_t bytes, void* stream);

}  // namespace moesaic::cuda
