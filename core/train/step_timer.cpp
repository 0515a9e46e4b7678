#include "core/train/step_timer.h"

#include <algorithm>

namespace moesaic {
namespace {

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

const char* name(StepPart part) noexcept {
  static constexpr const char* kNames[kStepParts] = {
      "data", "forward", "backward", "communication", "optimizer", "checkpoint", "other"};
  return kNames[static_cast<std::size_t>(part)];
}

void StepTimer::begin() {
  host_ = {};
  used_ = 0;
  host_since_ = Clock::now();
  enqueued_ = prepared_ = host_since_;
}

void StepTimer::host_did(StepPart part) {
  const auto now = Clock::now();
  host_[part] += seconds(now - host_since_);
  host_since_ = now;
}

void StepTimer::add_point(StepPart part) {
  if (used_ == points_.size()) points_.push_back({Timestamp(stream_.device()), part});
  points_[used_].part = part;
  stream_.record(points_[used_].at);
  ++used_;
}

void StepTimer::stream_does(StepPart part) {
  if (used_ == 0) stream_began_ = Clock::now();
  add_point(part);
}

void StepTimer::stream_ends() {
  add_point(StepPart::other);
  enqueued_ = prepared_ = Clock::now();
}

void StepTimer::prepared_next() {
  prepared_ = Clock::now();
}

StepSeconds StepTimer::read(double step_seconds) {
  StepSeconds result = host_;
  double span = 0;
  for (std::size_t i = 0; i + 1 < used_; ++i) {
    const double time = seconds_between(points_[i].at, points_[i + 1].at);
    span += time;
    result[points_[i].part] += time;
  }
  // The stream was idle, so its clock and the host's agree about its beginning.
  const double outlasted = seconds(prepared_ - stream_began_) - span;
  result[StepPart::data] += std::clamp(outlasted, 0.0, seconds(prepared_ - enqueued_));
  double known = 0;
  result[StepPart::other] = 0;
  for (const double part : result.of)
    known += part;
  result[StepPart::other] = std::max(0.0, step_seconds - known);
  return result;
}

}  // namespace moesaic
