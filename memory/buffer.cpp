#include "memory/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "memory/device_hooks.h"
#include "memory/host_pages.h"
#include "memory/owned.h"
#include "memory/stream.h"

namespace moesaic {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kLargeHostBytes = std::size_t{64} << 20;  // from here on pages of their own

struct Ledger {
  std::mutex mutex;
  std::map<std::string, std::size_t> bytes_by_tag;
};
Ledger& ledger() {
  static Ledger l;
  return l;
}

std::size_t round_up(std::size_t n, std::size_t to) {
  return (n + to - 1) / to * to;
}

std::string in_use_text() {
  std::string s;
  for (const auto& u : memory_in_use())
    s += fmt::format("\n  {:<40} {:>12.1f} MiB", u.tag, static_cast<double>(u.bytes) / 1048576.0);
  return s;
}

}  // namespace

void log_teardown_failure(int status) noexcept {
  try {
    spdlog::error("releasing a handle failed with status {}", status);
  } catch (...) {  // logging is the last resort here
  }
}

struct Buffer::Block {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Device device;
  MemoryKind kind = MemoryKind::device;
  std::string tag;
  bool is_pretend = false;

  Block(std::size_t n, Device where, std::string what, MemoryKind k)
      : bytes(n), device(where), kind(k), tag(std::move(what)) {
    if (bytes == 0) return;
    if (has_pages()) {
      data = static_cast<std::byte*>(take_pages());
    } else if (device.kind == Device::Kind::cuda || kind == MemoryKind::pinned_host) {
      data = static_cast<std::byte*>(cuda::allocate(bytes, device, kind));
    } else {
      data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, round_up(bytes, kAlignment)));
      if (data != nullptr) std::memset(data, 0, bytes);
    }
    if (data == nullptr) {
      throw ResourceError(fmt::format("out of memory on {}: '{}' needs {:.1f} MiB; in use:{}",
                                      to_string(device),
                                      tag,
                                      static_cast<double>(bytes) / 1048576.0,
                                      in_use_text()));
    }
    const std::lock_guard lock(ledger().mutex);
    ledger().bytes_by_tag[tag] += bytes;
  }
  struct Pretend {};
  Block(Pretend, std::size_t n, Device where)
      : data(reinterpret_cast<std::byte*>(std::uintptr_t{1} << 42)),
        bytes(n),
        device(where),
        is_pretend(true) {}
  ~Block() {
    if (data == nullptr || is_pretend) return;
    if (has_pages()) {
      if (kind == MemoryKind::pinned_host) cuda::unpin_pages(data);
      unmap_pages(data, bytes);
    } else if (device.kind == Device::Kind::cuda || kind == MemoryKind::pinned_host) {
      cuda::release(data, kind);
    } else {
      std::free(data);
    }
    const std::lock_guard lock(ledger().mutex);
    ledger().bytes_by_tag[tag] -= bytes;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

 private:
  bool has_pages() const { return device.kind == Device::Kind::cpu && bytes >= kLargeHostBytes; }
  void* take_pages() const {
    void* pages = map_pages(bytes);
    if (pages == nullptr || kind != MemoryKind::pinned_host) return pages;
    bool is_pinned = false;
    try {
      is_pinned = cuda::pin_pages(pages, bytes);
    } catch (...) {
      unmap_pages(pages, bytes);
      throw;
    }
    if (is_pinned) return pages;
    unmap_pages(pages, bytes);
    return nullptr;
  }
};

Buffer::Buffer(std::size_t bytes, Device device, const std::string& tag, MemoryKind kind)
    : block_(std::make_shared<Block>(bytes, device, tag, kind)) {}
Buffer Buffer::pretend(std::size_t bytes, Device device) {
  Buffer buffer;
  buffer.block_ = std::make_shared<Block>(Block::Pretend{}, bytes, device);
  return buffer;
}
std::byte* Buffer::data() const noexcept {
  return block_ ? block_->data : nullptr;
}
std::size_t Buffer::bytes() const noexcept {
  return block_ ? block_->bytes : 0;
}
Device Buffer::device() const noexcept {
  return block_ ? block_->device : kCpu;
}

TensorView Buffer::view(Shape shape, DType dtype, std::size_t offset) const {
  MOESAIC_CHECK(offset + byte_size(dtype) * static_cast<std::size_t>(shape.numel()) <= bytes(),
                "view outside its buffer");
  return {data() + offset, dtype, shape, device()};
}

Buffer make_host_buffer(std::size_t bytes, Device device, const std::string& tag) {
  const bool pinned = device.kind == Device::Kind::cuda;
  return {bytes, kCpu, tag, pinned ? MemoryKind::pinned_host : MemoryKind::pageable_host};
}

std::vector<MemoryUse> memory_in_use() {
  std::vector<MemoryUse> uses;
  {
    const std::lock_guard lock(ledger().mutex);
    for (const auto& [tag, bytes] : ledger().bytes_by_tag) {
      if (bytes > 0) uses.push_back({tag, bytes});
    }
  }
  std::stable_sort(
      uses.begin(), uses.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
  return uses;
}

Arena Arena::measuring(Device device, std::string name) {
  return {device, std::move(name), true};
}

Arena::Arena(std::size_t capacity, Device device, const std::string& name)
    : backing_(round_up(capacity, kAlignment), device, name),
      device_(device),
      name_(name),
      capacity_(round_up(capacity, kAlignment)) {}

TensorView Arena::take(Shape shape, DType dtype, const char* tag) {
  const std::size_t bytes =
      round_up(std::max<std::size_t>(1, byte_size(dtype) * static_cast<std::size_t>(shape.numel())),
               kAlignment);
  if (!measuring_ && top_ + bytes > capacity_) {
    throw ResourceError(fmt::format("arena '{}' has {} of {} bytes left, '{}' {} needs {}",
                                    name_,
                                    capacity_ - top_,
                                    capacity_,
                                    tag,
                                    to_string(shape),
                                    bytes));
  }
  // A measuring arena hands out addresses that look real (not null, aligned) and are never read.
  std::byte* base =
      measuring_ ? reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40) : backing_.data();
  const TensorView view(base + top_, dtype, shape, device_);
  top_ += bytes;
  high_water_ = std::max(high_water_, top_);
  return view;
}

void Arena::poison() noexcept {
  if (!measuring_ && device_.kind == Device::Kind::cpu && capacity_ > top_)
    std::memset(backing_.data() + top_, 0xff, capacity_ - top_);
}

void Arena::poison(Stream& stream) {
  if (measuring_ || capacity_ == top_) return;
  const auto free_bytes = static_cast<std::int64_t>(capacity_ - top_);
  fill_bytes(TensorView(backing_.data() + top_, DType::u8, {free_bytes}, device_), 0xff, stream);
}

}  // namespace moesaic
