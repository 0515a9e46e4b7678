// What a run tells of its offloaded experts.
#include <chrono>
#include <fstream>
#include <iterator>

#include <nlohmann/json.hpp>

#include "core/train/sinks/metrics_file.h"
#include "core/train/sinks/prometheus.h"
#include "core/train/sinks/step_line.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace moesaic;

namespace {

StepRecord record_with_tiers() {
  StepRecord record;
  record.step = 7;
  record.tiers["weights"] = {.uses = 200,
                             .hits = 50,
                             .bytes_up = std::int64_t{3} << 30,
                             .bytes_down = std::int64_t{1} << 30};
  record.tiers["states"] = {.uses = 100,
                            .hits = 0,
                            .bytes_up = std::int64_t{5} << 30,
                            .bytes_down = std::int64_t{5} << 30,
                            .file_read = std::int64_t{2} << 30,
                            .file_written = std::int64_t{2} << 30,
                            .host_waits = 3,
                            .host_wait_seconds = 0.25};
  return record;
}

}  // namespace

TEST_CASE("offload metrics: as metrics.jsonl tells them") {
  StepRecord record = record_with_tiers();
  auto json = nlohmann::json::parse(offload_to_json(record));
  CHECK(json["type"] == "offload");
  CHECK(json["step"] == 7);
  CHECK(json["weights"]["uses"] == 200);
  CHECK(json["weights"]["hits"] == 50);
  CHECK(json["states"]["bytes_down"] == std::int64_t{5} << 30);
  CHECK(json["states"]["file_bytes_read"] == std::int64_t{2} << 30);
  CHECK(json["states"]["host_wait_seconds"] == 0.25);
  CHECK_FALSE(json.contains("layers"));
  CHECK_FALSE(json.contains("replays"));
  record.replays = ExpertReplays{12, 40};
  record.tier_layers = {{.layer = 1, .traffic = {.uses = 8, .hits = 2}},
                        {.layer = 4, .traffic = {.uses = 9, .bytes_up = 12}}};
  json = nlohmann::json::parse(offload_to_json(record));
  CHECK(json["replays"] == 12);
  CHECK(json["steps_replayed"] == 40);
  CHECK(json["layers"] == nlohmann::json::array({1, 4}));
  CHECK(json["layer_uses"] == nlohmann::json::array({8, 9}));
  CHECK(json["layer_hits"] == nlohmann::json::array({2, 0}));
  CHECK(json["layer_bytes_up"] == nlohmann::json::array({0, 12}));
  CHECK(offload_to_json(StepRecord{}).empty());
}

TEST_CASE("offload metrics: as the console tells them") {
  StepLines lines;
  StepRecord record = record_with_tiers();
  lines.add(record);
  CHECK(lines.detail_lines() ==
        std::vector<std::string>{"offload hits states 0.0% weights 25.0% | up 8.00 GiB, down 6.00 "
                                 "GiB | file read 2.00 GiB, written 2.00 GiB | host waited 0.25 s "
                                 "(3 time(s))"});
  record.tiers.erase("states");
  record.tiers["weights"].host_waits = 1;
  record.tiers["weights"].host_wait_seconds = 0.002;
  record.replays = ExpertReplays{12, 40};
  record.tier_layers = {{.layer = 1, .traffic = {.host_wait_seconds = 0.0005}},
                        {.layer = 4, .traffic = {.host_wait_seconds = 0.0015}}};
  lines.add(record);
  CHECK(lines.detail_lines() ==
        std::vector<std::string>{
            "offload hits weights 25.0% | up 3.00 GiB, down 1.00 GiB | "
            "replays 12 of 40 step(s) | host waited 2.0 ms (1 time(s)), 1.5 ms in layer 4"});
}

TEST_CASE("offload metrics: as Prometheus reads them") {
  const test::TemporaryFolder folder("tier_metrics");
  const auto path = folder.path() / "metrics.prom";
  std::filesystem::create_directories(folder.path());
  PrometheusFile file(
      {.path = path, .run = "r", .disk = folder.path(), .interval = std::chrono::milliseconds(0)});
  StepRecord record = record_with_tiers();
  record.replays = ExpertReplays{12, 40};
  file.on_step(record);
  std::ifstream in(path);
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  CAPTURE(text);
  for (const char* line : {"moesaic_offload_hit_ratio{run=\"r\",kind=\"weights\"} 0.25",
                           "moesaic_offload_bytes{run=\"r\",way=\"up\"} 8589934592",
                           "moesaic_offload_bytes{run=\"r\",way=\"file_written\"} 2147483648",
                           "moesaic_offload_host_wait_seconds{run=\"r\"} 0.25",
                           "moesaic_offload_replays{run=\"r\"} 12",
                           "moesaic_offload_steps_replayed{run=\"r\"} 40"})
    CHECK(text.find(line) != std::string::npos);
}
