#pragma once
#include <string>

#include "core/base/activity.h"
#include "kernels/ops/op.h"

namespace moesaic {

/// An observer of ops that also wants to know which part of a step they belong to.
class PartObserver : public OpObserver {
 public:
  /// A named part begins or ends; parts nest. Called as begin() and end() are.
  virtual void push(const std::string& part) = 0;
  virtual void pop() = 0;
};

/// Shows the backend's observer that the ops enqueued in its lifetime belong to a part of the step: a phase ("backward"), a
/// layer ("layer 3"), and notes it in the thread's Activity. Costs two branches when nobody looks. `part` is a literal; the
/// observer must not change meanwhile.
class PartScope {
 public:
  PartScope(Backend& backend, const char* part) : PartScope(backend, part, -1) {}
  /// "part index"
  PartScope(Backend& backend, const char* part, std::int64_t index) : backend_(backend) {
    activity_ = activity_of_thread();
    if (activity_ != nullptr) note([part, index](Place& place) { place.push(part, index); });
    observer_ = observer_of(backend);
    if (observer_ == nullptr) return;
    const std::string name = index < 0 ? part : part + (" " + std::to_string(index));
    show([observer = observer_, name] { observer->push(name); });
  }
  ~PartScope() {
    if (observer_ != nullptr) show([observer = observer_] { observer->pop(); });
    if (activity_ != nullptr) note([](Place& place) { place.pop(); });
  }
  PartScope(const PartScope&) = delete;
  PartScope& operator=(const PartScope&) = delete;

 private:
  static PartObserver* observer_of(Backend& backend) {
    return dynamic_cast<PartObserver*>(
        std::visit([](auto& context) { return context.observer; }, backend));
  }
  // A CPU stream calls its observer in the order of its work, a CUDA one is enqueued by this thread.
  template <class F>
  void show(const F& f) {
    if (auto* cpu = std::get_if<CpuContext>(&backend_)) {
      cpu->stream.enqueue(f);
    } else {
      f();
    }
  }
  // What this thread enqueues, and on the CPU what the stream's worker has come to.
  template <class F>
  void note(const F& change) {
    activity_->issued.update(change);
    count_progress();  // on a GPU the only sign of life of a step: what is enqueued
    if (auto* cpu = std::get_if<CpuContext>(&backend_))
      cpu->stream.enqueue([activity = activity_, change] { activity->running.update(change); });
  }
  Backend& backend_;
  PartObserver* observer_ = nullptr;
  Activity* activity_ = nullptr;
};

}  // namespace moesaic
