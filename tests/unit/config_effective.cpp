#include "core/config/fields.h"
#include "tests/support/catch.h"
#include "tests/unit/config_support.h"

using namespace config_tests;
namespace config = moesaic::config;

namespace {

/// The effective configuration without its comments.
std::string values_of(const LoadedConfig& loaded) {
  std::string text = config::effective_yaml(loaded), result;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t end = text.find('\n', i);
    const std::string line = text.substr(i, end - i);
    result += line.substr(0, line.find("  # ")) + "\n";
    i = end + 1;
  }
  return result;
}

const std::vector<std::string> kRich = {
    "model.linear_attn_config={kda_layers: [1], full_attn_layers: [2], num_heads: 2, head_dim: 8, "
    "gate_lower_bound: -5.0}",
    "model.indexer={index_n_heads: 2, index_head_dim: 8, index_topk: 4}",
    "train.phases=[{until: 4, sparse_stage: warmup, lr: 1e-3}, {until: 10, freeze: [\"*.gate.*\", "
    "b], lr_scale: [{pattern: 'a\\b\"c', scale: 0.1}]}]",
    "run.dir=\"runs/a: b # c\"",
    "run.max_minutes=90s",
    "data.valid=[\"null\", \"12\", x/y.txt, \"tab\\there\"]",
    "activations.recompute=[\"*.mlp.*\"]",
    "data.train=[{path: \"a b\", weight: 0.25, format: megatron}, {path: c, weight: 3}]",
    "optimizer.decay_shape=1-sqrt",
    "optimizer.eps=1e-300",
};

}  // namespace

TEST_CASE("config: words of earlier versions are read, and printed as they are called now") {
  const LoadedConfig loaded =
      config::load_config_text(kTiny, "t.yaml", {"optimizer.untouched=decay"});
  CHECK(loaded.config.optimizer.untouched == config::Untouched::dense);
  CHECK(contains(values_of(loaded), "untouched: dense\n"));
}

TEST_CASE("config: the effective configuration loads to the same configuration") {
  for (const auto& overrides : {std::vector<std::string>{}, kRich}) {
    const LoadedConfig first = config::load_config_text(kTiny, "t.yaml", overrides);
    const LoadedConfig second = config::load_config_text(config::effective_yaml(first), "u.yaml");
    CHECK(values_of(first) == values_of(second));
    CHECK(second.config.run.dir == first.config.run.dir);
    CHECK(paths(second.config.data.valid) == paths(first.config.data.valid));
    CHECK(second.config.train.phases.size() == first.config.train.phases.size());
  }
  const LoadedConfig rich = config::load_config_text(kTiny, "t.yaml", kRich);
  const auto& train = rich.config.data.train;
  CHECK((train.size() == 2 && train[0].path == "a b" && train[0].weight == 0.25 &&
         train[1].weight == 3));
  CHECK((train[0].format == config::DataFormat::megatron && !train[1].format));
  CHECK(contains(
      config::effective_yaml(rich),
      "train: [{ path: \"a b\", weight: 0.25, format: megatron }, { path: c, weight: 3 }]"));
  CHECK(rich.config.train.phases[1].lr_scale[0].pattern == "a\\b\"c");
  CHECK(paths(rich.config.data.valid) ==
        std::vector<std::string>{"null", "12", "x/y.txt", "tab\there"});
}

TEST_CASE("config: the effective configuration names the origin of every value") {
  const std::string text = config::effective_yaml(
      config::load_config_text(kTiny, "t.yaml", {"train.steps=20", "data.train[1]=x"}));
  CHECK(contains(text, "  hidden_size: 32  # t.yaml:2:16\n"));
  CHECK(contains(text, "  weight_decay: 0.1  # default\n"));
  CHECK(contains(text, "  steps: 20  # command line\n"));
  CHECK(contains(text, "  train: [data/t.txt, x]  # command line\n"));
  CHECK(contains(text, "  q_lora_rank: null  # default\n"));
  CHECK(contains(text, "  dir: runs/t  # default\n"));
}

TEST_CASE("config: the effective configuration has every key") {
  const std::string text = config::effective_yaml(config::load_config_text(kTiny, "t.yaml", kRich));
  config::walk(config::root_section(), "", [&](const std::string& key, const config::Field& field) {
    if (!field.is_printed || key.starts_with("model.rope_scaling.")) return;
    CAPTURE(key);
    CHECK((contains(text, " " + field.key + ":") || contains(text, "\n" + field.key + ":") ||
           text.starts_with(field.key + ":")));
  });
}
