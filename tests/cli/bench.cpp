#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include <nlohmann/json.hpp>
#include <sys/wait.h>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace {

int run(const std::string& arguments, std::string& output) {
  FILE* pipe = popen((MOESAIC_BINARY " " + arguments + " 2>&1").c_str(), "r");
  REQUIRE(pipe);
  std::array<char, 4096> buffer;
  for (std::size_t n; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;)
    output.append(buffer.data(), n);
  const int status = pclose(pipe);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct StepCost {
  double flops = 0, bytes = 0;  ///< of all ops, per token
  double share = 0;             ///< of the library's rate in the same process, by processor time
};

StepCost quickstart_step(int steps, const std::string& overrides = "") {
  std::string output;
  REQUIRE(run("bench step --json --steps " + std::to_string(steps) +
                  " " MOESAIC_SOURCE_DIR "/configs/quickstart.yaml run.device=cpu " + overrides,
              output) == 0);
  const auto json = nlohmann::json::parse(output);
  StepCost cost;
  for (const auto& op : json["ops"]) {
    cost.flops += op["flops"].get<double>() / json["tokens_per_step"].get<double>();
    cost.bytes += op["bytes"].get<double>() / json["tokens_per_step"].get<double>();
  }
  cost.share = json["share_of_sgemm"].get<double>();
  return cost;
}

}  // namespace

// docs/benchmarks.md, "A guard". Whoever makes a step do other work on purpose writes the new numbers here.
TEST_CASE("cli: a training step does the work it did, at the share of the library's rate it had") {
  constexpr double kFlops = 14.450e6, kBytes = 701.5e3;  // per token
  constexpr double kShare = 0.47;                        // docs/benchmarks.md
  StepCost cost = quickstart_step(3);
  CHECK(cost.flops == Approx(kFlops).epsilon(0.03));
  CHECK(cost.bytes == Approx(kBytes).epsilon(0.03));
  CHECK(quickstart_step(1, "'activations.recompute=[full]'").flops > 1.03 * kFlops);  // is seen
  std::string version;
  run("--version", version);
  if (!contains(version, "build Release")) return;  // nothing is known about other builds
  for (int again = 0; again < 2 && cost.share < kShare / 1.5; ++again)
    cost.share = std::max(cost.share, quickstart_step(3).share);
  CHECK(cost.share > kShare / 1.5);
}

TEST_CASE("cli: bench ops in every type") {
  for (const std::string dtype : {"f32", "bf16", "f64"}) {
    std::string output;
    CHECK(run("bench ops --only rms_norm --dtype " + dtype, output) == 0);
    CHECK(contains(output, dtype + ", 1 thread"));
    CHECK(contains(output, "gated_rms_norm_backward"));
    CHECK(!contains(output, "adamw"));
  }
  std::string output;
  CHECK(run("bench ops --only grouped_glu_forward", output) == 0);
  CHECK(contains(output, "grouped_glu_forward"));
  CHECK(!contains(output, "backward"));
  output.clear();
  CHECK(run("bench ops --only no_such_op", output) == 2);
  CHECK(contains(output, "no case's name contains this"));
}

TEST_CASE("cli: bench step shows every kind of op that ran") {
  std::string output;
  const std::string config = MOESAIC_SOURCE_DIR "/configs/quickstart.yaml";
  CHECK(run("bench step --steps 1 --json " + config +
                " train.global_batch_size=1 train.micro_batch_size=1 data.sequence_length=64",
            output) == 0);
  for (const std::string part : {"\"tokens_per_step\": 64",
                                 "\"kda_chunk_backward\"",
                                 "\"muon_update\"",
                                 "\"share_of_sgemm\""}) {
    CAPTURE(part);
    CHECK(contains(output, part));
  }
  output.clear();
  CHECK(run("bench step --steps 5000 " + config, output) == 2);
  CHECK(contains(output, "train.steps is 500"));
}

