// One training step of the hybrid model: the same bits whatever is recomputed, deferred,
// interleaved or left in memory.
#include <algorithm>
#include <cmath>

#include "core/base/error.h"
#include "core/nn/losses.h"
#include "tests/model/hybrid.h"
#include "tests/support/catch.h"

namespace moesaic::test {
namespace {

const StepResult& reference() {
  static const StepResult result = run_step({});
  return result;
}

template <class T>
std::vector<T> values(const std::vector<std::byte>& bytes) {
  std::vector<T> out(bytes.size() / sizeof(T));
  std::copy_n(bytes.data(), out.size() * sizeof(T), reinterpret_cast<std::byte*>(out.data()));
  return out;
}

}  // namespace

TEST_CASE("a step of the hybrid model has finite results in which every loss takes part") {
  const auto losses = values<float>(reference().losses);
  for (int i = 0; i < kNumLosses; ++i) {
    INFO("loss " << i);
    CHECK(std::isfinite(losses[static_cast<std::size_t>(i)]));
    CHECK(losses[static_cast<std::size_t>(i)] > 0);
  }
  const auto gradients = values<float>(reference().gradients);
  CHECK(std::all_of(gradients.begin(), gradients.end(), [](float g) { return std::isfinite(g); }));
  CHECK(std::count_if(gradients.begin(), gradients.end(), [](float g) { return g != 0; }) >
        static_cast<std::ptrdiff_t>(gradients.size() / 2));
  CHECK(reference().replays == 0);
}

TEST_CASE("a step repeated has the same bits, with any number of threads") {
  require_same(run_step({}), reference());
  require_same(run_step({.threads = 3}), reference());
  require_same(run_step({.mode = Stream::Mode::immediate}), reference());
}

TEST_CASE("recomputed activations give the bits of saved ones") {
  const StepResult full = run_step({.policy = {.all = true}});
  require_same(full, reference());
  CHECK(full.replays > 0);
  CHECK(full.slot_bytes < reference().slot_bytes);
  const std::vector<std::vector<std::string>> some{{"attn.*"},
                                                   {"moe.gate_up", "moe.h", "moe.xs"},
                                                   {"*.mixed", "*.normed"},
                                                   {"attn.o", "attn.lse"},
                                                   {"indexer.q", "indexer.k*"},
                                                   {"mlp.*", "mtp.*"}};
  for (const auto& patterns : some) {
    INFO("pattern " << patterns.front());
    const StepResult part = run_step({.policy = {.patterns = patterns}});
    require_same(part, reference());
    CHECK(part.slot_bytes > full.slot_bytes);
    CHECK(part.slot_bytes < reference().slot_bytes);
  }
  const StepResult but = run_step({.policy = {.all = true, .kept = {"cur.mid"}}, .poisoned = true});
  require_same(but, reference());
  CHECK(but.slot_bytes > full.slot_bytes);
  CHECK(but.replays < full.replays);
}

TEST_CASE("selective recomputation keeps the bits, and replays no product") {
  const StepResult full = run_step({.policy = {.all = true}}),
                   selective = run_step({.policy = {.cheap = true}});
  require_same(selective, reference());
  CHECK(selective.replays > 0);
  CHECK(selective.replays < full.replays);
  CHECK(selective.slot_bytes > full.slot_bytes);
  CHECK(selective.slot_bytes < reference().slot_bytes);
  require_same(run_step({.policy = {.cheap = true, .patterns = {"mlp.*"}}}), reference());
}

TEST_CASE("nothing is saved that backward does not read") {
  for (const RecomputePolicy& policy : {RecomputePolicy{}, RecomputePolicy{.cheap = true}})
    CHECK(run_step({.policy = policy}).saved_in_vain == std::vector<std::string>());
}

TEST_CASE("deferred weight gradients have the bits of immediate ones") {
  require_same(run_step({.weight_gradients = WeightGradients::Mode::deferred}), reference());
  require_same(
      run_step({.policy = {.all = true}, .weight_gradients = WeightGradients::Mode::deferred}),
      reference());
}

TEST_CASE("two micro-batches in flight have the bits of one after the other") {
  require_same(run_step({.interleaved = true}), reference());
  require_same(run_step({.policy = {.all = true},
                         .weight_gradients = WeightGradients::Mode::deferred,
                         .interleaved = true}),
               reference());
}

TEST_CASE("nothing is read from memory that nobody wrote") {
  require_same(run_step({.poisoned = true}), reference());
  require_same(run_step({.policy = {.all = true},
                         .weight_gradients = WeightGradients::Mode::deferred,
                         .poisoned = true}),
               reference());
}

TEST_CASE("a dry run finds exactly the memory that the step takes") {
  for (const bool all : {false, true}) {
    for (const auto mode : {WeightGradients::Mode::at_once, WeightGradients::Mode::deferred}) {
      StepPlan plan{.policy = {.all = all}, .weight_gradients = mode};
      plan.mode = Stream::Mode::dry;
      plan.transient_bytes = plan.scratch_bytes = 0;
      const StepResult dry = run_step(plan);
      plan.mode = Stream::Mode::worker;
      plan.transient_bytes = dry.transient_high_water;
      plan.scratch_bytes = dry.scratch_high_water;
      plan.poisoned = true;
      const StepResult real = run_step(plan);
      CHECK(real.transient_high_water == dry.transient_high_water);
      CHECK(real.scratch_high_water == dry.scratch_high_water);
      require_same(real, reference());
      plan.transient_bytes = dry.transient_high_water - 256;
      plan.mode =
          Stream::Mode::immediate;  // no worker is left behind with views of a step that threw
      CHECK_THROWS_AS(run_step(plan), ResourceError);
    }
  }
}

TEST_CASE("gradients are the derivative of the objective, in every residual scheme") {
  StepPlan plan;
  plan.precision = kF64;
  // Without choices the objective is smooth; the indexer's own is left out, because its inputs are
  // detached.
  plan.options.moe.top_k = plan.options.moe.experts;
  plan.options.moe.bias_rule = BiasRule::none;
  plan.options.mla.indexer->top_k = kTokens;
  plan.options.mla.indexer->kl_weight = 0;
  const auto check = [&](const char* what) {
    INFO(what);
    const auto at = [&](double step) {
      plan.perturbation = step;
      return run_step(plan);
    };
    // The norms after nearly empty states bend the objective strongly: a step of 1e-6 already shows
    // its third derivative.
    const double h = 1e-8, slope = at(0).slope,
                 difference = (at(h).objective - at(-h).objective) / (2 * h);
    CHECK(slope != 0);
    CHECK(difference == Approx(slope).epsilon(1e-6));
  };
  check("blocks of two layers");
  plan.options.attn_res_block = 5;
  check("one block");
  plan.options.attn_res_full = true;
  check("every sublayer a source");
  plan.options.mtp_post_norm = true;
  check("MTP after the final norm");
  plan.options.residual = ResidualKind::plain;
  check("plain residuals");
  plan.options.tie_embeddings = true;
  check("tied embeddings");
  plan.options.mtp_post_norm = false;
  check("tied embeddings, MTP before the final norm");
}

TEST_CASE("recomputation and deferral keep the bits when every sublayer is a source") {
  StepPlan plan;
  plan.options.attn_res_full = true;
  const StepResult saved = run_step(plan);
  plan.policy.all = plan.poisoned = true;
  plan.weight_gradients = WeightGradients::Mode::deferred;
  require_same(run_step(plan), saved);
}

TEST_CASE("f32 and bf16 give the gradients of f64 to their precision") {
  // Nothing is chosen, so that rounding cannot choose otherwise, and a large eps keeps the norm
  // after an empty KDA state from amplifying rounding a thousand times.
  StepPlan plan;
  plan.options.eps = plan.options.kda.eps = plan.options.moe.eps = 0.1;
  plan.options.moe.top_k = plan.options.moe.experts;
  plan.options.moe.bias_rule = BiasRule::none;
  plan.options.mla.indexer->top_k = kTokens;
  const auto gradients = [&](const Precision& precision) {
    plan.precision = precision;
    return run_step(plan).gradients;
  };
  const auto exact = values<double>(gradients(kF64));
  const auto error = [&](const std::vector<float>& got) {
    REQUIRE(got.size() == exact.size());
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      difference += (got[i] - exact[i]) * (got[i] - exact[i]);
      norm += exact[i] * exact[i];
    }
    return std::sqrt(difference / norm);
  };
  CHECK(error(values<float>(gradients(kF32))) < 1e-5);
  CHECK(error(values<float>(gradients(kBf16))) < 0.1);
}

TEST_CASE("bf16 keeps the bits through recomputation and deferred weight gradients") {
  require_same(run_step({.precision = kBf16,
                         .policy = {.all = true},
                         .weight_gradients = WeightGradients::Mode::deferred,
                         .poisoned = true}),
               run_step({.precision = kBf16}));
}

TEST_CASE("a quantile rule without a rejected expert is refused") {
  StepPlan plan;
  plan.options.moe.top_k = plan.options.moe.experts;
  CHECK_THROWS_AS(run_step(plan), UsageError);
}

TEST_CASE("a pattern that names a choice is refused") {
  for (const char* pattern : {"moe.topk", "indexer.selected", "moe.*"}) {
    INFO(pattern);
    CHECK_THROWS_AS(run_step({.policy = {.patterns = {pattern}}}), UsageError);
  }
}

}  // namespace moesaic::test
