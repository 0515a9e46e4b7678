// Where the time of a step goes.
#include "core/train/step_timer.h"

#include <numeric>
#include <thread>

#include "memory/stream.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

using namespace std::chrono_literals;

double sum(const StepSeconds& parts) {
  return std::accumulate(parts.of.begin(), parts.of.end(), 0.0);
}

}  // namespace

TEST_CASE("parts are measured on the stream, the host's waits beside it, the rest is other") {
  Stream stream(kCpu, "test");
  StepTimer timer(stream);
  for (int step = 0; step < 2; ++step) {  // points are used again
    const auto start = std::chrono::steady_clock::now();
    const auto work = [&](std::chrono::milliseconds time) {
      stream.enqueue([time] { std::this_thread::sleep_for(time); });
    };
    timer.begin();
    std::this_thread::sleep_for(10ms);
    timer.host_did(StepPart::data);
    std::this_thread::sleep_for(5ms);
    timer.host_did(StepPart::communication);
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
      timer.stream_does(StepPart::forward);
      work(10ms);
      timer.stream_does(StepPart::backward);
      work(20ms);
    }
    timer.stream_does(StepPart::communication);
    work(7ms);
    timer.stream_does(StepPart::optimizer);
    work(5ms);
    timer.stream_ends();
    std::this_thread::sleep_for(step == 0 ? 1ms : 130ms);  // beside the stream, or beyond its end
    timer.prepared_next();
    stream.synchronize();
    const std::uint64_t waits = host_waits();
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const StepSeconds parts = timer.read(seconds);
    CHECK(host_waits() == waits);
    // A sleep is never shorter than asked for, so lower bounds hold on a busy machine, too.
    CHECK(parts[StepPart::forward] >= 0.020);
    CHECK(parts[StepPart::backward] >= 0.040);
    CHECK(parts[StepPart::communication] >= 0.012);
    CHECK(parts[StepPart::optimizer] >= 0.005);
    CHECK(parts[StepPart::data] >= 0.010);
    CHECK(parts[StepPart::checkpoint] == 0);
    CHECK(sum(parts) == Approx(seconds).epsilon(0.01));
    const double stream_time =
        parts[StepPart::forward] + parts[StepPart::backward] + parts[StepPart::optimizer] + 0.007;
    if (step == 1) CHECK(parts[StepPart::data] >= 0.010 + std::max(0.0, 0.130 - stream_time) * 0.9);
  }
}

TEST_CASE("a step says where its time went") {
  for (const int ranks : {1, 2}) {
    run_local_ranks(ranks, [&](Communicator& world) {
      Run run(hybrid_config({"train.global_batch_size=8"}), ranks > 1 ? &world : nullptr);
      for (const StepStats& stats : run.steps(3)) {
        if (world.rank() != 0) continue;
        INFO(ranks << " rank(s), step " << stats.step);
        CHECK(stats.parts[StepPart::forward] > 0);
        CHECK(stats.parts[StepPart::backward] > 0);
        CHECK(stats.parts[StepPart::optimizer] > 0);
        CHECK(stats.parts[StepPart::checkpoint] == 0);
        if (ranks > 1) CHECK(stats.parts[StepPart::communication] > 0);
        CHECK(sum(stats.parts) == Approx(stats.seconds).epsilon(0.01));
      }
    });
  }
}

}  // namespace moesaic::test
