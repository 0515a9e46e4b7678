#include "core/base/activity.h"

namespace moesaic {
namespace {

std::atomic<std::uint64_t> foreground{0}, background{0};
thread_local bool is_background = false;

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

PhaseScope::PhaseScope(Activity* activity, const char* name, bool is_long) noexcept
    : activity_(activity) {
  if (activity_ == nullptr) return;
  before_ = activity_->phase.latest();
  activity_->phase.update([&](Phase& phase) {
    phase.name = name;
    phase.is_long = is_long;
  });
  count_progress();
}

PhaseScope::~PhaseScope() {
  if (activity_ == nullptr) return;
  activity_->phase.update([&](Phase& phase) {
    phase.name = before_.name;
    phase.is_long = before_.is_long;
  });
  count_progress();
}

}  // namespace moesaic
