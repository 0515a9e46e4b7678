#pragma once
#include <chrono>
#include <cstdint>
#include <string>

namespace moesaic::apps {

/// Lines on standard error about a long piece of work: what, how far, how fast, how long still. The first after ten seconds,
/// then one every ten seconds; short work says nothing.
class Progress {
 public:
  Progress(std::string what, std::int64_t total, std::string unit);
  /// So much is done, of `total`.
  void at(std::int64_t done);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_, unit_;
  std::int64_t total_;
  Clock::time_point start_ = Clock::now(), said_ = start_;
};

}  // namespace moesaic::apps
