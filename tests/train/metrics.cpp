#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>

#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <unistd.h>

#include "core/base/error.h"
#include "core/train/sinks/metrics_file.h"
#include "core/train/sinks/step_line.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

StepRecord record(std::int64_t step) {
  StepRecord r;
  r.step = step;
  r.steps = 2000;
  r.loss = 5.81234;
  r.grad_norm = 1.2034;
  r.learning_rate = 2.4e-4;
  r.tokens = 65536;
  r.seconds = 1.59;
  r.experts = {{1, 1.30, 0}, {2, 1.42, 0}};
  return r;
}

TEST_CASE("the line of a step") {
  StepLines log;
  log.add(record(119));
  log.line();
  log.add(record(120));
  REQUIRE(log.line() ==
          "step 120/2000 | loss 5.8123 | gnorm 1.203 | lr 2.40e-04 | 41.2k tok/s | 1.59 s | moe "
          "max/mean 1.42 | eta 0:49:49");
}

TEST_CASE("fields that do not apply vanish, the first line is marked") {
  StepLines log;
  REQUIRE_THROWS_AS(log.line(), InternalError);
  StepRecord r = record(1);
  r.grad_norm.reset();
  r.experts.clear();
  r.seconds = 60;
  log.add(r);
  REQUIRE(log.line() ==
          "step 1/2000 (warm-up) | loss 5.8123 | lr 2.40e-04 | 1.09k tok/s | 60.00 s");
  r.step = 2000;  // the last one has no remaining time
  r.tokens = 0;
  r.seconds = 0.0123;
  log.add(r);
  REQUIRE(log.line() == "step 2000/2000 | loss 5.8123 | lr 2.40e-04 | 12.3 ms");
}

TEST_CASE("means leave the warm-up out and cover the steps since the last line") {
  StepLines log;
  StepRecord r = record(1);
  r.experts.clear();
  r.steps = 10;
  r.tokens = 100;
  r.seconds = 1000;
  log.add(r);  // no line for it
  for (r.step = 2; r.step <= 4; ++r.step) {
    r.seconds = static_cast<double>(r.step - 1);  // 1 2 3
    log.add(r);
  }
  REQUIRE(log.line() ==
          "step 4/10 | loss 5.8123 | gnorm 1.203 | lr 2.40e-04 | 50 tok/s | 2.00 s | eta 0:00:12");
  r.step = 5;
  r.seconds = 6;
  log.add(r);  // the line has this step alone, the remaining time 4 steps: 1 2 3 6
  REQUIRE(log.line() ==
          "step 5/10 | loss 5.8123 | gnorm 1.203 | lr 2.40e-04 | 17 tok/s | 6.00 s | eta 0:00:15");
  REQUIRE(log.line() ==
          "step 5/10 | loss 5.8123 | gnorm 1.203 | lr 2.40e-04 | 17 tok/s | 6.00 s | eta 0:00:15");
}

TEST_CASE("the remaining time forgets steps older than the last 100") {
  StepLines log;
  StepRecord r = record(1);
  r.seconds = 50;
  for (r.step = 1; r.step <= 1000; ++r.step) {
    r.seconds = r.step <= 900 ? 50 : 2;
    log.add(r);
  }
  const auto line = log.line();
  INFO(line);
  REQUIRE(line.ends_with("| eta 0:33:20"));  // 1000 steps of 2 s
}

TEST_CASE("skipped steps, dead experts and GPUs") {
  StepLines log({.devices = 2, .peak_flops = 1e15});
  StepRecord r = record(7);
  log.add(r);
  r.step = 8;
  r.loss = kNan;
  r.grad_norm = kInf;
  r.skipped = true;
  r.experts[0].dead_experts = 2;
  r.experts[1].dead_experts = 1;
  r.tokens = 100000;
  r.seconds = 2;
  r.flops = 1.2e15;
  r.memory_bytes = INT64_C(71) << 30;
  log.add(r);
  const auto line = log.line();
  INFO(line);
  REQUIRE(line.starts_with(
      "step 8/2000 | loss nan | gnorm inf | lr 2.40e-04 | skipped | 50.0k tok/s (25.0k/gpu) | "
      "300 TF/s/gpu 30.0% | 2.00 s | mem 71.0 GiB | moe max/mean 1.42 dead 3 | eta "));
}

TEST_CASE("counts and durations") {
  REQUIRE(format_count(0) == "0");
  REQUIRE(format_count(950) == "950");
  REQUIRE(format_count(999.4) == "999");
  REQUIRE(format_count(999.6) == "1.00k");
  REQUIRE(format_count(1234) == "1.23k");
  REQUIRE(format_count(41234) == "41.2k");
  REQUIRE(format_count(99960) == "100k");
  REQUIRE(format_count(999900) == "1.00M");
  REQUIRE(format_count(3.1e14) == "310T");
  REQUIRE(format_count(kNan) == "nan");
  REQUIRE(format_duration(0) == "0:00:00");
  REQUIRE(format_duration(-5) == "0:00:00");
  REQUIRE(format_duration(59.6) == "0:01:00");
  REQUIRE(format_duration(2990) == "0:49:50");
  REQUIRE(format_duration(360000) == "100:00:00");
  REQUIRE(format_duration(kInf) == "-");
  REQUIRE(format_duration(kNan) == "-");
  REQUIRE(format_duration(1e300) == "-");
}

