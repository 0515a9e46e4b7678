#include "memory/host_pages.h"

#include <algorithm>
#include <cstring>

#include "core/base/error.h"
#include "memory/buffer.h"
#include "tests/support/catch.h"

using namespace moesaic;

namespace {

bool is_zero(const std::byte* data, std::size_t bytes) {
  return std::all_of(data, data + bytes, [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

TEST_CASE("Pages of the system are there, zeroed and writable to the last byte") {
  for (const std::size_t bytes :
       {std::size_t{1}, std::size_t{4097}, (std::size_t{100} << 20) + 123}) {
    auto* data = static_cast<std::byte*>(map_pages(bytes));
    REQUIRE(data != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(data) % 4096 == 0);
    CHECK(is_zero(data, bytes));
    std::memset(data, 0xab, bytes);
    CHECK(data[bytes - 1] == std::byte{0xab});
    unmap_pages(data, bytes);
  }
}

TEST_CASE("Large host buffers are zeroed each time, charged, and refused with their tag") {
  const std::size_t bytes = (std::size_t{80} << 20) + 64;
  for (int round = 0; round < 2; ++round) {
    const Buffer buffer = make_host_buffer(bytes, kCpu, "large host buffer");
    CHECK(is_zero(buffer.data(), bytes));
    std::memset(buffer.data(), 0xff, bytes);
    const auto uses = memory_in_use();
    CHECK(std::any_of(uses.begin(), uses.end(), [&](const MemoryUse& use) {
      return use.tag == "large host buffer" && use.bytes == bytes;
    }));
  }
  std::string text;
  try {
    make_host_buffer(std::size_t{1} << 60, kCpu, "far too large");
  } catch (const ResourceError& e) {
    text = e.what();
  }
  CHECK(text.find("'far too large' needs") != std::string::npos);
}
