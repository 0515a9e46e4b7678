// What a run tells of its exchanges, and exchanges beside other work: the same bits.
#include <algorithm>
#include <numeric>
#include <sstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/train/memory_plan.h"
#include "core/train/sinks/metrics_file.h"
#include "core/train/sinks/step_line.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

config::Config exchange_config(const std::vector<std::string>& overrides) {
  std::vector<std::string> all{"train.global_batch_size=8", "log.detail_every=2"};
  for (const std::string key : {"parallel.ep=", "dispatch.exchange="}) {
    const bool is_set = std::any_of(
        overrides.begin(), overrides.end(), [&](const auto& set) { return set.find(key) == 0; });
    if (!is_set) all.push_back(key + (key == "parallel.ep=" ? "4" : "flat"));
  }
  all.insert(all.end(), overrides.begin(), overrides.end());
  return hybrid_config(all);
}

std::int64_t bytes(const StepStats& stats, LayerExchange::Way LayerExchange::*way) {
  return std::accumulate(
      stats.exchange.begin(), stats.exchange.end(), std::int64_t{0}, [&](auto sum, const auto& e) {
        return sum + (e.*way).bytes;
      });
}

std::int64_t network_bytes(const StepStats& stats) {
  std::int64_t sum = 0;
  for (const LayerExchange& e : stats.exchange)
    sum += e.dispatch.network_bytes + e.combine.network_bytes;
  return sum;
}

}  // namespace

TEST_CASE("exchange metrics: time and bytes of every layer in steps with details") {
  const JobResult job = run_job(exchange_config({}), 4, 2);
  CHECK(job.stats[0].exchange.empty());
  const auto& layers = job.stats[1].exchange;
  REQUIRE(layers.size() == 3);  // two layers with experts and the MTP module's
  CHECK(layers[0].layer == 1);
  CHECK(layers[1].layer == 2);
  for (const auto& e : layers) {
    for (const auto* way : {&e.dispatch, &e.combine}) {
      CHECK(way->seconds > 0);
      CHECK(way->exposed == way->seconds);  // nothing goes on beside
      CHECK(way->overlapped() == 0);
      CHECK(way->bytes > 0);
      CHECK(way->network_bytes == 0);
    }
  }
  // As many rows of z and its gradient come back as went; choices go, and so do gradients of weights, back. On average over
  // ranks; here rank 0 sends about as much as it gets.
  const StepStats& whole = job.stats[1];
  const JobResult fp8 =
      run_job(exchange_config({"dispatch.dtype=fp8", "dispatch.backward_dtype=fp8"}), 4, 2);
  CHECK(bytes(fp8.stats[1], &LayerExchange::dispatch) < bytes(whole, &LayerExchange::dispatch) / 2);
  const JobResult nodes = run_job(exchange_config({"comm.ranks_per_node=2"}), 4, 2);
  for (const auto& e : nodes.stats[1].exchange) {
    CHECK(e.dispatch.network_bytes > 0);
    CHECK(e.dispatch.network_bytes < e.dispatch.bytes);
  }
}

TEST_CASE("exchange metrics: further passes of every layer, in every step") {
  const JobResult whole = run_job(exchange_config({}), 4, 2),
                  parts = run_job(exchange_config({"dispatch.buffer_factor=0.3"}), 4, 2);
  for (const StepStats& stats : whole.stats) {
    for (const ExpertLoad& load : stats.experts)
      CHECK(!load.further_passes);
  }
  for (const StepStats& stats : parts.stats) {
    for (const ExpertLoad& load : stats.experts) {
      REQUIRE(load.further_passes);
      CHECK(*load.further_passes >= 4);  // of two micro-batches, each in three passes at least
    }
  }
  std::string bytes;
  write_expert_load(bytes, parts.stats[0].experts[0]);
  std::size_t at = 0;
  CHECK(read_expert_load(bytes, at).further_passes == parts.stats[0].experts[0].further_passes);
}

