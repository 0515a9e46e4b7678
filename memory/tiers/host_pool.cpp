#include "memory/tiers/host_pool.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <sys/resource.h>

#include "core/base/error.h"
#include "memory/tiers/record_layout.h"

namespace moesaic::tiers {
namespace {

std::uint64_t slots_per_chunk(const HostPool::Options& o) {
  return std::max<std::uint64_t>(1, o.chunk_bytes / o.slot_bytes);
}

std::string lock_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return "unlimited";
  return fmt::format("{} KiB", limit.rlim_cur / 1024);
}

}  // namespace

std::uint64_t HostPool::bytes_for(const Options& o) {
  MOESAIC_CHECK(o.slot_bytes > 0 && o.slot_bytes % kBlockAlignment == 0,
                "slots are multiples of the alignment");
  MOESAIC_CHECK(o.slots >= 0 &&
                    static_cast<std::uint64_t>(o.slots) <= (std::uint64_t{1} << 60) / o.slot_bytes,
                fmt::format("{} slots of {} bytes", o.slots, o.slot_bytes));
  const auto slots = static_cast<std::uint64_t>(o.slots);
  const std::uint64_t chunks = (slots + slots_per_chunk(o) - 1) / slots_per_chunk(o);
  return slots * o.slot_bytes + chunks * kBlockAlignment;
}

HostPool::HostPool(Options options) : options_(std::move(options)) {
  const std::uint64_t needed = bytes_for(options_);
  if (needed > options_.budget_bytes) {
    throw ResourceError(fmt::format(
        "{}: {} slots of {} bytes need {} bytes; memory.host_budget is {}. Raise it, or keep less "
        "there",
        options_.tag,
        options_.slots,
        options_.slot_bytes,
        needed,
        options_.budget_bytes));
  }
  std::uint64_t reached = 0;
  for (std::int64_t left = options_.slots; left > 0;) {
    const auto slots =
        std::min<std::int64_t>(left, static_cast<std::int64_t>(slots_per_chunk(options_)));
    const std::uint64_t bytes = static_cast<std::uint64_t>(slots) * options_.slot_bytes;
    try {
      chunks_.push_back(make_host_buffer(bytes + kBlockAlignment, options_.device, options_.tag));
    } catch (const ResourceError& e) {
      throw ResourceError(fmt::format(
          "{}: the system gave {} of {} bytes of {}host memory. Lower memory.host_budget, or raise "
          "the limits (of the container or job; 'ulimit -l' is {}). {}",
          options_.tag,
          reached,
          needed,
          options_.device.kind == Device::Kind::cuda ? "pinned " : "",
          lock_limit(),
          e.what()));
    }
    reached += bytes + kBlockAlignment;
    const auto address = reinterpret_cast<std::uintptr_t>(chunks_.back().data());
    std::byte* base =
        chunks_.back().data() + (kBlockAlignment - address % kBlockAlignment) % kBlockAlignment;
    regions_.emplace_back(base, bytes);
    for (std::int64_t i = 0; i < slots; ++i)
      free_.push_back(base + static_cast<std::uint64_t>(i) * options_.slot_bytes);
    left -= slots;
  }
  std::reverse(free_.begin(), free_.end());  // the first slot is taken first
}

std::byte* HostPool::take() {
  if (free_.empty()) return nullptr;
  std::byte* slot = free_.back();
  free_.pop_back();
  taken_.insert(std::lower_bound(taken_.begin(), taken_.end(), slot), slot);
  return slot;
}

void HostPool::give_back(std::byte* slot) {
  const auto at = std::lower_bound(taken_.begin(), taken_.end(), slot);
  MOESAIC_CHECK(at != taken_.end() && *at == slot, "the slot was not taken");
  taken_.erase(at);
  if (options_.poison) std::memset(slot, 0xff, options_.slot_bytes);
  free_.push_back(slot);
}

}  // namespace moesaic::tiers
