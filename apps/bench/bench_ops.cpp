#include <algorithm>
#include <ostream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/assembly.h"
#include "apps/bench/bench.h"
#include "apps/bench/ceilings.h"
#include "apps/bench/op_cases.h"
#include "apps/bench/timing.h"
#include "apps/path_log.h"
#include "kernels/backend.h"
#include "kernels/ops/op_list.h"
#include "memory/device_hooks.h"

namespace moesaic::bench {
namespace {

constexpr double kSecondsPerCase = 0.15;
constexpr int kLeastCalls = 5;
constexpr std::size_t kRandomScratch = 4096;  // drawing random values takes none

struct Timing {
  double seconds = 0;  // median
  int calls = 0;       // samples
};

Timing time_on_cpu(const OpCase& c, BackendOwner& owner) {
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

// What the cases take from the arena, by a run of their host code alone.
std::size_t scratch_of(const std::vector<OpCase>& cases, const BackendOwner::Options& options) {
  BackendOwner::Options dry = options;
  dry.mode = Stream::Mode::dry;
  dry.scratch_bytes = 0;
  BackendOwner owner(dry);
  for (const OpCase& c : cases)
    c.run(owner.backend());
  return std::max<std::size_t>(owner.scratch().high_water_bytes(), 4096);
}

/// Writes rows as they are measured, or one JSON object at the end.
class Report {
 public:
  Report(const OpsOptions& options, Device device, std::ostream& out)
      : options_(options), on_gpu_(device.kind == Device::Kind::cuda), out_(out) {
    json_["device"] = to_string(device);
    json_["dtype"] = name(options.dtype);
    if (on_gpu_) {
      ceilings_ = measure_ceilings(device);
      json_["device_name"] = cuda::device_name(device);
      json_["copy_bytes_per_second"] = ceilings_.bytes_per_second;
      json_["product_flops_per_second"] = ceilings_.flops_per_second;
      if (!options.json) {
        out << fmt::format(
            "{} on {}; ceilings of this run: copy {:.2f} TB/s (2 GiB, read + written), bf16 "
            "product {:.0f} TFLOP/s (8192^3)\n",
            name(options.dtype),
            cuda::device_name(device),
            ceilings_.bytes_per_second / 1e12,
            ceilings_.flops_per_second / 1e12);
        out << fmt::format("{:<32}{:<44}{:>11}{:>10}{:>10}{:>10}  {}\n",
                           "op",
                           "shape",
                           "median",
                           "TFLOP/s",
                           "GB/s",
                           "ceiling",
                           "path");
      }
      return;
    }
    sgemm_ = library_sgemm_rate();
    json_["threads"] = options.num_threads;
    json_["library_sgemm_flops_per_second"] = sgemm_;
    if (options.json) return;
    out << fmt::format("{}, {} thread(s); library sgemm {:.2f} GFLOP/s (1024^3, one thread)\n",
                       name(options.dtype),
                       options.num_threads,
                       sgemm_ / 1e9);
    out << fmt::format("{:<32}{:<44}{:>11}{:>10}{:>9}{:>10}\n",
                       "op",
                       "shape",
                       "median",
                       "GFLOP/s",
                       "GB/s",
                       "of sgemm");
  }

  void row(const OpCase& c, const Timing& t, const std::string& path) {
    ++rows_;
    const double flops = c.cost.flops / t.seconds, bytes = c.cost.bytes / t.seconds;
    if (options_.json) {
      nlohmann::ordered_json row{{"op", c.op},
                                 {"shape", c.shape},
                                 {"seconds", t.seconds},
                                 {"calls", t.calls},
                                 {"flops", c.cost.flops},
                                 {"bytes", c.cost.bytes}};
      if (on_gpu_) row["share_of_ceiling"] = share_of_ceiling(c.cost, t.seconds, ceilings_);
      if (!path.empty()) row["path"] = path;
      json_["ops"].push_back(row);
    } else if (on_gpu_) {
      out_ << fmt::format("{:<32}{:<44}{:>11}{:>10.1f}{:>10.1f}{:>9.1f}%  {}\n",
                          c.op,
                          c.shape,
                          time_text(t.seconds),
                          flops / 1e12,
                          bytes / 1e9,
                          100 * share_of_ceiling(c.cost, t.seconds, ceilings_),
                          path);
    } else {
      out_ << fmt::format("{:<32}{:<44}{:>11}{:>10.2f}{:>9.2f}{:>9.1f}%\n",
                          c.op,
                          c.shape,
                          time_text(t.seconds),
                          flops / 1e9,
                          bytes / 1e9,
                          100 * flops / sgemm_);
    }
    out_ << std::flush;
  }
  void finish() {
    if (rows_ == 0)
      throw UsageError(fmt::format("--only {}: no case's name contains this", options_.only));
    if (options_.json) out_ << json_.dump(2) << "\n";
  }

 private:
  const OpsOptions& options_;
  bool on_gpu_;
  std::ostream& out_;
  Ceilings ceilings_;
  double sgemm_ = 0;
  int rows_ = 0;
  nlohmann::ordered_json json_;
};

void measure(const std::vector<OpCase>& cases,
             const BackendOwner::Options& options,
             Report& report) {
  if (cases.empty()) return;
  BackendOwner::Options sized = options;
  sized.scratch_bytes = scratch_of(cases, options);
  BackendOwner owner(sized);
  apps::PathLog paths;
  owner.observe_paths(&paths);
  for (const OpCase& c : cases) {
    paths.clear();
    if (options.device == kCpu) {
      report.row(c, time_on_cpu(c, owner), "");
    } else {
      constexpr int kSamples = 30;
      const double seconds =
          device_seconds(owner, c.run, kSamples);  // before its path is asked for
      report.row(c, {seconds, kSamples}, paths.of(c.op));
    }
  }
}

}  // namespace

int bench_ops(const OpsOptions& options, std::ostream& out) {
  const auto names = op_names();
  if (std::none_of(names.begin(), names.end(), [&](const std::string& op) {
        return op.find(options.only) != std::string::npos;
      }))
    throw UsageError(fmt::format("--only {}: no case's name contains this", options.only));
  const Device device = apps::device_from_name(options.device);
  const BackendOwner::Options backend{
      .device = device,
      .mode = device == kCpu ? Stream::Mode::immediate : Stream::Mode::worker,
      .num_threads = options.num_threads,
      .name = "bench",
      .path = options.plain      ? KernelPath::plain
              : options.separate ? KernelPath::separate
                                 : KernelPath::automatic};
  BackendOwner::Options drawing = backend;
  drawing.scratch_bytes = kRandomScratch;
  BackendOwner random(drawing);
  Report report(options, device, out);
  if (device == kCpu) {
    OpCases cases(random.backend(), options.dtype, options.only);
    cases.add_products();
    cases.add_routing();
    cases.add_kda();
    cases.add_attention();
    cases.add_elementwise();
    cases.add_optimizer();
    measure(cases.cases(), backend, report);
  } else {
    for (const OpCases::Group group : OpCases::large_groups()) {
      OpCases cases(random.backend(), options.dtype, options.only);
      (cases.*group)();
      random.stream().synchronize();
      measure(cases.cases(), backend, report);
    }
  }
  report.finish();
  return 0;
}

}  // namespace moesaic::bench
