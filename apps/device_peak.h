#pragma once
#include <optional>
#include <string>

#include "core/base/dtype.h"

namespace moesaic::apps {

/// What the speed of a device is held against: MFU = model FLOPs of a step / (its seconds x devices x peak).
struct DevicePeak {
  double tflops = 0;   ///< 10^12 per second; 0: not known, no MFU is shown
  std::string source;  ///< "log.peak_tflops", or whose figure it is; why there is none
};

/// `setting`: log.peak_tflops, which wins. `gpu`: the device's name ("NVIDIA H200"), empty on the CPU. Known are the
/// published dense bf16 peaks of the GPUs that this program runs on; nothing is assumed of other types of numbers.
DevicePeak device_peak(std::optional<double> setting, const std::string& gpu, DType compute);

}  // namespace moesaic::apps
