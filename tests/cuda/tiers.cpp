// Experts that pass through device memory from pinned host memory and a file, and back.
#include <cstring>

#include "memory/tiers/device_cache.h"
#include "tests/support/device_tensors.h"
#include "tests/support/temporary_folder.h"

namespace moesaic::test {
namespace {

using namespace tiers;

// Small enough to be quick, large enough that copies are under way while the host goes on.
const RecordLayout& layout() {
  static const RecordLayout l({{"W", 1 << 20}, {"M", 3 << 20}});
  return l;
}

void fill(std::byte* at, std::uint64_t bytes, Block block, std::uint64_t version) {
  for (std::uint64_t i = 0; i < bytes; i += 8) {
    const std::uint64_t v = mix64(static_cast<std::uint64_t>(block) * 7919 + version * 104729 + i);
    std::memcpy(at + i, &v, 8);
  }
}
bool holds(const std::byte* at, std::uint64_t bytes, Block block, std::uint64_t version) {
  std::vector<std::byte> wanted(bytes);
  fill(wanted.data(), bytes, block, version);
  return std::memcmp(at, wanted.data(), bytes) == 0;
}

TensorView bytes_at(std::byte* at, std::uint64_t bytes, Device device) {
  return {at, DType::u8, {static_cast<std::int64_t>(bytes)}, device};
}

TEST_CASE(
    "tiers on a GPU: what is written in a slot is read after it was evicted, from host and file") {
  MOESAIC_NEEDS_CUDA();
  constexpr Block kBlocks = 8;
  const TemporaryFolder folder("cuda_tiers");
  HomeTiers::Options o;
  for (Block b = 0; b < kBlocks; ++b)
    o.in_file.push_back(b % 2 == 1 ? 1 : 0);
  o.staging_slots = 2;
  o.device = kCuda;
  o.file.file.folder = folder.path();
  HomeTiers homes(layout(), o);
  for (Block b = 0; b < kBlocks; ++b) {
    const auto lease = homes.lease(b, layout().all(), HomeTiers::Contents::replaced);
    for (int s = 0; s < 2; ++s)
      fill(lease.image + layout().section(s).offset, layout().section(s).bytes, b, 0);
    homes.release(b, layout().all(), layout().all());
  }
  Stream compute(kCuda, "compute");
  DeviceCache cache(homes,
                    {.range = {0, 2}, .slots = 3, .transit = 1, .device = kCuda, .poison = true},
                    make_lru_policy());
  // Results and new values wait in pinned memory of their own, so that nothing but the cache decides on the order.
  const std::uint64_t record = layout().bytes(layout().all());
  constexpr int kRounds = 3;
  const Buffer seen = make_host_buffer(kRounds * kBlocks * record, kCuda, "test");
  const Buffer next = make_host_buffer(kRounds * kBlocks * record, kCuda, "test");
  for (int round = 0; round < kRounds; ++round) {
    for (Block b = 0; b < kBlocks; ++b) {
      std::uint64_t at =
          (static_cast<std::uint64_t>(round) * kBlocks + static_cast<std::uint64_t>(b)) * record;
      const std::int64_t slot = cache.acquire(b, Access::write, compute);
      for (int s = 0; s < 2; ++s) {
        const std::uint64_t bytes = layout().section(s).bytes;
        fill(next.data() + at, bytes, b, static_cast<std::uint64_t>(round) + 1);
        const TensorView here = bytes_at(cache.data(slot, s), bytes, kCuda);
        copy_tensor(bytes_at(seen.data() + at, bytes, kCpu), here, compute);
        copy_tensor(here, bytes_at(next.data() + at, bytes, kCpu), compute);
        at += bytes;
      }
      cache.release(b, Access::write, compute, layout().all());
      if (b % 3 == 0) cache.write_back(b);
    }
  }
  cache.flush();
  compute.synchronize();
  for (int round = 0; round < kRounds; ++round) {
    for (Block b = 0; b < kBlocks; ++b) {
      std::uint64_t at =
          (static_cast<std::uint64_t>(round) * kBlocks + static_cast<std::uint64_t>(b)) * record;
      for (int s = 0; s < 2; ++s) {
        INFO("round " << round << " block " << b << " section " << s);
        CHECK(holds(
            seen.data() + at, layout().section(s).bytes, b, static_cast<std::uint64_t>(round)));
        at += layout().section(s).bytes;
      }
    }
  }
  for (Block b = 0; b < kBlocks; ++b) {
    const auto lease = homes.lease(b, layout().all(), HomeTiers::Contents::needed);
    for (int s = 0; s < 2; ++s)
      CHECK(holds(lease.image + layout().section(s).offset, layout().section(s).bytes, b, kRounds));
    homes.release(b, layout().all(), std::nullopt);
  }
}

TEST_CASE("tiers on a GPU: large pinned memory takes part in copies both ways, again and again") {
  MOESAIC_NEEDS_CUDA();
  const std::uint64_t bytes =
      (std::uint64_t{256} << 20) + 4096;  // mapped and registered, not allocated by the driver
  Stream stream(kCuda, "copies");
  const Buffer device(bytes, kCuda, "test");
  for (std::uint64_t round = 0; round < 3; ++round) {
    const Buffer from = make_host_buffer(bytes, kCuda, "test"),
                 to = make_host_buffer(bytes, kCuda, "test");
    fill(from.data(), bytes, 1, round);
    copy_tensor(bytes_at(device.data(), bytes, kCuda), bytes_at(from.data(), bytes, kCpu), stream);
    copy_tensor(bytes_at(to.data(), bytes, kCpu), bytes_at(device.data(), bytes, kCuda), stream);
    stream.synchronize();
    CHECK(holds(to.data(), bytes, 1, round));
  }
}

}  // namespace
}  // namespace moesaic::test
