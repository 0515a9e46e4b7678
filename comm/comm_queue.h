#pragma once
#include <chrono>
#include <functional>
#include <memory>

#include "core/base/activity.h"
#include "memory/stream.h"

namespace moesaic {

/// The communication thread of a rank: it alone calls the transport, and runs operations in the
/// order in which the main thread issued them, whatever their streams.
///
/// This cannot lock up against the streams: what an operation waits for (its stream's earlier work,
/// and operations or events that this work waits for) was issued before it.
class CommQueue {
 public:
  /// Notes in `activity`, if it is given, which operation the thread is at.
  explicit CommQueue(Activity* activity = nullptr);
  ~CommQueue();  ///< runs what is queued, then joins
  CommQueue(const CommQueue&) = delete;
  CommQueue& operator=(const CommQueue&) = delete;

  /// `work` runs when its turn has come and `stream` has reached this point; later work of `stream`
  /// waits for it. An exception becomes the stream's failure. Nothing happens on a dry stream. If
  /// the stream drops the task because it failed earlier, `work` is skipped. `what`: its operation, group, ranks and bytes.
  void run_in_stream(Stream& stream, std::function<void()> work, const Exchange& what);

  /// Runs `work` in turn, blocks until it is done, rethrows its exception.
  void run(std::function<void()> work, const Exchange& what = {});

  /// Runs `work` now if the thread becomes idle within `patience`; false otherwise. For abort only.
  bool try_run(std::function<void()> work, std::chrono::milliseconds patience);
  Activity* activity() const noexcept;  ///< may be null

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic
