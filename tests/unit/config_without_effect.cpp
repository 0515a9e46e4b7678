#include <filesystem>
#include <initializer_list>

#include "core/config/without_effect.h"
#include "tests/support/catch.h"
#include "tests/unit/config_support.h"

using namespace config_tests;
namespace config = moesaic::config;

namespace {

using Overrides = std::vector<std::string>;

const std::string kExperts =
    "model={num_experts: 8, num_experts_per_token: 2, moe_intermediate_size: 16}";

/// The keys that do nothing. The configuration has experts.
Overrides idle(Overrides overrides, const std::string& text = kTiny) {
  if (text == kTiny) overrides.push_back(kExperts);
  Overrides keys;
  for (const config::Finding& note :
       config::without_effect(config::load_config_text(text, "t.yaml", overrides).config)) {
    INFO(note.keys.front() << ": " << note.message);
    CHECK(note.keys.size() == 2);
    CHECK(note.message.size() > 20);
    keys.push_back(note.keys.front());
  }
  return keys;
}

Overrides with(Overrides first, const Overrides& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

/// A key that is set, and what makes it count, one way or the other.
struct Case {
  std::string key;
  Overrides set;
  std::vector<Overrides> counts;
};

void check(const Case& c) {
  INFO(c.key);
  CHECK(idle(c.set) == Overrides{c.key});
  for (const Overrides& more : c.counts) {
    INFO(more.front());
    CHECK(idle(with(c.set, more)).empty());
  }
}

}  // namespace

TEST_CASE("config: nothing is said of defaults, nor of the configurations that come along") {
  CHECK(idle({}).empty());
  int files = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(MOESAIC_SOURCE_DIR "/configs")) {
    if (entry.path().extension() != ".yaml") continue;
    INFO(entry.path());
    ++files;
    for (const config::Finding& note :
         config::without_effect(config::load_config(entry.path().string()).config))
      FAIL_CHECK(note.keys.front() << ": " << note.message);
  }
  CHECK(files > 6);
}

TEST_CASE("config: keys of offload count where something is offloaded") {
  const Overrides states{"experts.offload=states"}, full{"experts.offload=full"},
      residual{"activations.residual_offload=true"}, activations{"activations.offload=[cur.mid]"};
  check({"memory.host_budget", {"memory.host_budget=1GiB"}, {states, full, residual, activations}});
  check({"experts.device_cache", {"experts.device_cache=1GiB"}, {states, full}});
  check({"experts.policy", {"experts.policy=lru"}, {states, full}});
  const Overrides file{
      "memory.file_budget=1GiB", "memory.file_path=/scratch", "memory.host_budget=1GiB"};
  const Overrides keys{"memory.file_budget", "memory.file_path"};
  CHECK(idle(file) == with({"memory.host_budget"}, keys));
  CHECK(idle(with(file, residual)) == keys);  // activations never go there
  CHECK(idle(with(file, full)).empty());
  check({"memory.verify_reads", {"memory.verify_reads=false"}, {with(file, full)}});
  CHECK(idle(with({"memory.verify_reads=false"}, full)) == Overrides{"memory.verify_reads"});
  check({"optimizer.untouched", {"optimizer.untouched=lazy"}, {full}});
  CHECK(idle({"optimizer.untouched=skip"}).empty());
  const auto without_experts = config::without_effect(
      config::load_config_text(kTiny, "t", {"optimizer.untouched=skip"}).config);
  REQUIRE(without_experts.size() == 1);
  CHECK(contains(without_experts[0].message, "there are none"));
}

TEST_CASE("config: keys of one choice count with that choice") {
  const Overrides muon{"optimizer.name=muon"}, wsd{"optimizer.lr_schedule=wsd"},
      constant{"optimizer.lr_schedule=constant"};
  for (const std::string set :
       {"muon_momentum=0.9", "muon_nesterov=false", "muon_per_head=false", "ns_steps=3"}) {
    const std::string key = "optimizer." + set;
    check({key.substr(0, key.find('=')), {key}, {muon}});
  }
  check({"optimizer.ns_products", {"optimizer.ns_products=f32"}, {muon}});
  const Overrides phase{"train.phases=[{until: 4}, {lr_schedule: wsd, until: 10}]"};
  check({"optimizer.decay_steps", {"optimizer.decay_steps=5"}, {wsd, phase}});
  check({"optimizer.decay_shape", {"optimizer.decay_shape=cosine"}, {wsd, phase}});
  CHECK(idle(with({"optimizer.lr_min=1e-5"}, constant)) == Overrides{"optimizer.lr_min"});
  CHECK(idle(with(with({"optimizer.lr_min=1e-5"}, constant), phase)).empty());
  CHECK(idle(with({"optimizer.lr_min=1e-5"}, wsd)).empty());
  CHECK(idle({"optimizer.lr_min=1e-5"}).empty());  // cosine
  check({"run.deterministic",
         {"run.deterministic=false"},
         {{"model.indexer={index_n_heads: 2, index_head_dim: 8, index_topk: 4, key_sums: "
           "float_atomics}"}}});
  check({"train.eval_batches", {"train.eval_batches=3"}, {{"data.valid=v.txt"}}});
  check({"checkpoint.on_error", {"checkpoint.on_error=continue"}, {{"checkpoint.every=2"}}});
  CHECK(idle({"comm.first_step_s=900"}).empty());
  CHECK(idle({"comm.first_step_s=900", "comm.watchdog_s=0"}) == Overrides{"comm.first_step_s"});
  check({"experts.place_decay",
         {"experts.place_decay=0.9"},
         {{"experts.place_every=10", "parallel.ep=2"}}});
}

TEST_CASE("config: keys of a layout count in that layout") {
  const Overrides ep{"parallel.ep=2"};
  check({"parallel.schedule", {"parallel.schedule=gpipe"}, {{"parallel.pp=2"}}});
  check({"dispatch.exchange", {"dispatch.exchange=flat"}, {ep}});
  check({"dispatch.buffer_factor", {"dispatch.buffer_factor=1.5"}, {ep}});
  check({"dispatch.overlap", {"dispatch.overlap=true"}, {ep}});
  CHECK(idle({"dispatch.overlap=true", "dispatch.chunks=2"}) ==
        Overrides{"dispatch.overlap", "dispatch.chunks"});
  check({"dispatch.checksum", {"dispatch.checksum=true"}, {ep}});
  const Overrides hierarchical = with(ep, {"dispatch.exchange=hierarchical"});
  check({"dispatch.hierarchy", {"dispatch.hierarchy=intra_first"}, {hierarchical}});
  CHECK(idle(with({"dispatch.hops=3"}, hierarchical)) == Overrides{"dispatch.hops"});
  CHECK(idle(with({"dispatch.hops=3", "dispatch.hierarchy=intra_first"}, hierarchical)).empty());
  check({"experts.place_every", {"experts.place_every=10"}, {ep}});
  CHECK(idle({"experts.place_every=10", "experts.replicas=1"}) ==
        Overrides{"experts.place_every", "experts.replicas"});
  CHECK(idle(with({"experts.place_every=10", "experts.replicas=1"}, ep)).empty());
  CHECK(idle({"dispatch.dtype=fp8"}).empty());  // tokens are rounded in every layout
}
