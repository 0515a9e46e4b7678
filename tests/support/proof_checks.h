#pragma once
// What must hold on every device.
#include "tests/support/proof_run.h"

namespace moesaic::test {

inline Precision proof_precision(DType compute) {
  const DType wide = compute == DType::f64 ? DType::f64 : DType::f32;
  return {.compute = compute, .stats = wide, .grad = wide, .master = wide};
}

inline void check_finite(const ProofResult& result) {
  for (const auto& [name, tensor] : result.tensors) {
    INFO(name);
    if (is_floating(tensor.view().dtype()))
      CHECK(std::isfinite(relative_error(tensor.view(), tensor.view())));
  }
}

inline void check_same_bits(const ProofResult& got, const ProofResult& want) {
  REQUIRE(got.tensors.size() == want.tensors.size());
  for (std::size_t i = 0; i < want.tensors.size(); ++i) {
    INFO(want.tensors[i].first);
    CHECK(same_bits(got.tensors[i].second.view(), want.tensors[i].second.view()));
  }
}

struct ProofPolicy {
  RecomputePolicy policy;
  int replays;  ///< steps that a backward runs again
};
/// Nothing; up, which needs norm_in again; all steps but those that choose or whose outputs are
/// pinned, norm_out again for its statistics.
inline std::vector<ProofPolicy> proof_policies() {
  return {{{}, 0}, {{.patterns = {"up.*", "*_in.y"}}, 2}, {{.all = true}, 4}};
}

/// Recompute policies, one stream or two, weight gradients at once or deferred, all of it twice:
/// the bits of the plainest run. Every run has arenas of exactly the size that a dry run measured.
inline void check_all_variants(ProofOptions options) {
  const ProofResult want = prove(options);
  check_finite(want);
  CHECK_FALSE(same_bits(want.at("0/y0"), want.at("0/y1")));
  CHECK_FALSE(same_bits(want.at("0/master up.weight"), want.at("1/master up.weight")));
  std::size_t last_slot_bytes = want.slot_bytes + 1;
  for (const auto& [policy, replays] : proof_policies()) {
    options.recompute = policy;
    std::size_t slot_bytes = 0;
    for (const int lanes : {1, 2}) {
      options.num_lanes = lanes;
      for (const auto mode : {WeightGradients::Mode::at_once, WeightGradients::Mode::deferred}) {
        options.weight_gradients = mode;
        for (int again = 0; again < 2; ++again) {
          INFO("replays " << replays << ", streams " << lanes << ", deferred "
                          << (mode == WeightGradients::Mode::deferred) << ", again " << again);
          const ProofResult got = prove(options);
          check_same_bits(got, want);
          CHECK(got.replays == replays);
          slot_bytes = got.slot_bytes;
        }
      }
    }
    CHECK(slot_bytes < last_slot_bytes);
    last_slot_bytes = slot_bytes;
  }
}

/// The arenas' sizes from the dry run are enough (all runs of this file) and not more than needed.
inline void check_dry_run(ProofOptions options) {
  options.recompute.all = true;
  const auto at_once = measure(options);
  options.weight_gradients = WeightGradients::Mode::deferred;
  const auto one = measure(options);
  CHECK(one[0].transient > at_once[0].transient);  // all micro-batches keep operands
  options.num_lanes = 2;
  const auto needed = measure(options);
  REQUIRE(needed.size() == 2);
  CHECK(needed[0].transient < one[0].transient);
  for (std::size_t lane = 0; lane < 2; ++lane) {
    REQUIRE(needed[lane].transient > 256);
    auto memory = needed;
    memory[lane].transient -= 256;
    CHECK_THROWS_AS(ProofRun(options, memory).enqueue_steps(), ResourceError);
    memory = needed;
    if (memory[lane].scratch <= 256) continue;
    memory[lane].scratch -= 256;
    CHECK_THROWS_AS(ProofRun(options, memory).enqueue_steps(), ResourceError);
  }
  ProofRun run(options, needed);
  run.enqueue_steps();
  check_finite(run.results());
  CHECK(run.high_water() == needed);
}

/// Many steps without a wait of the host: memory of replayed and deferred work is used again and
/// again, poisoned in between, while both streams are at work.
inline void check_stress(ProofOptions options, int runs) {
  const ProofResult want = prove(options);
  check_finite(want);
  options.recompute.all = true;
  options.num_lanes = 2;
  options.weight_gradients = WeightGradients::Mode::deferred;
  for (int r = 0; r < runs; ++r)
    check_same_bits(prove(options), want);
}

}  // namespace moesaic::test
