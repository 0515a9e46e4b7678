// Traces and profiler ranges of a step on a GPU.
#include <filesystem>
#include <fstream>
#include <set>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include "core/train/step_trace.h"
#include "kernels/cuda_handles.h"
#include "tests/support/device_tensors.h"
#include "tests/train/run.h"

namespace moesaic::test {

TEST_CASE("a trace on a GPU has every op's time by the device's clock, inside its part", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  const auto config = hybrid_config({"run.precision=bf16"});
  Run plain(config, nullptr, Stream::Mode::worker, kCuda),
      traced(config, nullptr, Stream::Mode::worker, kCuda);
  const auto file = std::filesystem::temp_directory_path() /
                    ("moesaic-gpu-trace-" + std::to_string(getpid())) / "step.json";
  plain.step();
  traced.step();
  const StepStats want = plain.step();
  StepTrace trace(traced.trainer->stream());
  traced.trainer->observe(&trace);
  traced.trainer->observe_paths(&trace);
  const StepStats got = traced.step();
  traced.trainer->observe(nullptr);
  traced.trainer->observe_paths(nullptr);
  trace.write(file.string(), 0);
  CHECK(same_numbers(want, got));
  CHECK(differences(plain.snapshot(), traced.snapshot()).empty());

  const auto events = nlohmann::json::parse(std::ifstream(file)).at("traceEvents");
  std::filesystem::remove_all(file.parent_path());
  struct Part {
    std::string name;
    double from, to;
  };
  std::vector<Part> parts;
  for (const auto& e : events) {
    const double from = e.at("ts").get<double>(), to = from + e.at("dur").get<double>();
    CHECK(from >= 0);
    CHECK(to >= from);
    if (e.at("cat") == "part") parts.push_back({e.at("name"), from, to});
  }
  std::set<std::string> met;  // parts with ops in them
  int ops = 0, with_path = 0;
  double last = -1;
  for (const auto& e : events) {
    if (e.at("cat") != "op") continue;
    ++ops;
    INFO(e.dump());
    const double from = e.at("ts").get<double>(), to = from + e.at("dur").get<double>();
    CHECK(to > from);     // a kernel takes time, and so do the two events around an empty op
    CHECK(from >= last);  // one stream, in order
    last = from;
    with_path += e.at("args").contains("path");
    for (const Part& p : parts) {
      if (p.from <= from && to <= p.to) met.insert(p.name);
    }
  }
  CHECK(ops > 50);
  CHECK(with_path > 5);
  for (const char* part :
       {"forward", "backward", "layer 0", "layer 1", "layer 2", "head", "optimizer", "balance"}) {
    INFO(part);
    CHECK(met.count(part) == 1);
  }
}

TEST_CASE("profiler ranges on a GPU change nothing", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  const auto config = hybrid_config({"run.precision=bf16"});
  Run plain(config, nullptr, Stream::Mode::worker, kCuda),
      marked(config, nullptr, Stream::Mode::worker, kCuda);
  const auto ranges = cuda::create_nvtx_observer();
  marked.trainer->observe(ranges.get());
  for (int i = 0; i < 2; ++i)
    CHECK(same_numbers(plain.step(), marked.step()));
  marked.trainer->observe(nullptr);
  CHECK(differences(plain.snapshot(), marked.snapshot()).empty());
}

}  // namespace moesaic::test
