#pragma once
// A queue that misbehaves as disks and kernels do: errors, short transfers, completions late and in another order.
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "core/base/random.h"
#include "memory/tiers/io_queue.h"

namespace moesaic::test {

struct Faults {
  std::uint64_t seed = 1;
  double cut =
      0;  ///< share of requests of which only a part is carried out, in blocks of 4096 bytes
  double short_count = 0;  ///< share of requests that report fewer bytes than were moved
  double late = 0;         ///< share of completions that are held back
  double delay = 0;        ///< share of waits that sleep for up to a millisecond
  /// An errno for a request, which is then not carried out, or 0.
  std::function<int(const tiers::IoRequest&, double chance)> error;
};

class FaultyQueue final : public tiers::IoQueue {
 public:
  FaultyQueue(std::unique_ptr<tiers::IoQueue> inner, Faults faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {}
  std::string_view name() const noexcept override { return inner_->name(); }
  int depth() const noexcept override { return inner_->depth(); }

  void submit(const tiers::IoRequest& request) override {
    if (faults_.error) {
      if (const int error = faults_.error(request, draw()); error != 0) {
        ready_.push_back({request.tag, -error});
        return;
      }
    }
    tiers::IoRequest some = request;
    const std::uint32_t blocks = request.bytes / 4096;
    if (blocks > 1 && draw() < faults_.cut)
      some.bytes = 4096 * (1 + static_cast<std::uint32_t>(draw() * (blocks - 1)));
    inner_->submit(some);
    ++inside_;
  }

  std::vector<tiers::IoCompletion> wait() override {
    if (draw() < faults_.delay)
      std::this_thread::sleep_for(std::chrono::microseconds(static_cast<int>(draw() * 1000)));
    std::vector<tiers::IoCompletion> out;
    for (;;) {
      if (inside_ > 0 && ready_.empty()) {
        for (tiers::IoCompletion c : inner_->wait()) {
          --inside_;
          if (c.result > 1 && draw() < faults_.short_count)
            c.result = 1 + static_cast<std::int64_t>(draw() * static_cast<double>(c.result - 1));
          ready_.push_back(c);
        }
      }
      // From the back: the last are the first.
      std::vector<tiers::IoCompletion> held;
      while (!ready_.empty()) {
        (draw() < faults_.late ? held : out).push_back(ready_.back());
        ready_.pop_back();
      }
      ready_ = std::move(held);
      if (!out.empty()) return out;
    }
  }

 private:
  double draw() { return uniform(faults_.seed, count_++); }
  std::unique_ptr<tiers::IoQueue> inner_;
  Faults faults_;
  std::uint64_t count_ = 0;
  int inside_ = 0;
  std::vector<tiers::IoCompletion> ready_;
};

}  // namespace moesaic::test
