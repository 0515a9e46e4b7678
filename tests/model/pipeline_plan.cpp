// How configurations would be laid over a pipeline.
#include "core/model/pipeline_plan.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "core/config/load.h"
#include "tests/support/catch.h"

using namespace moesaic;

namespace {

config::Config shipped(const std::string& name, const std::vector<std::string>& overrides) {
  return config::load_config(MOESAIC_SOURCE_DIR "/configs/" + name + ".yaml", overrides).config;
}

PipelinePlan planned(const std::string& name, const std::vector<std::string>& overrides) {
  const config::Config config = shipped(name, overrides);
  REQUIRE(pipeline_findings(config).empty());
  const auto plan = make_pipeline_plan(config, make_plan(config));
  REQUIRE(plan.has_value());
  return *plan;
}

std::string finding(const std::string& name, const std::vector<std::string>& overrides) {
  const auto findings = pipeline_findings(shipped(name, overrides));
  return findings.empty() ? "" : findings[0].keys.front() + ": " + findings[0].message;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("pipeline plan: one stage has none") {
  const config::Config config = shipped("quickstart", {});
  CHECK(pipeline_findings(config).empty());
  CHECK_FALSE(make_pipeline_plan(config, make_plan(config)).has_value());
}

TEST_CASE("pipeline plan: every layer is somewhere, and the last chunk pays for head and MTP") {
  const config::Config config =
      shipped("deepseek_v32", {"parallel.pp=8", "parallel.dp=8", "parallel.schedule=1f1b"});
  const ModelPlan model = make_plan(config);
  const auto plan = make_pipeline_plan(config, model);
  REQUIRE(plan.has_value());
  REQUIRE(plan->chunks.size() == 8);
  std::int64_t layers = 0, parameters = 0;
  double flops = 0;
  for (const ChunkPlan& c : plan->chunks) {
    CHECK(c.layers.begin == layers);
    layers = c.layers.end;
    parameters += c.parameters;
    flops += c.forward_flops;
    CHECK(c.share < 1.15);
  }
  CHECK(layers == 61);
  // All but the output norm.
  CHECK(parameters == model.model.all + model.mtp.all - config.model.hidden_size);
  // The warm-up of the indexer beside dense attention comes first, but is not what the run is about.
  REQUIRE(plan->main_phase == 1);
  CHECK(flops == Approx(static_cast<double>(model.phases[1].forward_flops + model.mtp_flops->flops))
                     .epsilon(1e-5));
  CHECK(plan->chunks.back().layers.size() + 2 <= plan->chunks.front().layers.size());
  CHECK(plan->schedule.sizes.micro_batches == 480 / 8);
  for (int rank = 0; rank < 8; ++rank)
    CHECK(plan->slots.per_rank[static_cast<std::size_t>(rank)] == 8 - rank);
  // 4,096 tokens or what the file says, in bf16; plain residuals have no snapshots.
  CHECK(plan->chunks[0].sent_snapshots.empty());
  CHECK(plan->chunks[0].sent_bytes == model.micro_batch_tokens * config.model.hidden_size * 2);
  CHECK(plan->chunks.back().sent_bytes == 0);
}

TEST_CASE("pipeline plan: attention residuals travel with the running sum") {
  const PipelinePlan plan = planned("kimi_k3", {"parallel.pp=8", "parallel.dp=256"});
  for (std::size_t c = 0; c + 1 < plan.chunks.size(); ++c) {
    // A boundary before layer l: ceil(l / 12) snapshots (SPEC 6.6).
    const auto expected = static_cast<std::size_t>((plan.chunks[c].layers.end + 11) / 12);
    CHECK(plan.chunks[c].sent_snapshots.size() == expected);
    CHECK(plan.chunks[c].returned_bytes > plan.chunks[c].sent_bytes);  // their gradients are f32
  }
  // With several chunks per stage only what the receiver has not seen.
  const PipelinePlan twice = planned(
      "kimi_k3",
      {"parallel.pp=4", "parallel.dp=256", "parallel.schedule=interleaved", "parallel.chunks=6"});
  std::size_t most = 0;
  for (const ChunkPlan& c : twice.chunks)
    most = std::max(most, c.sent_snapshots.size());
  CHECK(most == 1);
  CHECK(twice.unit_bubble < plan.unit_bubble);
}

TEST_CASE("pipeline plan: activations follow the schedule") {
  const std::vector<std::string> few{"parallel.pp=2", "train.micro_batch_size=1"};
  const auto with = [&](const std::string& schedule) {
    auto overrides = few;
    overrides.push_back("parallel.schedule=" + schedule);
    return planned("quickstart", overrides);
  };
  const PipelinePlan gpipe = with("gpipe"), one = with("1f1b"), zero = with("zero_bubble");
  REQUIRE(gpipe.activation_bytes[0].has_value());
  CHECK(*gpipe.activation_bytes[0] == 8 * *gpipe.chunks[0].activation_bytes);
  CHECK(*one.activation_bytes[0] == 2 * *one.chunks[0].activation_bytes);
  CHECK(*one.activation_bytes[1] == *one.chunks[1].activation_bytes);
  CHECK(*zero.activation_bytes[0] <= *one.activation_bytes[0]);
  CHECK(zero.times.bubble_fraction() < one.times.bubble_fraction());
  // As many operations, however they are ordered.
  CHECK(zero.times.busy[0] == Approx(one.times.busy[0]));
}

TEST_CASE("pipeline plan: phases have their own micro-batches") {
  const PipelinePlan plan =
      planned("quickstart",
              {"parallel.pp=2",
               "train.micro_batch_size=1",
               "train.phases=[{until: 100}, {until: 500, global_batch_size: 32}]"});
  REQUIRE(plan.phases.size() == 2);
  CHECK(plan.phases[0].micro_batches == 8);
  CHECK(plan.phases[1].micro_batches == 32);
  CHECK(plan.phases[1].bubble < plan.phases[0].bubble);
}

TEST_CASE("pipeline plan: uneven layers, by cost or as the user says") {
  const PipelinePlan own =
      planned("kimi_linear_48b", {"parallel.pp=4", "parallel.dp=512", "parallel.layers=[7,7,7,6]"});
  CHECK(own.chunks[3].layers == pipeline::LayerRange{21, 27});
  // 27 layers in 16 chunks: uneven, but all of them.
  const PipelinePlan many = planned(
      "kimi_linear_48b",
      {"parallel.pp=8", "parallel.dp=512", "parallel.schedule=zero_bubble", "parallel.chunks=2"});
  CHECK(many.chunks.back().layers.end == 27);
  CHECK(many.chunks.back().rank == 0);
  CHECK(many.chunks[7].sent_bytes == 0);  // the turn of the V
}

TEST_CASE("pipeline plan: what does not fit is refused with the nearest valid values") {
  CHECK(contains(finding("quickstart", {"parallel.pp=5"}),
                 "parallel.pp: 5 stages of 1 chunks need 5 layers or more, but the model has 4. "
                 "Nearest valid: pp 4"));
  CHECK(contains(finding("quickstart", {"parallel.pp=2", "parallel.chunks=2"}),
                 "parallel.chunks: 1f1b holds one chunk per rank"));
  CHECK(contains(finding("quickstart",
                         {"parallel.pp=2", "parallel.chunks=3", "parallel.schedule=zero_bubble"}),
                 "Nearest valid: 2"));
  CHECK(contains(finding("quickstart", {"parallel.pp=2", "parallel.layers=[4]"}),
                 "parallel.layers: 1 entries; allowed: one for each of the 2 chunks"));
  // A split that would lose layers without a word: the sum is compared.
  CHECK(contains(finding("kimi_k3", {"parallel.pp=4", "parallel.layers=[23,23,23,23]"}),
                 "are 92 layers, but the model has 93"));
  CHECK(contains(finding("kimi_k3", {"parallel.pp=90", "parallel.dp=1"}), "too many to plan"));
}

TEST_CASE("pipeline plan: a large one takes a moment") {
  const config::Config config = shipped(
      "kimi_k3",
      {"parallel.pp=16", "parallel.chunks=2", "parallel.schedule=zero_bubble", "parallel.dp=8"});
  const ModelPlan model = make_plan(config);
  const auto begin = std::chrono::steady_clock::now();
  const auto plan = make_pipeline_plan(config, model);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  CHECK(seconds.count() < 5.0);
  REQUIRE(plan.has_value());
  CHECK(plan->schedule.sizes.micro_batches == 1024);
  CHECK(plan->unit_bubble < 0.01);
}
