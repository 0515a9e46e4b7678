#include "memory/host_pages.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

namespace moesaic {
namespace {

constexpr std::size_t kBytesPerThread = std::size_t{32} << 20;
constexpr std::size_t kMaxThreads = 16;  // beyond, the kernel's page lists are the limit

void touch(std::byte* begin, std::byte* end, std::size_t page) {
  for (volatile std::byte* at = begin; at < end; at += page)
    *at = std::byte{0};
}

}  // namespace

void* map_pages(std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  ::madvise(data, bytes, MADV_HUGEPAGE);  // where the system has them; else nothing changes
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto* begin = static_cast<std::byte*>(data);
  const std::size_t threads = std::clamp<std::size_t>(
      std::min<std::size_t>(bytes / kBytesPerThread, std::thread::hardware_concurrency()),
      1,
      kMaxThreads);
  const std::size_t each = (bytes / threads + page - 1) / page * page;
  std::vector<std::thread> others;
  std::size_t started = 1;
  try {
    for (; started < threads; ++started) {
      others.emplace_back(touch,
                          begin + std::min(bytes, started * each),
                          begin + std::min(bytes, (started + 1) * each),
                          page);
    }
  } catch (const std::system_error&) {  // no more threads: this one does the rest
    touch(begin + std::min(bytes, started * each), begin + bytes, page);
  }
  touch(begin, begin + std::min(bytes, each), page);
  for (std::thread& t : others)
    t.join();
  return data;
}

void unmap_pages(void* data, std::size_t bytes) noexcept {
  ::munmap(data, bytes);
}

}  // namespace moesaic