TEST_CASE(
    "cli: bench step takes the memory that was planned, whatever is recomputed or offloaded") {
  const std::string step = "bench step --steps 1 " MOESAIC_SOURCE_DIR
                           "/configs/quickstart.yaml run.device=cpu train.global_batch_size=1 "
                           "train.micro_batch_size=1 data.sequence_length=256 ";
  std::map<std::string, double> planned;
  for (const std::string keys : {"activations.recompute=full",
                                 "activations.recompute=selective",
                                 "activations.recompute=none",
                                 "experts.offload=full parallel.order=vertical"}) {
    CAPTURE(keys);
    std::string output;
    REQUIRE(run(step + "--json " + keys, output) == 0);
    const auto json = nlohmann::json::parse(output);
    planned[keys] = json["planned_bytes"].get<double>();
    CHECK(json["counted_bytes"].get<double>() == Approx(planned[keys]).epsilon(0.01));
  }
  CHECK(planned["activations.recompute=full"] < planned["activations.recompute=selective"]);
  CHECK(planned["activations.recompute=selective"] < planned["activations.recompute=none"]);
  std::string output;
  CHECK(run(step, output) == 0);
  CHECK(contains(output, "memory           planned "));
  CHECK(contains(output, " MiB; as buffers count "));
}

TEST_CASE("cli: bench cache-sim plays made-up and written logs alike, and bounds every policy") {
  const moesaic::test::TemporaryFolder folder("cache_sim");
  std::filesystem::create_directories(folder.path());
  const std::string log = (folder.path() / "touches.jsonl").string();
  const std::string common = " --expert-bytes 33MiB --budget 20%,2GiB --json";
  std::string made, read;
  CHECK(run("bench cache-sim --layers 6 --experts 32 --top-k 4 --tokens 16 --zipf 1 --steps 6 "
            "--updates "
            "touched --state-bytes 1GB --host-budget 50% --seed 7 --write-log " +
                log + common,
            made) == 0);
  CHECK(run("bench cache-sim --seed 7 --host-budget 50% --log " + log + common, read) == 0);
  auto a = nlohmann::json::parse(made), b = nlohmann::json::parse(read);
  CHECK(a["log"].is_null());
  CHECK(b["log"] == log);
  a.erase("log");
  b.erase("log");
  CHECK(a == b);
  CHECK(a["budgets"][1]["slots"] == 62);  // 2048 / 33
  CHECK(a["experts_in_file"] == 96);
  for (const auto& budget : a["budgets"]) {
    REQUIRE(budget["policies"].size() == 5);
    const auto& bound = budget["policies"][4];
    for (const auto& p : budget["policies"]) {
      CHECK(p["hits"] <= bound["hits"]);
      CHECK(p["up_bytes_per_step"].get<double>() >= bound["up_bytes_per_step"].get<double>());
      const double most =
          std::max(p["up_bytes_per_step"].get<double>(), p["down_bytes_per_step"].get<double>());
      CHECK(p["link_seconds_per_step"].get<double>() == Approx(most / 50e9));
    }
    CHECK(budget["policies"][0]["hits"] > budget["policies"][1]["hits"]);  // sched, lru
  }
  std::string text;
  CHECK(run("bench cache-sim --steps 3 --budget 25% --policy sched", text) == 0);
  CHECK(contains(text, "25%         384  sched    25.0"));
  CHECK(contains(text, "sched names 100.0 %"));
  for (const auto& [arguments, message] : {std::pair{"--budget 2GiB", "give --expert-bytes"},
                                           {"--budget 101%", "0% to 100%"},
                                           {"--budget 24", "has no unit"},
                                           {"--top-k 65", "among --experts 64 different ones"},
                                           {"--steps 4 --warm-up 4", "at least one must count"},
                                           {"--log touches.jsonl --zipf 1", "excludes"},
                                           {"--link 0", "are above 0"}}) {
    std::string output;
    INFO(arguments);
    CHECK(run(std::string("bench cache-sim ") + arguments, output) == 2);
    CHECK(contains(output, message));
  }
  std::string output;
  std::ofstream(log, std::ios::app) << "{\"step\":99}\n";
  CHECK(run("bench cache-sim --log " + log, output) == 3);
  CHECK(contains(output, log + ":"));
}
