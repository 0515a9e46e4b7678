#pragma once
#include <array>
#include <atomic>
#include <cstdint>

#include "core/base/tensor.h"

namespace moesaic::cpu {

/// Hands the rows of one scratch tensor [slots, n] to the bodies of one parallel_for, a row per running body. With as
/// many slots as the pool has threads a row is always free. What a body leaves in its row must not be read by another.
class ScratchSlots {
 public:
  explicit ScratchSlots(const TensorView& rows) : rows_(rows) {
    MOESAIC_CHECK(rows.rank() == 2 && rows.dim(0) <= kMaxSlots, "more threads than scratch slots");
  }

  template <class T>
  class Lease {
   public:
    explicit Lease(ScratchSlots& slots) : slots_(slots), index_(slots.acquire()) {}
    ~Lease() {
      slots_.busy_[static_cast<std::size_t>(index_)].store(false, std::memory_order_release);
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    T* data() const { return slots_.rows_.as<T>() + index_ * slots_.rows_.dim(1); }

   private:
    ScratchSlots& slots_;
    std::int64_t index_;
  };

 private:
  static constexpr std::int64_t kMaxSlots = 1024;
  std::int64_t acquire() noexcept {
    for (std::int64_t i = 0;; i = i + 1 < rows_.dim(0) ? i + 1 : 0) {
      if (!busy_[static_cast<std::size_t>(i)].exchange(true, std::memory_order_acquire)) return i;
    }
  }
  TensorView rows_;
  std::array<std::atomic<bool>, kMaxSlots> busy_{};
};

}  // namespace moesaic::cpu
