#include "kernels/cpu/thread_pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/base/error.h"

namespace moesaic {

struct ThreadPool::Impl {
  struct Loop {
    const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
    std::int64_t n = 0, grain = 1;
    std::atomic<std::int64_t> next{0};
    std::mutex mutex;
    std::exception_ptr failure;

    void work() {
      for (;;) {
        const std::int64_t begin = next.fetch_add(grain);
        if (begin >= n) return;
        try {
          (*body)(begin, std::min(n, begin + grain));
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
      }
    }
  };

  void worker() {
    std::uint64_t seen = 0;
    for (;;) {
      Loop* loop = nullptr;
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return closing || generation != seen; });
        if (closing) return;
        seen = generation;
        loop = current;
      }
      loop->work();
      {
        const std::lock_guard lock(mutex);
        if (--running == 0) done.notify_all();
      }
    }
  }

  std::vector<std::thread> threads;
  std::mutex mutex;
  std::mutex one_loop_at_a_time;
  std::condition_variable wake, done;
  Loop* current = nullptr;
  std::uint64_t generation = 0;
  int running = 0;
  bool closing = false;
};

ThreadPool::ThreadPool(int num_threads) : impl_(std::make_unique<Impl>()) {
  MOESAIC_CHECK(num_threads >= 1, "a thread pool needs a thread");
  for (int i = 1; i < num_threads; ++i)
    impl_->threads.emplace_back([this] { impl_->worker(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closing = true;
  }
  impl_->wake.notify_all();
  for (auto& t : impl_->threads)
    t.join();
}

int ThreadPool::num_threads() const noexcept {
  return static_cast<int>(impl_->threads.size()) + 1;
}

void ThreadPool::parallel_for(std::int64_t n,
                              std::int64_t grain,
                              const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (n <= 0) return;
  grain = std::max<std::int64_t>(1, grain);
  if (impl_->threads.empty() || n <= grain) {
    for (std::int64_t begin = 0; begin < n; begin += grain)
      body(begin, std::min(n, begin + grain));
    return;
  }
  const std::lock_guard one(impl_->one_loop_at_a_time);  // two streams may share a pool
  Impl::Loop loop;
  loop.body = &body;
  loop.n = n;
  loop.grain = grain;
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->current = &loop;
    ++impl_->generation;
    impl_->running = static_cast<int>(impl_->threads.size());
  }
  impl_->wake.notify_all();
  loop.work();
  {
    std::unique_lock lock(impl_->mutex);
    impl_->done.wait(lock, [&] { return impl_->running == 0; });
  }
  if (loop.failure) std::rethrow_exception(loop.failure);
}

}  // namespace moesaic
