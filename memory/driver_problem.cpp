#include <fmt/format.h>

#include "memory/device_hooks.h"

namespace moesaic::cuda {

std::string driver_problem(int driver, int runtime) {
  if (driver == 0)
    return "no CUDA driver was found; install NVIDIA's driver ('nvidia-smi' should list the "
           "devices), or use the CPU";
  if (driver / 1000 >= runtime / 1000) return "";
  const auto version = [](int v) { return fmt::format("{}.{}", v / 1000, v % 1000 / 10); };
  return fmt::format(
      "the CUDA driver is too old: it supports CUDA {}, this moesaic was built with {}; install "
      "a newer driver, build with an older toolkit, or use the CPU",
      version(driver),
      version(runtime));
}

}  // namespace moesaic::cuda
