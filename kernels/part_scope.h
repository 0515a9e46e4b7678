#pragma once
#include <string>

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
/// layer ("layer 3"). Costs a branch when nobody looks. The observer must not change meanwhile.
class PartScope {
 public:
  PartScope(Backend& backend, const char* part) : PartScope(backend, part, -1) {}
  /// "part index"
  PartScope(Backend& backend, const char* part, std::int64_t index) : backend_(backend) {
    observer_ = observer_of(backend);
    if (observer_ == nullptr) return;
    const std::string name = index < 0 ? part : part + (" " + std::to_string(index));
    show([observer = observer_, name] { observer->push(name); });
  }
  ~PartScope() {
    if (observer_ != nullptr) show([observer = observer_] { observer->pop(); });
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
  Backend& backend_;
  PartObserver* observer_ = nullptr;
};

}  // namespace moesaic
