#pragma once
// Conditions that only the device can see. A failure ends the process's work on the device: the
// message, with file and line, goes to stderr, and the stream's next synchronize() throws.
#include <cstddef>

// What assert() calls on the device; the toolkit declares it only where assertions are on.
extern "C" __device__ void __assertfail(const char* message,
                                        const char* file,
                                        unsigned line,
                                        const char* function,
                                        std::size_t char_size);

#define MOESAIC_DEVICE_CHECK(condition, message) \
  if (!(condition)) __assertfail(message, __FILE__, __LINE__, "device code", 1)
