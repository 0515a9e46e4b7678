#pragma once
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/stream.h"

namespace moesaic {

/// What the time of a step goes to, in the order in which plots stack it.
///   data           the host waits for the batch
///   forward, backward, optimizer  the device's stream; the optimizer with clipping and balancing
///   communication  the ranks meet before the step, what is left of the sum of gradients after backward, and where a stage of
///                  a pipeline waits for the others
///   checkpoint     training waited for a save since the step before; not part of the step's seconds
///   other          the rest of the step: zeroing, the host's enqueueing, the copy of the results
enum class StepPart : std::uint8_t {
  data,
  forward,
  backward,
  communication,
  optimizer,
  checkpoint,
  other
};
inline constexpr std::size_t kStepParts = 7;
const char* name(StepPart part) noexcept;

/// Seconds by part, of one rank.
struct StepSeconds {
  std::array<double, kStepParts> of{};
  double& operator[](StepPart part) { return of[static_cast<std::size_t>(part)]; }
  double operator[](StepPart part) const { return of[static_cast<std::size_t>(part)]; }
};

/// Measures the parts of a step. What the stream does is measured on its own clock by points in its order, which are read
/// after the step's one wait of the host; the measurement adds no wait, and changes no bits.
class StepTimer {
 public:
  /// `stream` must outlive this.
  explicit StepTimer(Stream& stream) : stream_(stream) {}

  /// A step begins, with the stream idle. Forgets a step that was not finished.
  void begin();
  /// The host's time since begin(), or since this was last called, was `part`.
  void host_did(StepPart part);
  /// From here on the stream's work is `part`.
  void stream_does(StepPart part);
  /// The step's last work is enqueued.
  void stream_ends();
  /// Since stream_ends() the host has prepared the next batch; what of that outlasted the stream's work was a wait for data.
  void prepared_next();
  /// With the stream idle: where the `seconds` of the step went.
  StepSeconds read(double seconds);

 private:
  using Clock = std::chrono::steady_clock;
  struct Point {
    Timestamp at;
    StepPart part;  // from here on
  };
  void add_point(StepPart part);

  Stream& stream_;
  StepSeconds host_;
  std::vector<Point> points_;  // the first used_ of them are of this step
  std::size_t used_ = 0;
  Clock::time_point host_since_, stream_began_, enqueued_, prepared_;
};

}  // namespace moesaic
