#include "core/train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>

#include "core/base/error.h"

namespace moesaic {
namespace {

double falling(LrSchedule::Shape shape, double x) {
  switch (shape) {
    case LrSchedule::Shape::linear:
      return 1.0 - x;
    case LrSchedule::Shape::cosine:
      return 0.5 * (1.0 + std::cos(std::numbers::pi * x));
    case LrSchedule::Shape::one_minus_sqrt:
      return 1.0 - std::sqrt(x);
  }
  return 0;
}

/// (step - start) / length up to 1; a length of zero is over at once.
double progress(std::int64_t step, std::int64_t start, std::int64_t length) {
  return std::min(
      1.0,
      static_cast<double>(step - start) / static_cast<double>(std::max<std::int64_t>(1, length)));
}

void require(bool good, const std::string& what) {
  if (!good) throw UsageError(what);
}

}  // namespace

void LrSchedule::check() const {
  require(std::isfinite(peak) && peak >= 0,
          fmt::format("learning rate {} must be a number that is not negative", peak));
  require(std::isfinite(floor) && floor >= 0 && floor <= peak,
          fmt::format("final learning rate {} must lie between 0 and the peak {}", floor, peak));
  require(warmup_steps >= 0, fmt::format("warm-up of {} steps must not be negative", warmup_steps));
  if (kind == Kind::constant) return;
  require(total_steps >= 1,
          fmt::format("a schedule that decays needs at least one step, not {}", total_steps));
  require(warmup_steps <= total_steps,
          fmt::format("warm-up of {} steps is longer than the {} steps of the schedule",
                      warmup_steps,
                      total_steps));
  if (kind == Kind::wsd) {
    require(0 <= decay_steps && decay_steps <= total_steps - warmup_steps,
            fmt::format("decay of {} steps must lie between 0 and the {} steps after warm-up",
                        decay_steps,
                        total_steps - warmup_steps));
  }
}

double LrSchedule::at(std::int64_t step) const noexcept {
  if (step <= warmup_steps)
    return warmup_steps == 0 ? 0.0
                             : peak * static_cast<double>(step) / static_cast<double>(warmup_steps);
  if (kind == Kind::constant) return peak;
  if (kind == Kind::cosine) {
    return floor +
           (peak - floor) *
               falling(Shape::cosine, progress(step, warmup_steps, total_steps - warmup_steps));
  }
  const std::int64_t start = total_steps - decay_steps;
  if (step <= start) return peak;
  return floor + (peak - floor) * falling(shape, progress(step, start, decay_steps));
}

LrSchedule::Shape lr_decay_shape_from_name(const std::string& text) {
  if (text == "linear") return LrSchedule::Shape::linear;
  if (text == "cosine") return LrSchedule::Shape::cosine;
  if (text == "1-sqrt") return LrSchedule::Shape::one_minus_sqrt;
  throw UsageError(fmt::format("decay shape '{}' is none of linear, cosine, 1-sqrt", text));
}

}  // namespace moesaic
