#include "apps/data/progress.h"

#include <iostream>
#include <utility>

#include <fmt/format.h>

#include "apps/data/source_arguments.h"
#include "apps/text_table.h"

namespace moesaic::apps {

Progress::Progress(std::string what, std::int64_t total, std::string unit)
    : what_(std::move(what)), unit_(std::move(unit)), total_(total) {}

void Progress::at(std::int64_t done) {
  constexpr std::chrono::seconds kInterval{10};
  const auto now = Clock::now();
  if (now - said_ < kInterval) return;
  said_ = now;
  const double seconds = std::chrono::duration<double>(now - start_).count();
  const double rate = static_cast<double>(done) / seconds;
  std::cerr << fmt::format("{}: {} of {} {} ({:.0f} %), {} per second, {:.0f} s left\n",
                           what_,
                           grouped(done),
                           grouped(total_),
                           unit_,
                           100 * static_cast<double>(done) / static_cast<double>(total_),
                           grouped(static_cast<std::int64_t>(rate)),
                           static_cast<double>(total_ - done) / rate);
}

}  // namespace moesaic::apps
