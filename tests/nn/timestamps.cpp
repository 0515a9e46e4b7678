#include <chrono>
#include <thread>

#include "memory/stream.h"
#include "tests/support/catch.h"

namespace moesaic::test {

TEST_CASE("timestamps measure what lies between them on their stream") {
  for (const auto mode : {Stream::Mode::worker, Stream::Mode::immediate}) {
    Stream stream(kCpu, "test", mode);
    Timestamp from(kCpu), to(kCpu);
    stream.record(from);
    stream.enqueue([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    stream.record(to);
    CHECK(seconds_between(from, to) >= 0.02);
    CHECK(seconds_between(from, from) == 0);
  }
}

}  // namespace moesaic::test
