// Configurations. Accepted ⇒ what `effective_yaml` prints loads again and means the same.
#include "core/config/load.h"
#include "tests/fuzz/fuzz.h"

using namespace moesaic;

namespace {

// Every value, without the comments that say where it is from.
std::string values_of(config::LoadedConfig loaded) {
  loaded.origins.clear();
  return effective_yaml(loaded);
}

}  // namespace

MOESAIC_FUZZ_TARGET(yaml) {
  if (input.find("base") != std::string_view::npos) return;  // opens other files
  config::LoadedConfig loaded;
  if (!fuzz::accepts([&] { loaded = config::load_config_text(input, "fuzz.yaml"); })) return;
  const std::string text = effective_yaml(loaded);
  config::LoadedConfig again;
  fuzz::require(fuzz::accepts([&] { again = config::load_config_text(text, "fuzz.yaml"); }),
                "a printed configuration loads");
  fuzz::require(values_of(loaded) == values_of(again), "a printed configuration means the same");
}
