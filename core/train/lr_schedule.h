#pragma once
#include <cstdint>
#include <string>

namespace moesaic {

/// A learning rate as a function of the step, steps counted from 1.
///
///   step <= warmup_steps:  peak step / warmup_steps
///   constant:  peak
///   cosine:    floor + (peak - floor) (1 + cos(pi x)) / 2
///              x = min(1, (step - warmup) / (total - warmup))
///   wsd:       peak until total - decay_steps, then floor + (peak - floor) f(x)
///              x = min(1, (step - start) / decay_steps)
///              f = 1 - x (linear), (1 + cos(pi x)) / 2 (cosine), 1 - sqrt(x) (one_minus_sqrt)
///
/// Source: SPEC 7.5.
struct LrSchedule {
  enum class Kind : std::uint8_t { constant, cosine, wsd };
  enum class Shape : std::uint8_t { linear, cosine, one_minus_sqrt };
  Kind kind = Kind::constant;
  Shape shape = Shape::linear;
  double peak = 0;
  double floor = 0;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;
  std::int64_t decay_steps = 0;

  /// Throws UsageError naming the value that cannot be.
  void check() const;
  double at(std::int64_t step) const noexcept;
};

/// "linear" | "cosine" | "1-sqrt"; throws UsageError for another text.
LrSchedule::Shape lr_decay_shape_from_name(const std::string& text);

}  // namespace moesaic
