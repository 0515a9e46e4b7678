#include "core/base/activity.h"

namespace moesaic {
namespace {

std::atomic<std::uint64_t> foreground{0}, background{0};
thread_local bool is_background = false;
thread_local Activity* current = nullptr;

}  // namespace

void count_progress() noexcept {
  (is_background ? background : foreground).fetch_add(1, std::memory_order_relaxed);
}

std::uint64_t progress_count(bool with_background) noexcept {
  return foreground.load(std::memory_order_relaxed) +
         (with_background ? background.load(std::memory_order_relaxed) : 0);
}

void count_as_background() noexcept {
  is_background = true;
}

Activity* activity_of_thread() noexcept {
  return current;
}

ActivityOfThread::ActivityOfThread(Activity* activity) noexcept : before_(current) {
  current = activity;
}

ActivityOfThread::~ActivityOfThread() {
  current = before_;
}

PeriodScope::PeriodScope(const char* name, bool is_long) noexcept : activity_(current) {
  if (activity_ == nullptr) return;
  before_ = activity_->period.latest();
  activity_->period.update([&](Period& period) {
    period.name = name;
    period.is_long = is_long;
  });
  count_progress();
}

PeriodScope::~PeriodScope() {
  if (activity_ == nullptr) return;
  activity_->period.update([&](Period& period) {
    period.name = before_.name;
    period.is_long = before_.is_long;
  });
  count_progress();
}

}  // namespace moesaic
