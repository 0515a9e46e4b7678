#include "apps/device_peak.h"

#include <fmt/format.h>

namespace moesaic::apps {
namespace {

struct Known {
  const char* name;  // part of what the driver calls it
  double bf16_tflops;
};

// Compute capability 9.0, without sparsity, from NVIDIA's data sheets. The first that fits counts.
constexpr Known kKnown[] = {
    {"H200 NVL", 835},
    {"H200", 989},
    {"H100 NVL", 835},
    {"H100 PCIe", 756},
    {"H100", 989},
    {"H800 PCIe", 756},
    {"H800", 989},
    {"GH200", 989},
    {"H20", 148},
};

}  // namespace

DevicePeak device_peak(std::optional<double> setting, const std::string& gpu, DType compute) {
  if (setting) return {*setting, "log.peak_tflops"};
  if (gpu.empty()) return {0, "log.peak_tflops is not set"};
  if (compute != DType::bf16)
    return {0,
            fmt::format("no peak is known of {} on {}; set log.peak_tflops", name(compute), gpu)};
  for (const Known& known : kKnown) {
    if (gpu.find(known.name) != std::string::npos)
      return {known.bf16_tflops, fmt::format("the published dense bf16 peak of {}", gpu)};
  }
  return {0, fmt::format("no peak is known of {}; set log.peak_tflops", gpu)};
}

}  // namespace moesaic::apps
