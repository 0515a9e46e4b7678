#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include "tests/support/catch.h"
#include "tests/unit/config_support.h"

using namespace config_tests;
namespace config = moesaic::config;

namespace {

/// Files in a folder of their own, removed at the end.
class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / ("moesaic_config_" + name)) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string write(const std::string& name, const std::string& text) {
    const auto path = path_ / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return path.string();
  }

 private:
  std::filesystem::path path_;
};

std::string failure(const std::string& path, const std::vector<std::string>& overrides = {}) {
  try {
    config::load_config(path, overrides);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("config: a small file loads, the rest has defaults") {
  const LoadedConfig loaded = config::load_config_text(kTiny, "conf/t.yaml");
  CHECK(loaded.config.model.hidden_size == 32);
  CHECK(loaded.config.optimizer.lr == 1e-3);
  CHECK(loaded.config.optimizer.weight_decay == 0.1);
  CHECK(paths(loaded.config.data.train) == std::vector<std::string>{"data/t.txt"});
  CHECK(loaded.config.run.dir == "runs/t");
  CHECK_FALSE(loaded.config.model.indexer);
  CHECK(to_string(loaded.origin("model.hidden_size")) == "conf/t.yaml:2:16");
  CHECK(to_string(loaded.origin("optimizer.weight_decay")) == "default");
}

TEST_CASE("config: all problems of a file are reported in one run, in order, with positions") {
  const std::string report = report_of(R"(model:
  hidden_size: 010
  num_hidden_layers: 0x2
  vocab_size: "256"
  tie_word_embeddings: yes
  rms_norm_eps: 1e-400
  hiden_size: 3
  num_experts: -1
data:
  train: t.txt
  sequence_length: 1e3.5
train: {steps: 1.5, global_batch_size: 5_000_000_000_000_000_000_0, steps: 3}
optimizer:
  lr: .nan
  name: adam
  weight_decay:
trian: {}
)");
  CHECK(
      report ==
      "t.yaml:2:16 model.hidden_size: found 010: leading zeros are not accepted (some readers take "
      "them as octal); write 10; allowed: an integer, at least 1, at most 1048576\n"
      "t.yaml:3:22 model.num_hidden_layers: found 0x2: write it in decimal; allowed: an integer, "
      "at least 1, at most 16384\n"
      "t.yaml:4:15 model.vocab_size: found \"256\": a quoted value is a text; remove the quotes; "
      "allowed: an integer, at least 1, at most 1073741824\n"
      "t.yaml:5:24 model.tie_word_embeddings: found yes: write true; allowed: true or false\n"
      "t.yaml:6:17 model.rms_norm_eps: found 1e-400: beyond the range of f64 (it would become 0 or "
      "infinity); allowed: a number, above 0\n"
      "t.yaml:7:3 model.hiden_size: unknown key; did you mean model.hidden_size?\n"
      "t.yaml:8:16 model.num_experts: found -1: out of range; allowed: an integer, at least 0, at "
      "most 1048576\n"
      "t.yaml:11:20 data.sequence_length: found 1e3.5; allowed: an integer, at least 1, at most "
      "1073741824\n"
      "t.yaml:12:16 train.steps: found 1.5: not a whole number; allowed: an integer, at least 1, "
      "at most 1099511627776\n"
      "t.yaml:12:40 train.global_batch_size: found 5_000_000_000_000_000_000_0: too large for a "
      "64-bit integer; allowed: an integer, at least 1, at most 1099511627776\n"
      "t.yaml:12:69 train.steps: given twice in this file; the first is in line 12\n"
      "t.yaml:14:7 optimizer.lr: found .nan: must be finite; allowed: a number, above 0\n"
      "t.yaml:15:9 optimizer.name: found adam: did you mean adamw?; allowed: one of: adamw, muon\n"
      "t.yaml:16:3 optimizer.weight_decay: found no value: remove the key to get its default; "
      "allowed: a number, at least 0\n"
      "t.yaml:17:1 trian: unknown key; did you mean train?\n");
}

TEST_CASE("config: the error carries exit code 2 and a count") {
  try {
    config::load_config_text("model: {}\n", "t.yaml");
    FAIL("loaded");
  } catch (const moesaic::UsageError& error) {
    CHECK(error.exit_code() == moesaic::ExitCode::usage);
    CHECK(contains(error.what(), "8 problems in the configuration; nothing was started"));
  }
}

TEST_CASE("config: missing required keys name the section's position") {
  const std::string report = report_of("model: {hidden_size: 8}\ndata: {train: x}\n");
  CHECK(contains(report, "t.yaml:1:1 model.num_hidden_layers: is required; allowed: an integer"));
  CHECK(contains(report, "t.yaml:2:1 data.sequence_length: is required"));
  CHECK(contains(report, "t.yaml:1:1 optimizer.lr: is required"));
  CHECK(contains(report_of(""), "t.yaml:1:1 model.hidden_size: is required"));
}

TEST_CASE("config: wrong shapes") {
  CHECK(contains(report_of("model: 3\n"), "t.yaml:1:8 model: found 3; allowed: a group of keys"));
  CHECK(contains(report_of("model: [1]\n"), "model: found a list; allowed: a group of keys"));
  CHECK(contains(report_of("- a\n"), "t.yaml:1:1 found a list; allowed: a group of keys"));
  CHECK(contains(report_of("run:\n"), "t.yaml:1:1 run: has no keys"));
  CHECK(contains(report_of("model: {hidden_size: [1, 2]}\n"),
                 "t.yaml:1:22 model.hidden_size: found a list; allowed: an integer"));
  CHECK(contains(
      report_of("train: {phases: {until: 3}}\n"),
      "train.phases: found a group of keys: write a list of groups, [{…}, {…}]; allowed: a list"));
  CHECK(contains(report_of("log: {trace_steps: 10}\n"),
                 "log.trace_steps: found 10: write it as a list, [10]; allowed: a list"));
  CHECK(contains(report_of("log: {trace_steps: {a: 1}}\n"),
                 "log.trace_steps: found a group of keys: write a list of values, [value, value]"));
  CHECK(
      contains(report_of("log: {trace_steps: '10'}\n"), "log.trace_steps: found \"10\"; allowed"));
  CHECK(contains(
      report_of("train: {phases: [{until: 3, unti: 4}]}\n"),
      "t.yaml:1:29 train.phases[0].unti: unknown key; did you mean train.phases[0].until?"));
  // A section is not what a key of the same name elsewhere was meant to be.
  CHECK(contains(report_of("train: {phases: [{until: 2, data: x}]}\n"),
                 "train.phases[0].data: unknown key (data is a section of its own, beside train); "
                 "known here: until, "));
  CHECK(contains(report_of("model: {optimizer: {lr: 1}}\n"),
                 "model.optimizer: unknown key (optimizer is a section of its own, beside model); "
                 "'moesaic explain model' lists the keys"));
  CHECK(contains(report_of("model: {linear_attn_config: {kda_layers: [1, x]}}\n"),
                 "model.linear_attn_config.kda_layers[1]: found x; allowed: an integer"));
  CHECK(contains(report_of("data: {train: ''}\n"), "data.train: found \"\": must not be empty"));
}

TEST_CASE("config: unknown keys lead to the right one") {
  CHECK(contains(report_of("model: {n_routed_experts: 8}\n"),
                 "unknown key; it is called model.num_experts here"));
  CHECK(contains(report_of("model: {num_experts_per_tok: 8}\n"),
                 "it is called model.num_experts_per_token here"));
  CHECK(contains(report_of("model: {n_shared_experts: 8}\n"),
                 "it is called model.num_shared_experts here"));
  CHECK(contains(report_of("model: {n_group: 8}\n"), "it is called model.num_expert_group here"));
  CHECK(contains(report_of("model: {scoring_func: softmax}\n"),
                 "it is called model.moe_router_activation_func here"));
  CHECK(contains(report_of("model: {norm_topk_prob: true}\n"),
                 "it is called model.moe_renormalize here"));
  CHECK(contains(report_of("model: {index_topk: 8}\n"), "did you mean model.indexer.index_topk?"));
  CHECK(contains(report_of("train: {weight_decay: 8}\n"), "did you mean optimizer.weight_decay?"));
  CHECK(contains(report_of("train: {learning_rate: 8}\n"), "did you mean optimizer.lr?"));
  CHECK(contains(report_of("seed: 8\n"), "did you mean run.seed?"));
  CHECK(contains(
      report_of("comm: {zzzzzz: 8}\n"),
      "unknown key; known here: ranks_per_node, watchdog_s, first_step_s, reduction, share_gpu"));
  CHECK(contains(report_of("model: {zzzzzz: 8}\n"), "'moesaic explain model' lists the keys"));
  CHECK(contains(report_of("model: {<<: {a: 1}}\n"), "merge keys are not accepted"));
}

TEST_CASE("config: overrides are typed by the key") {
  const LoadedConfig loaded = config::load_config_text(
      kTiny,
      "t.yaml",
      {"train.steps=1e3",
       "optimizer.lr=1",
       "model.model_type=on",
       "data.train=[a, \"b c\"]",
       "run.max_minutes=2h",
       "model.q_lora_rank=null",
       "model.indexer={index_n_heads: 2, index_head_dim: 8, index_topk: 4}",
       "model.indexer.kl_weight=0.5",
       "run.dir=runs/x=y"});
  CHECK(loaded.config.train.steps == 1000);
  CHECK(loaded.config.optimizer.lr == 1.0);
  CHECK(loaded.config.model.model_type == "on");
  CHECK(paths(loaded.config.data.train) == std::vector<std::string>{"a", "b c"});
  CHECK(loaded.config.run.max_minutes == 120.0);
  CHECK(loaded.config.model.indexer->index_topk == 4);
  CHECK(loaded.config.model.indexer->kl_weight == 0.5);
  CHECK(loaded.config.run.dir == "runs/x=y");
  CHECK(to_string(loaded.origin("train.steps")) == "command line");
}

TEST_CASE("config: overrides of list items") {
  const std::string text = kTiny + "log: {interval: 2}\n";
  CHECK(paths(config::load_config_text(text, "t.yaml", {"data.train[0]=x"}).config.data.train) ==
        std::vector<std::string>{"x"});
  CHECK(paths(config::load_config_text(text, "t.yaml", {"data.train[1]=x"}).config.data.train) ==
        std::vector<std::string>{"data/t.txt", "x"});
  const LoadedConfig phased = config::load_config_text(
      text, "t.yaml", {"train.phases[0]={until: 5}", "train.phases[1].until=10"});
  REQUIRE(phased.config.train.phases.size() == 2);
  CHECK(phased.config.train.phases[1].until == 10);
  CHECK(contains(
      report_of(text, {"data.train[3]=x"}),
      "command line: data.train[3]: the list has 1 entries; allowed: an index from 0 to 1"));
}

TEST_CASE("config: overrides that are refused") {
  CHECK(contains(report_of_override("train.stepz=3"),
                 "command line: train.stepz: unknown key; did you mean train.steps?"));
  CHECK(contains(report_of_override("steps=3"),
                 "command line: steps: unknown key; did you mean train.steps"));
  CHECK(contains(report_of_override("train.steps=010"), "command line: train.steps: found 010"));
  CHECK(contains(report_of_override("run.seed="), "command line: run.seed: found no value"));
  CHECK(contains(report_of_override("train.steps"),
                 "'train.steps' is not of the form section.key=value"));
  CHECK(contains(report_of_override("train..steps=1"), "is not of the form"));
  CHECK(contains(report_of_override("train.phases[x].until=1"), "is not of the form"));
  CHECK(contains(report_of_override("data.train[99999999999999999999]=1"), "is not of the form"));
  CHECK(contains(report_of_override("run.dir=[a"), "quote a text with special characters"));
  CHECK(contains(report_of_override("base=x.yaml"), "can only be set in a file"));
  CHECK(contains(report_of_override("train=3"), "train: found 3; allowed: a group of keys"));
  CHECK(contains(report_of_override("train.steps.x=3"), "train.steps: found a group of keys"));
}

TEST_CASE("config: one key, two different arguments") {
  const auto report = [](std::vector<std::string> arguments) {
    return report_of(kTiny, arguments);
  };
  CHECK(report({"train.steps=3", "train.steps=3"}).empty());
  CHECK(
      contains(report({"train.steps=3", "train.steps=4"}),
               "command line: train.steps: set twice on the command line, with different values"));
  CHECK(contains(report({"train={steps: 3}", "train.steps=4"}), "set twice"));
  CHECK(contains(report({"model.indexer=null", "model.indexer.index_topk=4"}), "set twice"));
  CHECK(contains(report({"data.train=[a, b]", "data.train=[a]"}), "set twice"));
  CHECK(contains(report({"data.train=[a, b]", "data.train[0]=c"}), "set twice"));
}

TEST_CASE("config: base files lie under the file, in order, and keep their positions") {
  Folder folder("base");
  folder.write("tiny.yaml", kTiny);
  folder.write(
      "parts/more.yaml",
      "base: ../tiny.yaml\ntrain: {steps: 20, eval_batches: 2}\noptimizer: {lr_min: 1e-5}\n");
  folder.write("last.yaml", "optimizer: {lr_min: 2e-5}\n");
  const std::string path =
      folder.write("main.yaml", "base: [parts/more.yaml, last.yaml]\ntrain: {steps: 30}\n");
  const LoadedConfig loaded = config::load_config(path, {"train.eval_batches=3"});
  CHECK(loaded.config.train.steps == 30);
  CHECK(loaded.config.train.global_batch_size == 4);
  CHECK(loaded.config.train.eval_batches == 3);
  CHECK(loaded.config.optimizer.lr_min == 2e-5);
  CHECK(loaded.files.size() == 4);
  CHECK(contains(to_string(loaded.origin("model.hidden_size")), "tiny.yaml:2:16"));
  CHECK(contains(to_string(loaded.origin("optimizer.lr_min")), "last.yaml:1:21"));
  CHECK(contains(to_string(loaded.origin("train.steps")), "main.yaml:2:16"));
  CHECK(loaded.config.run.dir == "runs/main");
}

TEST_CASE("config: a group of the base goes away with null") {
  Folder folder("null");
  folder.write("b.yaml", kTiny + "run: {max_minutes: 5}\n");
  const std::string sparse = folder.write(
      "s.yaml",
      "base: b.yaml\nmodel: {indexer: {index_n_heads: 2, index_head_dim: 8, index_topk: 4}}\n");
  const std::string dense =
      folder.write("d.yaml", "base: s.yaml\nmodel: {indexer: null}\nrun: {max_minutes: null}\n");
  CHECK(config::load_config(sparse).config.model.indexer);
  CHECK_FALSE(config::load_config(dense).config.model.indexer);
  CHECK_FALSE(config::load_config(dense).config.run.max_minutes);
}

TEST_CASE("config: problems of base files") {
  Folder folder("bad_base");
  folder.write("b.yaml", kTiny + "log: {interval: 0}\n");
  // The file hides the base's wrong value; the base is wrong all the same.
  const std::string hides =
      folder.write("hides.yaml", "base: b.yaml\nlog: {interval: 5}\nrun: {sed: 1}\n");
  const std::string report = failure(hides);
  CHECK(contains(report, "b.yaml:14:17 log.interval: found 0: out of range"));
  CHECK(contains(report, "hides.yaml:3:7 run.sed: unknown key; did you mean run.seed?"));
  CHECK(contains(report, "2 problems"));
  const std::string missing = folder.write("missing.yaml", "base: nothing.yaml\n");
  CHECK(contains(failure(missing), "nothing.yaml: cannot read this file: No such file"));
  folder.write("x.yaml", "base: y.yaml\n");
  const std::string cycle = folder.write("y.yaml", "base: x.yaml\n");
  CHECK(contains(failure(cycle), "y.yaml builds on itself"));
  const std::string self = folder.write("self.yaml", "base: ./self.yaml\n");
  CHECK(contains(failure(self), "self.yaml:1:7 base:"));
}

TEST_CASE("config: a maze of base files ends") {
  Folder folder("maze");
  for (int i = 0; i < 14; ++i)
    folder.write(fmt::format("m{}.yaml", i), fmt::format("base: [m{0}.yaml, m{0}.yaml]\n", i + 1));
  folder.write("m14.yaml", kTiny);
  const std::string main = folder.write("main.yaml", "base: m0.yaml\n");
  CHECK(contains(failure(main), "too many base files"));
}

TEST_CASE("config: large files of another kind end soon") {
  std::string keys, items;
  for (int i = 0; i < 100'000; ++i)
    keys += fmt::format("k{}: 1\n", i);
  for (int i = 0; i < 200'000; ++i)
    items += "- 1\n";
  CHECK(contains(report_of(keys), "more than 1024 keys in one group"));
  CHECK(contains(report_of(items), "more than 32768 values"));
  std::string phases =
      kTiny.substr(0, kTiny.find("\ntrain:") + 1) +
      "optimizer: {lr: 1}\ntrain:\n  steps: 1\n  global_batch_size: 1\n  phases:\n";
  for (int i = 0; i < 10'000; ++i)
    phases += "    - {untill: 5, x: 1}\n";
  const std::vector<Problem> problems = problems_of(phases);
  CHECK(problems.size() == 20'000);
  CHECK(contains(ConfigError(problems).what(), "… and 19800 more\n20000 problems"));
}
