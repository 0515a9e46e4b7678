// Sharded optimizer state: the updates of whole state to the bit, every element with one owner, and a share of the memory.
#include <cmath>
#include <map>

#include <fmt/format.h>

#include "core/model/from_config.h"
#include "core/train/optimizer_config.h"
#include "tests/support/catch.h"
#include "tests/train/run.h"

namespace moesaic::test {
namespace {

constexpr int kSteps = 4;

using Overrides = std::vector<std::string>;

Overrides with(Overrides all, const Overrides& more) {
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

void check_same_updates(const Overrides& overrides) {
  for (const auto& [ranks, ep] : std::vector<std::pair<int, int>>{{2, 1}, {3, 1}, {4, 1}, {4, 2}}) {
    INFO(ranks << " ranks, ep " << ep);
    const auto job = [&, r = ranks, e = ep](int zero, const char* clip) {
      return run_job(hybrid_config(with(overrides,
                                        {"train.global_batch_size=12",
                                         fmt::format("parallel.ep={}", e),
                                         fmt::format("parallel.zero={}", zero),
                                         fmt::format("optimizer.clip_grad_norm={}", clip)})),
                     r,
                     kSteps);
    };
    for (const char* clip : {"0", "0.05"}) {
      INFO("clipped at " << clip);
      const JobResult sharded = job(1, clip), whole = job(0, clip);
      for (std::size_t i = 0; i < whole.stats.size(); ++i) {
        CHECK(whole.stats[i].grad_norm > 0.05);
        CHECK(sharded.stats[i].loss == whole.stats[i].loss);
        CHECK(sharded.stats[i].grad_norm == whole.stats[i].grad_norm);
      }
      for (std::size_t r = 0; r < whole.weights.size(); ++r)
        CHECK(differences(sharded.weights[r], whole.weights[r]).empty());
      if (ep == 1) CHECK(differences(sharded.states[0], whole.states[0]).empty());
    }
  }
}

// One rank's declarations and optimizer, on memory that is not there.
struct Declared {
  Declared(const config::Config& config, int rank, int ranks)
      : params(
            precision_of(config, false),
            MeshPosition(std::make_shared<MeshLayout>(mesh_config(config.parallel), ranks), rank)),
        model(params, model_options(config)) {
    if (auto sharding = state_sharding(config, model)) {
      sharding->bucket_bytes = std::int64_t{32} << 10;
      params.shard_state(*sharding);
    }
    params.seal_pretend(kCpu, ever_trained(make_phases(config), params));
    optimizer = std::make_unique<Optimizer>(params, optimizer_options(config.optimizer));
  }
  double state_bytes() const { return static_cast<double>(optimizer->memory_use()[0].bytes); }
  ParameterStore params;
  Model model;
  std::unique_ptr<Optimizer> optimizer;
};

void check_owners(const Overrides& overrides, bool muon) {
  for (const int ranks : {2, 3, 4, 8}) {
    INFO(ranks << " ranks");
    const auto config = hybrid_config(overrides);
    const Declared whole(hybrid_config(with(overrides, {"parallel.zero=0"})), 0, ranks);
    std::map<std::string, std::int64_t> owned;
    double largest = 0, sum = 0;
    for (int r = 0; r < ranks; ++r) {
      Declared one(config, r, ranks);
      CHECK(one.params.buckets().size() > 1);
      largest = std::max(largest, one.state_bytes());
      sum += one.state_bytes();
      for (std::size_t i = 0; i < one.params.params().size(); ++i) {
        const ParamId id{static_cast<std::int32_t>(i)};
        for (std::int64_t e = 0; e < one.params.members_here(id); ++e) {
          const auto piece = one.params.own_piece(id, e);
          owned[one.params.member_name(id, e)] += piece.end - piece.begin;
          const bool uncut = piece.is_empty() || one.params.owns_whole(id, e);
          if (one.params.spec(id).shape.rank < 2 || (muon && one.params.spec(id).matrix))
            CHECK(uncut);
        }
      }
      for (const MlaAttention* layer : one.model.mla_layers()) {
        const ParamId q = one.params.find(layer->query_matrix()),
                      kv = one.params.find(layer->key_value_matrix());
        if (config.optimizer.qk_clip_tau)
          CHECK(one.params.owns_whole(q, 0) == one.params.owns_whole(kv, 0));
      }
    }
    for (std::size_t i = 0; i < whole.params.params().size(); ++i) {
      const ParamId id{static_cast<std::int32_t>(i)};
      for (std::int64_t e = 0; e < whole.params.members_here(id); ++e) {
        INFO(whole.params.member_name(id, e));
        CHECK(owned[whole.params.member_name(id, e)] == whole.params.spec(id).shape.numel());
      }
    }
    INFO("largest share " << largest << " bytes of " << whole.state_bytes());
    CHECK(sum >= 0.99 * whole.state_bytes());
    CHECK(largest < (muon ? 1.6 : 1.2) * whole.state_bytes() / ranks);
  }
}

}  // namespace

TEST_CASE("sharded state: the bits of whole state, AdamW with an average and phases") {
  check_same_updates({"optimizer.ema_decay=0.9",
                      "train.phases=[{until: 2, freeze: [\"model.layers.0.*\"]}, {until: 20}]"});
}

TEST_CASE("sharded state: the bits of whole state, Muon with QK-clip") {
  check_same_updates({"optimizer.name=muon", "optimizer.qk_clip_tau=0.05"});
}

TEST_CASE("sharded state: the bits of whole state, untouched experts skipped, split masters") {
  check_same_updates({"optimizer.untouched=skip",
                      "run.precision=bf16",
                      "model.num_experts=32",
                      "model.indexer.attention_form=gather"});
}

TEST_CASE("sharded state: every element has one owner, and shares are even") {
  check_owners({}, false);
  check_owners({"optimizer.name=muon", "optimizer.qk_clip_tau=0.05"}, true);
}

}  // namespace moesaic::test