TEST_CASE("exchange metrics: as metrics.jsonl and the console tell them") {
  StepRecord record;
  record.step = 6;
  record.exchange = {
      {.layer = 1,
       .dispatch = {.seconds = 0.5, .exposed = 0.2, .bytes = 1 << 20, .network_bytes = 7},
       .combine = {.seconds = 0.25, .exposed = 0.25, .bytes = 3, .network_bytes = 0}},
      {.layer = 2,
       .dispatch = {.seconds = 1, .exposed = 1, .bytes = 1 << 20, .network_bytes = 0},
       .combine = {.seconds = 0, .exposed = 0, .bytes = 0, .network_bytes = 0}}};
  const auto json = nlohmann::json::parse(exchange_to_json(record));
  CHECK(json["type"] == "exchange");
  CHECK(json["step"] == 6);
  CHECK(json["layers"] == nlohmann::json{1, 2});
  CHECK(json["dispatch_seconds"] == nlohmann::json{0.5, 1.0});
  CHECK(json["dispatch_exposed_seconds"] == nlohmann::json{0.2, 1.0});
  CHECK(json["dispatch_overlapped_seconds"] == nlohmann::json{0.5 - 0.2, 0.0});
  CHECK(json["dispatch_network_bytes"] == nlohmann::json{7, 0});
  CHECK(json["combine_bytes"] == nlohmann::json{3, 0});
  CHECK(exchange_to_json(StepRecord{}).empty());
  StepLines lines;
  lines.add(record);
  const auto details = lines.detail_lines();
  REQUIRE(details.size() == 1);
  CHECK(details[0] ==
        "exchange dispatch 1.50 s, waited for 1.20 s, 2.0 MiB | combine 0.25 s, waited for 0.25 s, "
        "0.0 MiB | longest wait 1.00 s in layer 2");
}

TEST_CASE("exchanges beside other work change no bit") {
  for (const char* set : {"dispatch.exchange=flat",
                          "dispatch.exchange=dense",
                          "dispatch.exchange=hierarchical",
                          "dispatch.buffer_factor=0.3",
                          "dispatch.dtype=fp8",
                          "activations.recompute=[full]",
                          "activations.recompute=[moe.here_z]",
                          "run.precision=bf16",
                          "model.num_shared_experts=0"}) {
    INFO(set);
    const std::vector<std::string> plain{"comm.ranks_per_node=2", set};
    auto beside = plain;
    beside.emplace_back("dispatch.overlap=true");
    const JobResult a = run_job(exchange_config(plain), 4, 2),
                    b = run_job(exchange_config(beside), 4, 2);
    CHECK(differences(a.states[0], b.states[0]).empty());
    CHECK(same_numbers(a.stats[1], b.stats[1]));
    for (const auto& e : b.stats[1].exchange) {
      CHECK(e.dispatch.seconds > 0);
      CHECK(e.combine.seconds > 0);
    }
    const JobResult now = run_job(exchange_config(beside), 4, 2, Stream::Mode::immediate);
    CHECK(differences(a.states[0], now.states[0]).empty());
  }
}

