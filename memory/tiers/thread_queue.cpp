#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include <unistd.h>

#include "core/base/error.h"
#include "memory/tiers/io_queue.h"

namespace moesaic::tiers {
namespace {

class ThreadQueue final : public IoQueue {
 public:
  explicit ThreadQueue(int depth) : depth_(depth) {
    for (int i = 0; i < depth; ++i)
      threads_.emplace_back([this] { work(); });
  }
  ~ThreadQueue() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    requested_.notify_all();
    for (std::thread& t : threads_)
      t.join();
  }
  ThreadQueue(const ThreadQueue&) = delete;
  ThreadQueue& operator=(const ThreadQueue&) = delete;

  std::string_view name() const noexcept override { return "threads"; }
  int depth() const noexcept override { return depth_; }

  void submit(const IoRequest& request) override {
    {
      const std::lock_guard lock(mutex_);
      MOESAIC_CHECK(in_flight_ < depth_, "more requests than the queue holds");
      ++in_flight_;
      requests_.push_back(request);
    }
    requested_.notify_one();
  }

  std::vector<IoCompletion> wait() override {
    std::unique_lock lock(mutex_);
    MOESAIC_CHECK(in_flight_ > 0, "nothing to wait for");
    completed_.wait(lock, [&] { return !completions_.empty(); });
    in_flight_ -= static_cast<int>(completions_.size());
    return std::exchange(completions_, {});
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      requested_.wait(lock, [&] { return closing_ || !requests_.empty(); });
      if (requests_.empty()) return;
      const IoRequest r = requests_.front();
      requests_.pop_front();
      lock.unlock();
      const auto at = static_cast<off_t>(r.offset);
      const ssize_t n =
          r.is_write ? ::pwrite(r.fd, r.data, r.bytes, at) : ::pread(r.fd, r.data, r.bytes, at);
      const IoCompletion done{r.tag, n < 0 ? -std::int64_t{errno} : std::int64_t{n}};
      lock.lock();
      completions_.push_back(done);
      completed_.notify_one();
    }
  }

  int depth_;
  std::mutex mutex_;
  std::condition_variable requested_, completed_;
  std::deque<IoRequest> requests_;
  std::vector<IoCompletion> completions_;
  int in_flight_ = 0;
  bool closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> make_thread_queue(int depth) {
  return std::make_unique<ThreadQueue>(depth);
}

}  // namespace moesaic::tiers
