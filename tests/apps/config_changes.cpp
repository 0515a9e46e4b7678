// Which keys of a configuration changed, as a resumed run tells them.
#include "apps/config_changes.h"

#include "apps/saved_config.h"
#include "tests/support/catch.h"

namespace moesaic::apps {
namespace {

const std::string kTiny = R"(model:
  hidden_size: 32
  num_hidden_layers: 2
  vocab_size: 256
  intermediate_size: 64
  num_attention_heads: 2
  kv_lora_rank: 16
  qk_nope_head_dim: 8
  v_head_dim: 8
data: {train: t.txt, sequence_length: 64}
train: {steps: 10, global_batch_size: 4}
optimizer: {lr: 1e-3}
)";

std::string lines(const std::vector<ConfigChange>& changes) {
  std::string text;
  for (const ConfigChange& c : changes)
    text += c.key + ": " + c.before + " -> " + c.after + "\n";
  return text;
}

config::LoadedConfig loaded(const std::vector<std::string>& overrides = {}) {
  return config::load_config_text(kTiny, "tiny.yaml", overrides);
}

// The text without the line of this key.
std::string without(std::string yaml, const std::string& line) {
  const auto at = yaml.find("\n  " + line);
  REQUIRE(at != std::string::npos);
  return yaml.erase(at + 1, yaml.find('\n', at + 1) - at);
}

TEST_CASE("config changes: an absent key and one that is null have the same value") {
  const std::string with = "a:\n  x: null\n  y: 1\n", bare = "a:\n  y: 1\n";
  CHECK(lines(config_changes(with, bare)).empty());
  CHECK(lines(config_changes(bare, with)).empty());
  CHECK(lines(config_changes(bare, "a:\n  x: 2\n  y: 1\n")) == "a.x: absent -> 2\n");
  CHECK(lines(config_changes("a:\n  x: 2\n  y: 1\n", with)) == "a.x: 2 -> null\n");
  CHECK(lines(config_changes("a:\n  x: 2\n  y: 1\n", bare)) == "a.x: 2 -> absent\n");
  // A group that comes, or goes, is told by its keys.
  CHECK(lines(config_changes(with, "a:\n  x:\n    z: 3\n  y: 1\n")) == "a.x.z: absent -> 3\n");
  CHECK(config_values(with).size() == 2);
}

TEST_CASE("config changes: what an earlier version did not know had its default") {
  const std::string saved = config::effective_yaml(loaded());
  CHECK(lines(changes_since(saved, loaded())).empty());
  std::string older = without(saved, "touch_log:");
  older = without(older, "watchdog_s:");
  CHECK(lines(changes_since(older, loaded())).empty());
  CHECK(lines(changes_since(older, loaded({"comm.watchdog_s=60"}))) ==
        "comm.watchdog_s: 120 -> 60\n");
  CHECK(lines(changes_since(saved, loaded({"memory.host_budget=1GiB"}))) ==
        "memory.host_budget: null -> 1GiB\n");
  // A word of an earlier version.
  std::string decay = saved;
  const std::string now = "untouched: dense";
  decay.replace(decay.find(now), now.size(), "untouched: decay");
  CHECK(lines(changes_since(decay, loaded())).empty());
  // What cannot be read any more is compared as it stands.
  const std::string gone = saved + "gone: {key: 1}\n";
  CHECK(lines(changes_since(gone + "more:\n  key: 1\n", loaded())) ==
        "gone: {key: 1} -> absent\nmore.key: 1 -> absent\n");
}

}  // namespace
}  // namespace moesaic::apps
