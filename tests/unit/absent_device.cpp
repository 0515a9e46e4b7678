#include "memory/device_hooks.h"
#include "memory/stream.h"
#include "tests/support/catch.h"

namespace moesaic {

// True with and without the toolkit, with and without a device: nobody has a thousandth one.
TEST_CASE("A CUDA device that is not there is a usage error that says what to do") {
  constexpr Device kNobody{Device::Kind::cuda, 999};
  const auto message = [](auto&& act) -> std::string {
    try {
      act();
    } catch (const UsageError& e) {
      return e.what();
    }
    return "";
  };
  const std::string stream = message([&] { const Stream s(kNobody, "nobody"); });
  const std::string event = message([&] { const Event e(kNobody); });
  const std::string memory = message([&] { const Buffer b(16, kNobody, "nobody"); });
  for (const auto& text : {stream, event, memory}) {
    INFO(text);
    CHECK(text.find("run.device=cpu") != std::string::npos);
  }
  CHECK(cuda::device_count() >= 0);
}

}  // namespace moesaic
