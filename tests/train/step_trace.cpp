#include "core/train/step_trace.h"

#include <filesystem>
#include <fstream>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include "core/base/error.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {

TEST_CASE("A trace holds every op of a step inside the parts it belongs to, and changes nothing") {
  const auto config = hybrid_config();
  Run plain(config), traced(config);
  const auto file = std::filesystem::temp_directory_path() /
                    ("moesaic-trace-" + std::to_string(getpid())) / "trace" / "step.json";
  const StepStats want = plain.step();
  StepTrace trace(traced.trainer->stream());
  traced.trainer->observe(&trace);
  const StepStats got = traced.step();
  traced.trainer->observe(nullptr);
  trace.write(file.string(), 3);
  CHECK(same_numbers(want, got));
  CHECK(differences(plain.snapshot(), traced.snapshot()).empty());

  const auto events = nlohmann::json::parse(std::ifstream(file)).at("traceEvents");
  struct Part {
    double from, to;
  };
  std::map<std::string, std::vector<Part>> parts;
  int ops = 0, muon = 0;
  for (const auto& e : events) {
    CHECK(e.at("ph") == "X");
    CHECK(e.at("pid") == 3);
    CHECK(e.at("dur").get<double>() >= 0);
    if (e.at("cat") == "part")
      parts[e.at("name")].push_back(
          {e.at("ts").get<double>(), e.at("ts").get<double>() + e.at("dur").get<double>()});
  }
  for (const char* name : {"forward", "backward", "head", "layer 0", "layer 2", "optimizer"})
    CHECK(parts.count(name) == 1);
  CHECK(parts["layer 0"].size() == 2 * parts["forward"].size());  // forward and backward
  for (const auto& e : events) {
    if (e.at("cat") != "op") continue;
    ++ops;
    CHECK(e.at("args").contains("flops"));
    const std::string name = e.at("name");
    const double from = e.at("ts").get<double>();
    const auto inside = [&](const char* part) {
      const auto& list = parts[part];
      return std::any_of(
          list.begin(), list.end(), [&](const Part& p) { return p.from <= from && from <= p.to; });
    };
    if (name == "muon_update" || name == "adamw") CHECK(inside("optimizer"));
    if (name == "kda_chunk_backward") CHECK(inside("backward"));
    muon += name == "muon_update" || name == "adamw";
  }
  CHECK(ops > 50);
  CHECK(muon > 0);
  CHECK_THROWS_AS(trace.write("/dev/null/no/step.json", 0), ResourceError);
  std::filesystem::remove_all(file.parent_path().parent_path());
}

}  // namespace moesaic::test