TEST_CASE("exchanges in chunks change no bit and move as much") {
  for (const char* sets : {"dispatch.exchange=flat",
                           "dispatch.exchange=flat parallel.ep=2",
                           "dispatch.exchange=pair",
                           "dispatch.exchange=pair parallel.ep=2",
                           "dispatch.exchange=dense",
                           "dispatch.exchange=dense parallel.ep=2",
                           "dispatch.exchange=hdense",
                           "dispatch.exchange=hierarchical comm.ranks_per_node=1",
                           "dispatch.exchange=hierarchical parallel.ep=2 comm.ranks_per_node=1",
                           "dispatch.exchange=hierarchical",
                           "dispatch.exchange=hierarchical dispatch.hierarchy=intra_first",
                           "dispatch.exchange=hierarchical dispatch.hierarchy=intra_first "
                           "dispatch.hops=3",
                           "dispatch.dtype=fp8 dispatch.backward_dtype=fp8",
                           "dispatch.checksum=true",
                           "activations.recompute=[full]",
                           "activations.recompute=[moe.here_z]",
                           "activations.recompute=[moe.u,moe.gate_up]",
                           "activations.recompute=[full] dispatch.exchange=hierarchical",
                           "run.precision=bf16 dispatch.exchange=hierarchical",
                           "model.capacity_factor=1.0 dispatch.exchange=hierarchical",
                           "dispatch.dtype=fp8 dispatch.backward_dtype=fp8 dispatch.checksum=true "
                           "dispatch.exchange=hierarchical dispatch.hierarchy=intra_first "
                           "dispatch.hops=3",
                           "parallel.ep=2 parallel.etp=2 dispatch.exchange=hierarchical",
                           "run.precision=bf16",
                           "model.num_shared_experts=0",
                           "model.routed_expert_hidden_size=null",
                           "model.capacity_factor=1.0",
                           "parallel.ep=2 parallel.etp=2"}) {
    INFO(sets);
    std::vector<std::string> plain;
    std::istringstream words(sets);
    for (std::string set; words >> set;)
      plain.push_back(set);
    if (std::string(sets).find("ranks_per_node") == std::string::npos)
      plain.emplace_back("comm.ranks_per_node=2");
    const JobResult one = run_job(exchange_config(plain), 4, 2);
    const bool is_method = std::string(sets).find("dispatch.exchange=") == 0;
    for (const int chunks : is_method ? std::vector<int>{2, 4} : std::vector<int>{3}) {
      INFO(chunks);
      auto beside = plain;
      beside.insert(beside.end(),
                    {"dispatch.overlap=true", fmt::format("dispatch.chunks={}", chunks)});
      const JobResult parts = run_job(exchange_config(beside), 4, 2);
      CHECK(differences(one.states[0], parts.states[0]).empty());
      CHECK(same_numbers(one.stats[1], parts.stats[1]));
      CHECK(bytes(one.stats[1], &LayerExchange::dispatch) ==
            bytes(parts.stats[1], &LayerExchange::dispatch));
      CHECK(bytes(one.stats[1], &LayerExchange::combine) ==
            bytes(parts.stats[1], &LayerExchange::combine));
      CHECK(network_bytes(one.stats[1]) == network_bytes(parts.stats[1]));
      for (const auto& e : parts.stats[1].exchange) {
        CHECK(e.dispatch.seconds > 0);
        CHECK(e.combine.seconds > 0);
      }
    }
  }
}

TEST_CASE("exchanges in chunks need memory for no more rows, and a stream of their own") {
  const auto bytes_of = [](const char* chunks) {
    const config::Config config =
        exchange_config({"dispatch.overlap=true", std::string("dispatch.chunks=") + chunks});
    return plan_memory(config, kCpu, kF32, {}, 4, 0).total();
  };
  // Rows of all chunks together are those of one; what comes back waits for the last, and a weight gradient's operands do
  // not.
  CHECK(static_cast<double>(bytes_of("4")) < 1.1 * static_cast<double>(bytes_of("1")));
  const auto message = [](const std::vector<std::string>& overrides) {
    std::string text;
    try {
      exchange_config(overrides);
    } catch (const std::exception& e) {
      text = e.what();
    }
    return text;
  };
  CHECK(message({"dispatch.chunks=2"}).find("allowed: 1, or overlap: true") != std::string::npos);
  for (const char* wrong : {"dispatch.chunks=0", "dispatch.chunks=65"})
    CHECK(message({"dispatch.overlap=true", wrong}).find("dispatch.chunks") != std::string::npos);
  CHECK(message({"dispatch.overlap=true", "dispatch.chunks=64"}).empty());
}

}  // namespace moesaic::test
