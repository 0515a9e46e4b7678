// Experts on several ranks with buffers for fewer rows than may come: further passes leave no trace but time.
#include <algorithm>

#include <fmt/format.h>

#include "core/config/check.h"
#include "core/train/memory_plan.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

constexpr int kRanks = 4, kSteps = 2;

struct Trained {
  std::vector<StepStats> stats;
  Snapshot state;
  std::int64_t further_passes = 0;
};

// `skewed`: every token chooses the experts of the first rank.
Trained train(const std::vector<std::string>& overrides, bool skewed = false) {
  std::vector<std::string> all{"train.global_batch_size=8"};
  const bool has_ep = std::any_of(overrides.begin(), overrides.end(), [](const auto& set) {
    return set.find("parallel.ep=") == 0;
  });
  if (!has_ep) all.emplace_back("parallel.ep=4");
  all.insert(all.end(), overrides.begin(), overrides.end());
  const config::Config config = hybrid_config(all);
  Trained result;
  std::mutex mutex;
  run_local_ranks(kRanks, [&](Communicator& world) {
    Run run(config, &world);
    for (const auto& named : run.model->moe_layers()) {
      const TensorView bias = run.params->buffer(named.moe->bias());
      for (std::int64_t e = 0; skewed && e < 2; ++e) {
        const double high = 4 - static_cast<double>(e);
        if (bias.dtype() == DType::f64)
          bias.as<double>()[e] = high;
        else
          bias.as<float>()[e] = static_cast<float>(high);
      }
    }
    const auto stats = run.steps(kSteps);
    run.add_to(result.state, mutex);
    std::int64_t passes = 0;
    for (const auto& named : run.model->moe_layers())
      passes += named.moe->further_passes();
    const std::lock_guard lock(mutex);
    if (world.rank() == 0) {
      result.stats = stats;
      result.further_passes = passes;
    }
  });
  return result;
}

std::vector<std::string> with(std::vector<std::string> overrides, const std::string& one) {
  overrides.push_back(one);
  return overrides;
}

// The same bits with every buffer; returns the further passes that each took.
std::vector<std::int64_t> check_factors(const std::vector<std::string>& overrides,
                                        bool skewed,
                                        const std::vector<double>& factors) {
  INFO(fmt::format("{}{}", fmt::join(overrides, " "), skewed ? ", skewed" : ""));
  const Trained whole = train(overrides, skewed);
  CHECK(whole.further_passes == 0);
  std::vector<std::int64_t> passes;
  for (const double factor : factors) {
    INFO("factor " << factor);
    const Trained parts =
        train(with(overrides, fmt::format("dispatch.buffer_factor={}", factor)), skewed);
    CHECK(differences(parts.state, whole.state).empty());
    for (std::size_t i = 0; i < whole.stats.size(); ++i)
      CHECK(same_numbers(parts.stats[i], whole.stats[i]));
    passes.push_back(parts.further_passes);
  }
  return passes;
}

}  // namespace

TEST_CASE("small buffers: the bits are those of whole ones, with any exchange that counts") {
  for (const char* exchange : {"flat",
                               "pair",
                               "hierarchical dispatch.hierarchy=inter_first",
                               "hierarchical dispatch.hierarchy=intra_first",
                               "hierarchical dispatch.hierarchy=intra_first dispatch.hops=3"}) {
    std::vector<std::string> overrides{"comm.ranks_per_node=2"};
    std::string rest = std::string("dispatch.exchange=") + exchange;
    for (std::size_t at = 0; at != std::string::npos;) {
      const std::size_t end = rest.find(' ');
      overrides.push_back(rest.substr(0, end));
      at = end;
      if (end != std::string::npos) rest.erase(0, end + 1);
    }
    const auto even = check_factors(overrides, false, {1.25, 0.3});
    CHECK(even[1] > even[0]);
    const auto skewed = check_factors(overrides, true, {1.25});
    CHECK(skewed[0] > 0);
  }
}

