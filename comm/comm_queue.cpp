#include "comm/comm_queue.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace moesaic {
namespace {

// One operation's meeting of stream and communication thread.
class Ticket {
 public:
  void set_ready(bool cancelled) {
    {
      const std::lock_guard lock(mutex_);
      if (ready_) return;
      ready_ = true;
      cancelled_ = cancelled;
    }
    changed_.notify_all();
  }
  // True when the work is to be done.
  bool wait_ready() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return ready_; });
    return !cancelled_;
  }
  void set_done(std::exception_ptr failure) {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
      failure_ = std::move(failure);
    }
    changed_.notify_all();
  }
  void wait_done() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ready_ = false;
  bool cancelled_ = false;
  bool done_ = false;
  std::exception_ptr failure_;
};

// Owned by the stream's task: a task that is dropped unrun releases the communication thread.
struct CancelOnDrop {
  explicit CancelOnDrop(std::shared_ptr<Ticket> t) : ticket(std::move(t)) {}
  ~CancelOnDrop() { ticket->set_ready(true); }
  CancelOnDrop(const CancelOnDrop&) = delete;
  CancelOnDrop& operator=(const CancelOnDrop&) = delete;
  std::shared_ptr<Ticket> ticket;
};

// What the thread is at, for the watchdog.
class Note {
 public:
  Note(Activity* activity, const Exchange& what) : activity_(activity), what_(what) {}
  void enter(Exchange::State state) {
    if (activity_ == nullptr) return;
    what_.state = state;
    what_.since_ns = std::chrono::steady_clock::now().time_since_epoch().count();
    activity_->exchange.write(what_);
  }

 private:
  Activity* activity_;
  Exchange what_;
};

void perform(Ticket& ticket, const std::function<void()>& work, Note note) {
  std::exception_ptr failure;
  note.enter(Exchange::State::queued);
  if (ticket.wait_ready()) {
    note.enter(Exchange::State::moving);
    try {
      work();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  note.enter(Exchange::State::done);
  count_progress();
  ticket.set_done(failure);
}

}  // namespace

struct CommQueue::Impl {
  // By the main thread: where in the run it issues an operation.
  Exchange numbered(Exchange what) {
    what.number = ++issued;
    if (activity == nullptr) return what;
    what.step = activity->period.latest().step;
    what.place = activity->issued.latest();
    return what;
  }
  void add(std::function<void()> item) {
    {
      const std::lock_guard lock(mutex);
      items.push_back(std::move(item));
    }
    changed.notify_all();
  }
  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closing || !items.empty(); });
      if (items.empty()) return;
      const auto item = std::move(items.front());
      items.pop_front();
      busy = true;
      lock.unlock();
      item();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> items;
  bool busy = false;
  bool closing = false;
  Activity* activity = nullptr;
  std::uint64_t issued = 0;
  std::thread thread;
};

CommQueue::CommQueue(Activity* activity) : impl_(std::make_unique<Impl>()) {
  impl_->activity = activity;
  impl_->thread = std::thread([impl = impl_.get()] { impl->work(); });
}

CommQueue::~CommQueue() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->closing = true;
  }
  impl_->changed.notify_all();
  impl_->thread.join();
}

Activity* CommQueue::activity() const noexcept {
  return impl_->activity;
}

void CommQueue::run_in_stream(Stream& stream, std::function<void()> work, const Exchange& what) {
  if (stream.mode() == Stream::Mode::dry) return;
  auto ticket = std::make_shared<Ticket>();
  auto guard = std::make_shared<CancelOnDrop>(ticket);
  // Queued before the stream's task: an immediate stream runs the task, and waits, inside
  // enqueue().
  impl_->add([ticket, work = std::move(work), note = Note(impl_->activity, impl_->numbered(what))] {
    perform(*ticket, work, note);
  });
  stream.enqueue([guard = std::move(guard)] {
    guard->ticket->set_ready(false);
    guard->ticket->wait_done();
  });
}

void CommQueue::run(std::function<void()> work, const Exchange& what) {
  const auto ticket = std::make_shared<Ticket>();
  ticket->set_ready(false);
  impl_->add([ticket, work = std::move(work), note = Note(impl_->activity, impl_->numbered(what))] {
    perform(*ticket, work, note);
  });
  ticket->wait_done();
}

bool CommQueue::try_run(std::function<void()> work, std::chrono::milliseconds patience) {
  {
    std::unique_lock lock(impl_->mutex);
    const auto idle = [&] { return !impl_->busy && impl_->items.empty(); };
    if (!impl_->changed.wait_for(lock, patience, idle)) return false;
  }
  run(std::move(work));
  return true;
}

}  // namespace moesaic
