// activations.residual_offload and activations.offload: what waits in host memory comes back with the same bits, however slow the
// copies are, in every order of micro-batches and under every policy of recomputation; and the device holds less.
#include "core/train/activation_offload.h"

#include <array>
#include <chrono>
#include <memory>
#include <thread>

#include <fmt/format.h>

#include "core/base/random.h"
#include "core/train/memory_plan.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

using Overrides = std::vector<std::string>;

constexpr int kSteps = 2;
const Overrides kBoundaries{"activations.residual_offload=true"};
const Overrides kEverything{"activations.residual_offload=true", "activations.offload=[\"*\"]"};

Overrides with(Overrides all, const Overrides& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::string shown(const Overrides& overrides) {
  std::string all;
  for (const std::string& o : overrides)
    all += o + " ";
  return all;
}

/// Copies that come late, by a seed, and places that hold NaNs when their tensor has left.
offload::Disturbance disturbance(std::uint64_t seed) {
  auto draws = std::make_shared<std::uint64_t>(0);
  return {.poison = true, .before = [draws, seed](Stream& stream) {
            if (uniform(seed, (*draws)++) > 0.2) return;
            const auto time =
                std::chrono::microseconds(static_cast<int>(uniform(seed + 1, *draws) * 2000));
            stream.enqueue([time] { std::this_thread::sleep_for(time); });
          }};
}

struct Trained {
  std::vector<StepStats> stats;
  Snapshot state;
  double held_out = 0;
  Trainer::OffloadTraffic traffic;
};

Trained train(const Overrides& overrides, const offload::Disturbance& disturbed = {}) {
  Run run(hybrid_config(overrides), nullptr, Stream::Mode::worker, kCpu, 0, {}, disturbed);
  Trained result;
  result.stats.push_back(run.step());
  result.held_out = run.trainer->evaluate().loss;  // in the middle: leaves what the next step needs
  for (int i = 1; i < kSteps; ++i)
    result.stats.push_back(run.step());
  result.state = run.snapshot();
  result.traffic = run.trainer->offload_traffic();
  return result;
}

void check_equal(const std::vector<StepStats>& a, const std::vector<StepStats>& b) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    CHECK(same_numbers(a[i], b[i]));
}

void check_equal(const Trained& a, const Trained& b) {
  check_equal(a.stats, b.stats);
  CHECK(differences(a.state, b.state).empty());
  CHECK(a.held_out == b.held_out);
}

std::size_t bytes_of(const std::vector<MemoryUse>& parts, const std::string& tag) {
  for (const MemoryUse& use : parts) {
    if (use.tag == tag) return use.bytes;
  }
  return 0;
}

}  // namespace

TEST_CASE("train: offloaded activations come back with the same bits") {
  std::uint64_t seed = 1;
  for (const char* recompute : {"none", "selective", "full"}) {
    for (const int batch : {1, 4}) {
      const Overrides base{"run.precision=bf16",
                           fmt::format("activations.recompute={}", recompute),
                           fmt::format("train.global_batch_size={}", batch)};
      const Trained reference = train(base);
      CHECK(reference.traffic.out == 0);
      for (const char* order : {"horizontal", "vertical"}) {
        for (const Overrides& leaving : {kBoundaries, kEverything}) {
          const Overrides all =
              with(with(base, {fmt::format("parallel.order={}", order)}), leaving);
          INFO(shown(all));
          check_equal(reference, train(all, disturbance(seed++)));
        }
      }
    }
  }
}

TEST_CASE("train: with many micro-batches, copies of activations begin early, with the same bits") {
  const auto pace = [](int micro_batches) {
    const offload::Options o = offload_pace(micro_batches);
    return std::pair(o.lead, o.stay);
  };
  for (const int few : {0, 1, 8})
    CHECK(pace(few) == std::pair(2, 6));
  CHECK(pace(12) == std::pair(3, 6));
  for (const int many : {16, 64})
    CHECK(pace(many) == std::pair(4, 8));
  const Overrides base{"run.precision=bf16", "train.global_batch_size=16"};
  const Trained offloaded =
      train(with(with(base, {"parallel.order=vertical"}), kBoundaries), disturbance(99));
  CHECK(offloaded.traffic.out > 0);
  check_equal(train(base), offloaded);
}

TEST_CASE("train: offloaded activations with every layer's sums as snapshots, and without any") {
  for (const Overrides& model :
       {Overrides{"model.residual.attn_res_block_size=1"}, Overrides{"run.precision=f64"}}) {
    const Trained reference = train(model);
    for (const char* order : {"horizontal", "vertical"}) {
      INFO(shown(model) << order);
      check_equal(reference,
                  train(with(with(model, {fmt::format("parallel.order={}", order)}), kEverything),
                        disturbance(9)));
    }
  }
}

/// Two ranks; what kernels read on each of them in the end.
struct Pair {
  std::vector<StepStats> stats;
  std::array<Snapshot, 2> weights;
};
Pair train_pair(const Overrides& overrides, bool disturbed) {
  const config::Config config = hybrid_config(overrides);
  Pair result;
  run_local_ranks(2, [&](Communicator& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    Run run(config,
            &world,
            Stream::Mode::worker,
            kCpu,
            0,
            {},
            disturbed ? disturbance(20 + rank) : offload::Disturbance{});
    const auto stats = run.steps(kSteps);
    if (rank == 0) result.stats = stats;
    result.weights[rank] = run.weights_of_kernels();
  });
  return result;
}

