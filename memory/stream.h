#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/base/tensor.h"

namespace moesaic {

class Stream;

/// A point in a stream's order. Copies share the point.
class Event {
 public:
  explicit Event(Device device);
  bool reached() const;       ///< true if never recorded
  void wait_on_host() const;  ///< blocks the host
  struct Impl;

 private:
  friend class Stream;
  std::shared_ptr<Impl> impl_;
};

/// A point in a stream's order that remembers when it was reached. Recorded once per measurement.
class Timestamp {
 public:
  explicit Timestamp(Device device);
  struct Impl;

 private:
  friend class Stream;
  friend double seconds_between(const Timestamp& from, const Timestamp& to);
  std::shared_ptr<Impl> impl_;
};
/// Time between two points of one device, by the device's own clock. Blocks the host unless both were reached; both must
/// have been recorded.
double seconds_between(const Timestamp& from, const Timestamp& to);

/// An in-order queue of work. A CPU stream is a worker thread with a queue; streams order each other by events exactly
/// as in CUDA. An exception thrown by a task is kept and rethrown by the next synchronize(); later tasks are dropped.
class Stream {
 public:
  /// worker: tasks run on the stream's own thread. immediate: each task runs at once in the caller (debugging, one
  /// core). dry: tasks are dropped, so that the host code of a step can be run to measure what it takes from the arenas.
  enum class Mode { worker, immediate, dry };
  /// Of kernels that wait for room on a device those of streams with high priority come first. Means nothing on the CPU.
  enum class Priority { normal, high };
  Stream(Device device,
         std::string name,
         Mode mode = Mode::worker,
         Priority priority = Priority::normal);

  /// CPU streams only: adds a task at the end.
  void enqueue(std::function<void()> task);
  void record(Event& event);  ///< `event` is reached when all earlier work here is done
  void record(Timestamp& timestamp);
  void wait(const Event& event);  ///< later work here starts after `event`; does not block the host
  void synchronize();  ///< blocks the host until the queue is empty; rethrows a task's exception
  Device device() const noexcept;
  Mode mode() const noexcept;
  void* native() const noexcept;  ///< cudaStream_t, or nullptr on the CPU

  struct Impl;

 private:
  std::shared_ptr<Impl> impl_;
};

/// How often the host has waited, in this process so far, for a stream, an event or a timestamp. A step of training on one
/// device waits once, for what it reports.
std::uint64_t host_waits() noexcept;

/// Copies bytes between views of one shape and dtype, host or device, in stream order. Host memory given to a CUDA
/// stream should be pinned, or the copy is synchronous.
void copy_tensor(TensorView to, ConstTensorView from, Stream& stream);
/// Sets all bytes to `byte` in stream order.
void fill_bytes(TensorView view, std::uint8_t byte, Stream& stream);
/// Sets all bytes to zero in stream order.
void zero_tensor(TensorView view, Stream& stream);

}  // namespace moesaic
