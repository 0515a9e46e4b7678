#include "memory/stream.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "core/base/activity.h"
#include "memory/device_hooks.h"

namespace moesaic {
namespace {

std::atomic<std::uint64_t> waits{0};

}  // namespace

std::uint64_t host_waits() noexcept {
  return waits;
}

// On the CPU an event is a pair of counters: how often it was recorded and how many of these records were reached.
struct Event::Impl {
  explicit Impl(Device d) : device(d) {
    if (device.kind == Device::Kind::cuda) native = cuda::create_event(device);
  }
  ~Impl() {
    if (native != nullptr) cuda::destroy_event(native);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  std::uint64_t next_record() {
    const std::lock_guard lock(mutex);
    return ++recorded;
  }
  std::uint64_t last_record() {
    const std::lock_guard lock(mutex);
    return recorded;
  }
  void reach(std::uint64_t record) {
    {
      const std::lock_guard lock(mutex);
      if (record > done) done = record;
    }
    changed.notify_all();
  }
  void wait_for(std::uint64_t record) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= record; });
  }

  Device device;
  void* native = nullptr;
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0;
  std::uint64_t done = 0;
};

struct Timestamp::Impl {
  explicit Impl(Device d) : reached(d) {
    if (d.kind == Device::Kind::cuda) native = cuda::create_event(d, true);
  }
  ~Impl() {
    if (native != nullptr) cuda::destroy_event(native);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Event reached;  // on the CPU: when `time` may be read
  void* native = nullptr;
  std::chrono::steady_clock::time_point time;
};

Timestamp::Timestamp(Device device) : impl_(std::make_shared<Impl>(device)) {}

double seconds_between(const Timestamp& from, const Timestamp& to) {
  if (to.impl_->native != nullptr) {
    if (!cuda::event_reached(from.impl_->native) || !cuda::event_reached(to.impl_->native)) {
      ++waits;
      cuda::synchronize_event(from.impl_->native);
      cuda::synchronize_event(to.impl_->native);
    }
    return cuda::elapsed_seconds(from.impl_->native, to.impl_->native);
  }
  for (const Timestamp* t : {&from, &to})
    if (!t->impl_->reached.reached()) t->impl_->reached.wait_on_host();
  return std::chrono::duration<double>(to.impl_->time - from.impl_->time).count();
}

Event::Event(Device device) : impl_(std::make_shared<Impl>(device)) {}

bool Event::reached() const {
  if (impl_->native != nullptr) return cuda::event_reached(impl_->native);
  const std::lock_guard lock(impl_->mutex);
  return impl_->done >= impl_->recorded;
}

void Event::wait_on_host() const {
  ++waits;
  if (impl_->native != nullptr) return cuda::synchronize_event(impl_->native);
  impl_->wait_for(impl_->last_record());
}

struct Stream::Impl {
  Impl(Device d, std::string n, Mode m, Priority priority)
      : device(d), name(std::move(n)), mode(m) {
    if (mode == Mode::dry) return;
    if (device.kind == Device::Kind::cuda) {
      native = cuda::create_stream(device, priority == Priority::high);
    } else if (mode == Mode::worker) {
      worker = std::thread([this] { work(); });
    }
  }
  ~Impl() {
    if (worker.joinable()) {
      {
        const std::lock_guard lock(mutex);
        closing = true;
      }
      changed.notify_all();
      worker.join();
    }
    if (native != nullptr) cuda::destroy_stream(native);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closing || !tasks.empty(); });
      if (tasks.empty()) return;
      const auto task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      lock.unlock();
      run(task);
      lock.lock();
      busy = false;
      if (tasks.empty()) idle.notify_all();
    }
  }
  // After a failure only the bookkeeping tasks of events still run, so that nobody waits for ever.
  struct Task {
    std::function<void()> f;
    bool always = false;
  };
  void run(const Task& task) {
    if (failure && !task.always) return;
    try {
      task.f();
    } catch (...) {
      failure = std::current_exception();
    }
    count_progress();
  }
  void add(std::function<void()> f, bool always) {
    if (mode == Mode::dry) return;
    if (mode == Mode::immediate) {
      f();
      count_progress();
      return;
    }
    {
      const std::lock_guard lock(mutex);
      tasks.push_back({std::move(f), always});
    }
    changed.notify_one();
  }

  Device device;
  std::string name;
  Mode mode;
  void* native = nullptr;
  std::thread worker;
  std::mutex mutex;
  std::condition_variable changed, idle;
  std::deque<Task> tasks;
  bool busy = false;
  bool closing = false;
  std::exception_ptr failure;
};

