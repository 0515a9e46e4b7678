#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>

namespace moesaic {

/// A fixed number of threads that share loops. With one thread everything runs in the caller.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  int num_threads() const noexcept;

  /// Calls body(begin, end) for blocks [0, grain), [grain, 2 grain) … of [0, n), on any thread, and returns when all are
  /// done. The blocks do not depend on the number of threads, so neither do sums formed per block.
  void parallel_for(std::int64_t n,
                    std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