TEST_CASE("the JSON of a step") {
  StepRecord r = record(3);
  r.loss_parts = {{"lm", 5.5}, {"mtp", 0.1}};
  r.loss = 1.0 / 3.0;
  const auto plain = json::parse(to_json(r));
  REQUIRE(plain.at("type") == "step");
  REQUIRE(plain.at("step") == 3);
  REQUIRE(plain.at("loss").get<double>() == 1.0 / 3.0);  // every bit
  REQUIRE(plain.at("loss_parts").at("mtp") == 0.1);
  REQUIRE(plain.at("experts").at(1).at("max_over_mean") == 1.42);
  REQUIRE(plain.at("skipped") == false);
  for (const char* absent : {"flops", "memory_bytes", "total_tokens", "non_finite"}) {
    INFO(absent);
    REQUIRE_FALSE(plain.contains(absent));
  }
  r.loss = kNan;
  r.grad_norm = -kInf;
  r.loss_parts["lm"] = kInf;
  r.experts[0].max_over_mean = kNan;
  r.total_tokens = INT64_C(15500000000000);
  const std::string text = to_json(r);
  REQUIRE(text.find('\n') == std::string::npos);
  const auto bad = json::parse(text);
  REQUIRE(bad.at("loss") == "nan");
  REQUIRE(bad.at("grad_norm") == "-inf");
  REQUIRE(bad.at("loss_parts").at("lm") == "inf");
  REQUIRE(bad.at("experts").at(0).at("max_over_mean") == "nan");
  REQUIRE(bad.at("non_finite") == true);
  REQUIRE(bad.at("total_tokens") == INT64_C(15500000000000));
}

std::vector<std::string> lines_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);)
    lines.push_back(line);
  return lines;
}

TEST_CASE("metrics.jsonl: header first, appended on continuation, torn lines closed") {
  const fs::path dir =
      fs::temp_directory_path() / ("moesaic metrics " + std::to_string(::getpid()));
  fs::create_directories(dir);
  const fs::path path = dir / "metrics.jsonl";
  fs::remove(path);
  {
    MetricsFile file(path);
    file.on_header({"abc123", "0.1.0", 4, 0, {{"layout", "dp 4"}}});
    file.on_step(record(1));
    REQUIRE(lines_of(path).size() == 2);  // already in the file, while the writer lives
    file.on_event({"save", 1, {{"seconds", 0.5}, {"worst", kNan}}, {{"path", "step-\xff\"1"}}});
  }
  auto lines = lines_of(path);
  REQUIRE(lines.size() == 3);
  const auto header = json::parse(lines[0]);
  REQUIRE(header.at("type") == "header");
  REQUIRE(header.at("config_hash") == "abc123");
  REQUIRE(header.at("version") == "0.1.0");
  REQUIRE(header.at("ranks") == 4);
  REQUIRE(header.at("start_step") == 0);
  REQUIRE(header.at("layout") == "dp 4");
  REQUIRE(lines[1] == to_json(record(1)));
  REQUIRE(json::parse(lines[2]).at("type") == "save");
  REQUIRE(json::parse(lines[2]).at("worst") == "nan");

  MetricsFile(path).on_header({"abc123", "0.1.0", 2, 1});
  REQUIRE(lines_of(path).size() == 4);                            // no empty line after a whole one
  std::ofstream(path, std::ios::app) << R"({"type":"step","st)";  // a kill in the middle of a line
  {
    MetricsFile file(path);
    file.on_header({"abc123", "0.1.0", 2, 1});
    file.on_step(record(2));
    file.on_end({2, 75, "run.max_minutes is over"});
  }
  lines = lines_of(path);
  REQUIRE(lines.size() == 8);
  REQUIRE(json::parse(lines[3]).at("start_step") == 1);
  REQUIRE_FALSE(json::accept(lines[4]));
  REQUIRE(json::parse(lines[5]).at("type") == "header");
  REQUIRE(json::parse(lines[6]).at("step") == 2);
  const auto stop = json::parse(lines[7]);
  REQUIRE(stop.at("type") == "stop");
  REQUIRE(stop.at("step") == 2);
  REQUIRE(stop.at("exit_code") == 75);
  REQUIRE(stop.at("reason") == "run.max_minutes is over");
  fs::remove_all(dir);
  REQUIRE_THROWS_AS(MetricsFile(path), ResourceError);  // no such folder
}

TEST_CASE("metrics.jsonl: the end is readable after a line that the disk did not take") {
  const fs::path dir =
      fs::temp_directory_path() / ("moesaic full metrics " + std::to_string(::getpid()));
  fs::create_directories(dir);
  const fs::path path = dir / "metrics.jsonl";
  fs::remove(path);
  MetricsFile file(path);
  file.on_step(record(1));
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit full{fs::file_size(path) + 10, before.rlim_max};
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &full) == 0);
  CHECK_THROWS_AS(file.on_step(record(2)), ResourceError);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  std::signal(SIGXFSZ, handler);
  file.on_end({1, 4, "the disk is full"});
  const auto lines = lines_of(path);
  REQUIRE(lines.size() == 3);
  CHECK(lines[1].size() == 10);
  CHECK(json::parse(lines[2]).at("type") == "stop");
  CHECK_THROWS_AS(file.on_step(record(2)), ResourceError);  // closed
  fs::remove_all(dir);
}

}  // namespace
}  // namespace moesaic
