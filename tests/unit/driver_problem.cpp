// What a user reads whose machine has no driver, or one older than the toolkit of the build.
#include <string>

#include "memory/device_hooks.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("no driver and an old driver are told apart, with what to do") {
  const std::string none = cuda::driver_problem(0, 13000);
  CHECK(says(none, "no CUDA driver was found"));
  CHECK(says(none, "install NVIDIA's driver"));
  const std::string old = cuda::driver_problem(12080, 13000);
  CHECK(says(old, "it supports CUDA 12.8"));
  CHECK(says(old, "built with 13.0"));
  CHECK(says(old, "install a newer driver"));
  CHECK(cuda::driver_problem(13000, 13010).empty());  // minor versions of one major work together
  CHECK(cuda::driver_problem(14000, 13000).empty());
}

}  // namespace moesaic::test
