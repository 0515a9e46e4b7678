#include <algorithm>
#include <ostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/bench/bench.h"
#include "apps/bench/op_cases.h"
#include "apps/bench/timing.h"
#include "kernels/backend.h"

namespace moesaic::bench {
namespace {

constexpr std::size_t kScratchBytes = std::size_t{512} << 20;
constexpr double kSecondsPerCase = 0.15;
constexpr int kLeastCalls = 5;

struct Timing {
  double seconds = 0;  // wall time, median
  int calls = 0;
};

Timing time_case(const OpCase& c, BackendOwner& owner) {
  const auto once = [&] {
    const double start = seconds_now();
    c.run(owner.backend());
    owner.stream().synchronize();
    return seconds_now() - start;
  };
  once();  // warms up
  std::vector<double> times;
  for (double spent = 0; spent < kSecondsPerCase || times.size() < kLeastCalls;
       spent += times.back())
    times.push_back(once());
  return {median(times), static_cast<int>(times.size())};
}

}  // namespace

int bench_ops(const OpsOptions& options, std::ostream& out) {
  OpCases cases(options.dtype, options.only);
  cases.add_products();
  cases.add_routing();
  cases.add_kda();
  cases.add_attention();
  cases.add_elementwise();
  cases.add_optimizer();
  if (cases.cases().empty())
    throw UsageError(fmt::format("--only {}: no case's name contains this", options.only));
  BackendOwner owner({.device = kCpu,
                      .mode = Stream::Mode::immediate,
                      .num_threads = options.num_threads,
                      .scratch_bytes = kScratchBytes,
                      .name = "bench"});
  const double sgemm = library_sgemm_rate();
  nlohmann::ordered_json json;
  json["dtype"] = name(options.dtype);
  json["threads"] = options.num_threads;
  json["library_sgemm_flops_per_second"] = sgemm;
  if (!options.json) {
    out << fmt::format("{}, {} thread(s); library sgemm {:.2f} GFLOP/s (1024^3, one thread)\n",
                       name(options.dtype),
                       options.num_threads,
                       sgemm / 1e9);
    out << fmt::format("{:<32}{:<34}{:>11}{:>10}{:>9}{:>10}\n",
                       "op",
                       "shape",
                       "median",
                       "GFLOP/s",
                       "GB/s",
                       "of sgemm");
  }
  for (const OpCase& c : cases.cases()) {
    const Timing t = time_case(c, owner);
    const double rate = c.cost.flops / t.seconds;
    if (options.json) {
      json["ops"].push_back({{"op", c.op},
                             {"shape", c.shape},
                             {"seconds", t.seconds},
                             {"calls", t.calls},
                             {"flops", c.cost.flops},
                             {"bytes", c.cost.bytes}});
      continue;
    }
    out << fmt::format("{:<32}{:<34}{:>11}{:>10.2f}{:>9.2f}{:>9.1f}%\n",
                       c.op,
                       c.shape,
                       time_text(t.seconds),
                       rate / 1e9,
                       c.cost.bytes / t.seconds / 1e9,
                       100 * rate / sgemm);
  }
  if (options.json) out << json.dump(2) << "\n";
  return 0;
}

}  // namespace moesaic::bench
