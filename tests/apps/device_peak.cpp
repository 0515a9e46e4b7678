// What MFU is held against, and who says so.
#include "apps/device_peak.h"

#include "tests/support/catch.h"

namespace moesaic::apps {

TEST_CASE("the peak of a device: the setting, else the data sheet, else none") {
  const DevicePeak set = device_peak(123.5, "NVIDIA H200", DType::bf16);
  CHECK(set.tflops == 123.5);
  CHECK(set.source == "log.peak_tflops");
  CHECK(device_peak(0.01, "", DType::f32).tflops == 0.01);  // of a rank on the CPU
  const DevicePeak h200 = device_peak(std::nullopt, "NVIDIA H200", DType::bf16);
  CHECK(h200.tflops == 989);
  CHECK(h200.source == "the published dense bf16 peak of NVIDIA H200");
  for (const auto& [name, tflops] : {std::pair<const char*, double>{"NVIDIA H200 NVL", 835},
                                     {"NVIDIA H100 80GB HBM3", 989},
                                     {"NVIDIA H100 PCIe", 756},
                                     {"NVIDIA H100 NVL", 835},
                                     {"NVIDIA GH200 480GB", 989},
                                     {"NVIDIA H20", 148}}) {
    INFO(name);
    CHECK(device_peak(std::nullopt, name, DType::bf16).tflops == tflops);
  }
  const DevicePeak other = device_peak(std::nullopt, "NVIDIA B200", DType::bf16);
  CHECK(other.tflops == 0);
  CHECK(other.source == "no peak is known of NVIDIA B200; set log.peak_tflops");
  CHECK(device_peak(std::nullopt, "NVIDIA H200", DType::f32).tflops == 0);
  CHECK(device_peak(std::nullopt, "", DType::f32).tflops == 0);
}

}  // namespace moesaic::apps