Stream::Stream(Device device, std::string name, Mode mode, Priority priority)
    : impl_(std::make_shared<Impl>(device, std::move(name), mode, priority)) {}

void Stream::enqueue(std::function<void()> task) {
  MOESAIC_CHECK(impl_->device.kind == Device::Kind::cpu, "host tasks belong on CPU streams");
  impl_->add(std::move(task), false);
}

void Stream::record(Event& event) {
  if (impl_->mode == Mode::dry) return;
  if (impl_->native != nullptr) return cuda::record_event(event.impl_->native, impl_->native);
  const auto record = event.impl_->next_record();
  impl_->add([e = event.impl_, record] { e->reach(record); }, true);
}

void Stream::record(Timestamp& timestamp) {
  if (impl_->mode == Mode::dry) return;
  if (impl_->native != nullptr) return cuda::record_event(timestamp.impl_->native, impl_->native);
  impl_->add([t = timestamp.impl_] { t->time = std::chrono::steady_clock::now(); }, true);
  record(timestamp.impl_->reached);
}

void Stream::wait(const Event& event) {
  if (impl_->mode == Mode::dry) return;
  if (impl_->native != nullptr) return cuda::wait_event(impl_->native, event.impl_->native);
  const auto record = event.impl_->last_record();
  if (record == 0) return;
  impl_->add([e = event.impl_, record] { e->wait_for(record); }, true);
}

void Stream::synchronize() {
  if (impl_->mode != Mode::dry) ++waits;
  if (impl_->native != nullptr) return cuda::synchronize_stream(impl_->native);
  std::exception_ptr failure;
  {
    std::unique_lock lock(impl_->mutex);
    impl_->idle.wait(lock, [&] { return impl_->tasks.empty() && !impl_->busy; });
    failure = std::exchange(impl_->failure, nullptr);
  }
  if (failure) std::rethrow_exception(failure);
}

Device Stream::device() const noexcept {
  return impl_->device;
}
Stream::Mode Stream::mode() const noexcept {
  return impl_->mode;
}
void* Stream::native() const noexcept {
  return impl_->native;
}

void copy_tensor(TensorView to, ConstTensorView from, Stream& stream) {
  check_shape(from, to.shape(), "copy source");
  check_dtype(from, to.dtype(), "copy source");
  if (stream.mode() == Stream::Mode::dry || to.bytes() == 0) return;
  if (void* const native = stream.native(); native != nullptr) {
    const bool is_down = from.device().kind == Device::Kind::cuda && to.device() == kCpu;
    if (is_down && cuda::copy_small_to_host(to.data(), from.data(), to.bytes(), native)) return;
    return cuda::copy_async(to.data(), from.data(), to.bytes(), native);
  }
  stream.enqueue([to, from] { std::memmove(to.data(), from.data(), to.bytes()); });
}

void fill_bytes(TensorView view, std::uint8_t byte, Stream& stream) {
  if (stream.mode() == Stream::Mode::dry || view.bytes() == 0) return;
  if (stream.native() != nullptr)
    return cuda::fill_async(view.data(), byte, view.bytes(), stream.native());
  stream.enqueue([view, byte] { std::memset(view.data(), byte, view.bytes()); });
}

void zero_tensor(TensorView view, Stream& stream) {
  fill_bytes(view, 0, stream);
}

}  // namespace moesaic