TEST_CASE("small buffers: from room for everything to a few rows") {
  const auto passes = check_factors({"dispatch.exchange=flat"}, true, {100, 3, 1, 0.25, 0.05});
  CHECK(passes[0] == 0);
  CHECK(std::is_sorted(passes.begin(), passes.end()));
  CHECK(passes[4] > 20 * passes[2]);
}

TEST_CASE("small buffers: with other types, recomputation, capacity, inner widths split") {
  for (const char* set : {"run.precision=f32",
                          "run.precision=bf16",
                          "activations.recompute=[full]",
                          "activations.recompute=[moe.xs,moe.u,moe.gate_up]",
                          "model.capacity_factor=1.0",
                          "model.routed_expert_hidden_size=null",
                          "parallel.ep=2 parallel.etp=2"}) {
    std::vector<std::string> overrides{"dispatch.exchange=flat"};
    const std::string text = set;
    const std::size_t cut = text.find(' ');
    overrides.push_back(text.substr(0, cut));
    if (cut != std::string::npos) overrides.push_back(text.substr(cut + 1));
    const auto passes = check_factors(overrides, false, {0.3});
    CHECK(passes[0] > 0);
  }
}

TEST_CASE("small buffers: with chunks beside the experts' work") {
  const std::string flat = "dispatch.exchange=flat", nodes = "dispatch.exchange=hierarchical";
  for (const auto& [exchange, skewed] :
       {std::pair(flat, false), std::pair(flat, true), std::pair(nodes, true)}) {
    const Trained whole = train({exchange, "comm.ranks_per_node=2"}, skewed);
    std::int64_t fewest = 0;
    for (const char* factor : {"0", "1.25", "0.1"}) {
      for (const char* chunks : {"2", "5"}) {
        INFO(exchange << ", factor " << factor << ", chunks " << chunks
                      << (skewed ? ", skewed" : ""));
        const Trained parts = train({exchange,
                                     "comm.ranks_per_node=2",
                                     "dispatch.overlap=true",
                                     std::string("dispatch.buffer_factor=") + factor,
                                     std::string("dispatch.chunks=") + chunks},
                                    skewed);
        CHECK(differences(parts.state, whole.state).empty());
        for (std::size_t i = 0; i < whole.stats.size(); ++i)
          CHECK(same_numbers(parts.stats[i], whole.stats[i]));
        fewest = std::max(fewest, parts.further_passes);
        if (std::string(factor) == "0") CHECK(parts.further_passes == 0);
      }
    }
    CHECK(fewest > 20);
  }
}

TEST_CASE("small buffers: a plan of memory shows what they save") {
  const auto bytes = [](const std::string& factor) {
    const config::Config config = hybrid_config(
        {"parallel.ep=4", "dispatch.exchange=flat", "dispatch.buffer_factor=" + factor});
    return plan_memory(config, kCpu, kF32, {}, kRanks, 0).total();
  };
  CHECK(bytes("1.25") < bytes("0"));
  CHECK(bytes("0.5") < bytes("1.25"));
  CHECK(bytes("100") >= bytes("0"));  // all rows, and what further passes would take is not needed
}

TEST_CASE("small buffers: exchanges that do not count and split backwards are refused") {
  const auto message = [](const std::vector<std::string>& overrides) {
    std::string text;
    try {
      hybrid_config(overrides);
    } catch (const std::exception& e) {
      text = e.what();
    }
    return text;
  };
  CHECK(message({"dispatch.buffer_factor=1.25", "dispatch.exchange=dense"})
            .find("dense exchanges do not count what comes") != std::string::npos);
  CHECK(message({"dispatch.buffer_factor=1.25", "parallel.pp=2", "parallel.schedule=zero_bubble"})
            .find("zero_bubble keeps weight gradients") != std::string::npos);
  CHECK(message({"dispatch.buffer_factor=1.25"}).empty());
}

}  // namespace moesaic::test
