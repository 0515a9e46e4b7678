#include <algorithm>
#include <array>

#include "apps/bench/bench.h"

namespace moesaic::bench {

config::LoadedConfig load_without_data(const std::string& path,
                                       std::vector<std::string> overrides) {
  // Data must have a name, and something must be there to evaluate on.
  constexpr std::array kOurs{"data.train=random-tokens", "train.eval_every=0"};
  for (const std::string ours : kOurs) {
    const std::string key = ours.substr(0, ours.find('=') + 1);
    std::erase_if(overrides, [&](const std::string& theirs) { return theirs.rfind(key, 0) == 0; });
    overrides.push_back(ours);
  }
  return config::load_config(path, overrides);
}

}  // namespace moesaic::bench
