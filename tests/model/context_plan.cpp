#include "core/model/context_plan.h"

#include <numeric>

#include "core/config/load.h"
#include "core/model/from_config.h"
#include "tests/support/catch.h"

using namespace moesaic;

namespace {

config::Config shipped(const std::string& name, std::vector<std::string> overrides) {
  return config::load_config(MOESAIC_SOURCE_DIR "/configs/" + name + ".yaml", overrides).config;
}

ContextPlan planned(const config::Config& config) {
  return plan_context(config, make_plan(config)).value();
}

}  // namespace

TEST_CASE("context plan: the work of a piece is that of its tokens at their own context") {
  const config::Config config = shipped("deepseek_v32",
                                        {"parallel.cp=4",
                                         "data.sequence_length=6144",
                                         "train.micro_batch_size=2",
                                         "train.phases=[]"});
  const ModelPlan plan = make_plan(config);
  const ModelOptions o = model_options(config);
  const auto core = [&](std::int64_t tokens) {
    double sum = 0;
    for (std::size_t l = 0; l < o.layers.size(); ++l)
      sum += static_cast<double>(layer_core_flops(o, l, tokens, false));
    return sum;
  };
  const double products = static_cast<double>(plan.forward_flops) - core(6144);
  const ContextPlan context = planned(config);
  REQUIRE(context.phases.size() == 1);
  const ContextPlan::Phase& phase = context.phases[0];
  REQUIRE(phase.piece_tokens == 3072);
  REQUIRE(phase.work.size() == 4);
  for (std::int64_t r = 0; r < 4; ++r) {
    double want = 0;
    for (std::int64_t t = 3072 * r; t < 3072 * (r + 1); ++t)
      want += products + core(2 * (t % 6144 + 1));
    const auto keys = static_cast<double>(3072 * r * o.mla.kv_lora_rank * o.mla.heads *
                                          (o.mla.qk_nope_dim + o.mla.v_dim));
    want += 2 * static_cast<double>(o.layers.size()) * keys;
    // Ranks 0 and 3, 1 and 2 share the indexer's scores: half of the difference moves. Two tokens at the same place in
    // two pieces differ by the distance of the pieces in their sequences.
    const double score =
        static_cast<double>(o.layers.size()) *
        static_cast<double>(o.mla.indexer->heads * 2 * (o.mla.indexer->head_dim + 1));
    const std::int64_t distance = 3072 * ((3 - r) % 2 - r % 2);
    want += score * 3072 * static_cast<double>(distance) / 2;
    CHECK(phase.work[static_cast<std::size_t>(r)] == Approx(want).epsilon(1e-12));
  }
}

TEST_CASE("context plan: longer contexts are less equal, whole sequences per rank are equal") {
  CHECK_FALSE(
      plan_context(shipped("kimi_linear_48b", {}), make_plan(shipped("kimi_linear_48b", {}))));
  const auto ratio = [](std::int64_t length) {
    return planned(shipped("kimi_linear_48b",
                           {"parallel.cp=8",
                            "train.micro_batch_size=1",
                            "model.max_position_embeddings=1048576",
                            "data.sequence_length=" + std::to_string(length)}))
        .phases[0]
        .busiest_over_mean();
  };
  const double near = ratio(4096), far = ratio(1 << 20);
  CHECK(near > 1);
  CHECK(far > near);
  CHECK(far < 2);  // of attention alone it is (2 R - 1) / R
}
