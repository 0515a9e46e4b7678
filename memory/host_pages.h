#pragma once
// Large pieces of host memory, straight from the system.
#include <cstddef>

namespace moesaic {

/// Zeroed pages that are there: mapped, and touched by all cores, which is many times faster than one thread's first touch
/// (or than cudaHostAlloc(), which touches with one). Aligned to a page. Null when the system has no such range.
void* map_pages(std::size_t bytes);
void unmap_pages(void* data, std::size_t bytes) noexcept;

}  // namespace moesaic
