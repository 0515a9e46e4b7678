#include "apps/bench/link_rates.h"

#include <vector>

#include "apps/bench/timing.h"
#include "memory/buffer.h"
#include "memory/stream.h"

namespace moesaic::bench {

LinkRates measure_links(Device device) {
  const std::int64_t bytes = std::int64_t{1} << (device.kind == Device::Kind::cuda ? 30 : 26);
  constexpr int kRounds = 5;
  const Buffer host_up = make_host_buffer(bytes, device, "link rates"),
               host_down = make_host_buffer(bytes, device, "link rates"),
               device_up(bytes, device, "link rates"), device_down(bytes, device, "link rates");
  Stream up(device, "link up"), down(device, "link down");
  const auto view = [bytes](const Buffer& b) { return b.view({bytes}, DType::u8); };
  const auto seconds = [&](bool goes_up, bool goes_down) {
    std::vector<double> times;
    for (int i = 0; i <= kRounds; ++i) {
      const double start = seconds_now();
      if (goes_up) copy_tensor(view(device_up), view(host_up), up);
      if (goes_down) copy_tensor(view(host_down), view(device_down), down);
      up.synchronize();
      down.synchronize();
      if (i > 0) times.push_back(seconds_now() - start);  // the first one warms up
    }
    return median(times);
  };
  const auto rate = [&](double s) { return static_cast<double>(bytes) / s; };
  LinkRates rates;
  rates.up = rate(seconds(true, false));
  rates.down = rate(seconds(false, true));
  rates.up_both = rates.down_both = rate(seconds(true, true));
  return rates;
}

}  // namespace moesaic::bench