TEST_CASE("train: offloaded activations on several ranks and stages") {
  for (const Overrides& layout :
       {Overrides{},
        Overrides{"parallel.ep=2", "dispatch.overlap=true", "dispatch.chunks=2"},
        Overrides{"parallel.ep=2", "dispatch.buffer_factor=0.5", "parallel.order=vertical"},
        Overrides{"parallel.tp=2", "parallel.order=vertical"},
        Overrides{"parallel.cp=2"},
        Overrides{"parallel.pp=2", "parallel.layers=[2, 1]"},
        Overrides{"parallel.pp=2", "parallel.schedule=interleaved", "parallel.layers=[0, 2, 1, 0]"},
        Overrides{"parallel.pp=2", "parallel.layers=[2, 1]", "parallel.schedule=gpipe"}}) {
    for (const char* recompute : {"none", "full"}) {
      const Overrides base = with({"run.precision=f32",
                                   "train.global_batch_size=8",
                                   fmt::format("activations.recompute={}", recompute)},
                                  layout);
      INFO(shown(base));
      const Pair reference = train_pair(base, false),
                 offloaded = train_pair(with(base, kEverything), true);
      check_equal(reference.stats, offloaded.stats);
      for (std::size_t rank = 0; rank < 2; ++rank)
        CHECK(differences(reference.weights[rank], offloaded.weights[rank]).empty());
    }
  }
}

TEST_CASE("train: what is offloaded takes less of the device, as planned") {
  const Overrides base{
      "run.precision=bf16", "train.global_batch_size=16", "parallel.order=vertical"};
  const auto plan = [&](const Overrides& more) {
    const config::Config config = hybrid_config(with(base, more));
    return plan_memory(config, kCpu, kBf16, {}, 1);
  };
  for (const char* recompute : {"activations.recompute=none", "activations.recompute=full"}) {
    const MemoryPlan here = plan({recompute}), away = plan(with({recompute}, kEverything));
    const std::size_t kept = bytes_of(here.parts, "saved activations"),
                      left = bytes_of(away.parts, "saved activations"),
                      places = bytes_of(away.parts, "offloaded activations"),
                      homes = bytes_of(away.host, "offloaded activations, host");
    CHECK(here.host.empty());
    CHECK(2 * (left + places) < kept);
    CHECK(left + homes >= kept - kept / 20);  // nearly all of it has a home
    CHECK(away.total() < here.total());
  }
  // What is planned is what a run allocates.
  const config::Config config = hybrid_config(with(base, kEverything));
  Run run(config);
  const StepStats stats = run.step();
  const MemoryPlan planned = plan_memory(config, kCpu, run.params->precision(), {}, 1);
  CHECK(bytes_of(planned.parts, "offloaded activations") == run.trainer->memory().offload);
  CHECK(bytes_of(planned.host, "offloaded activations, host") ==
        run.trainer->memory().offload_host);
  CHECK(bytes_of(planned.host, "offloaded activations, host") ==
        bytes_of(memory_in_use(), "offloaded activations, host"));
  // Everything goes out once, and comes back for backward at least.
  const Trainer::OffloadTraffic traffic = run.trainer->offload_traffic();
  CHECK(traffic.out == run.trainer->memory().offload_host);
  CHECK(traffic.out == planned.activations_out);
  CHECK(traffic.in == planned.activations_in);
  CHECK(stats.activations_out == static_cast<std::int64_t>(traffic.out));
  CHECK(stats.activations_in == static_cast<std::int64_t>(traffic.in));
  CHECK(traffic.in >= traffic.out);
}

TEST_CASE("train: the device's share of offloaded activations does not grow with micro-batches") {
  const auto places = [](int batch) {
    const config::Config config =
        hybrid_config(with({"run.precision=bf16",
                            "parallel.order=vertical",
                            "activations.recompute=full",
                            fmt::format("train.global_batch_size={}", batch)},
                           kBoundaries));
    return bytes_of(plan_memory(config, kCpu, kBf16, {}, 1).parts, "offloaded activations");
  };
  CHECK(places(64) > 0);
  CHECK(places(128) <= places(64));
}

TEST_CASE("train: offloaded activations over phases with other lengths, in memory of the start") {
  const Overrides base{
      "run.precision=f32",
      "train.phases=[{until: 1}, {until: 2, sequence_length: 32, micro_batch_size: 2}, {until: 20, "
      "micro_batch_size: 2}]"};
  const auto after = [&](const Overrides& more) {
    Run run(hybrid_config(with(base, more)),
            nullptr,
            Stream::Mode::worker,
            kCpu,
            0,
            {},
            disturbance(5));
    const auto own = [] {
      return bytes_of(memory_in_use(), "offloaded activations") +
             bytes_of(memory_in_use(), "offloaded activations, host");
    };
    const std::size_t at_start = own();
    run.steps(3);
    CHECK(own() == at_start);
    return run.snapshot();
  };
  const Snapshot reference = after({});
  for (const char* order : {"parallel.order=horizontal", "parallel.order=vertical"})
    CHECK(differences(reference, after(with(kEverything, {order}))).empty());
}

TEST_CASE("train: offload that cannot be is refused") {
  const auto message = [](const Overrides& overrides) {
    try {
      hybrid_config(overrides);
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(message(with({"parallel.pp=2", "parallel.schedule=zero_bubble"}, kBoundaries))
            .find("allowed: no offload, or another schedule") != std::string::npos);
}

}  // namespace moesaic::test
