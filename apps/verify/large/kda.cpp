// The KDA core and its layer at head size 128: lengths around the chunk of 64, packed and empty documents, gates from
// tiny to saturated.
#include <cmath>

#include <fmt/format.h>

#include "apps/verify/large/case_builder.h"

namespace moesaic::verify {
namespace {

constexpr std::int64_t kHeads = 2, kDim = 128;

struct Gate {
  const char* name;
  bool bounded;          ///< g = -5 sigma(e^A (z + b)); else the softplus gate
  double mean, scale;    ///< of z
  double a_low, a_high;  ///< range of A
};
constexpr Gate kUsual{"usual", true, 0, 2, -0.5, 0.5}, kTiny{"tiny", true, -10, 1, -0.1, 0.1},
    kSaturated{"saturated", true, 10, 1, -0.1, 0.1}, kWide{"wide", true, 0, 8, -0.2, 0.2},
    kSoftplus{"softplus", false, -2, 2, 0, 2.7};

void expect_tiled(CaseBuilder& b) {
  b.expect_path("kda_chunk_forward", "tiled");
  b.expect_path("kda_chunk_backward", "tiled");
}

void core(CaseBuilder& b, const std::vector<std::int64_t>& cu, const Gate& gate, bool same_keys) {
  const std::int64_t tokens = cu.back(), documents = static_cast<std::int64_t>(cu.size()) - 1;
  const Shape rows{tokens, kHeads, kDim}, heads{tokens, kHeads},
      states{documents, kHeads, kDim, kDim};
  b.cfg(gate.bounded ? R"({"g_min": -5.0})" : "{}");
  b.ints("in.cu", {documents + 1}, cu);
  b.normal("in.q_raw", rows);
  // Keys close to one direction and beta near 1 make the triangular systems of a chunk as ill-conditioned as they get.
  b.fill("in.k_raw", rows, [same_keys](std::int64_t i, double x) {
    return same_keys ? std::cos(static_cast<double>(i % (kHeads * kDim))) + 0.3 * x : x;
  });
  b.normal("in.v", rows);
  b.normal("in.z", rows, gate.scale, gate.mean);
  b.normal("in.beta_logit", heads, 1.0, same_keys ? 3.0 : 0.0);
  b.uniform("in.A_log", {kHeads}, gate.a_low, gate.a_high);
  b.normal("in.dt_bias", {kHeads * kDim}, 0.1);
  b.normal("in.s0", states, 0.3);
  b.normal("cot.o", rows);
  b.normal("cot.s_final", states, 0.3);
  // The suffix sums behind dg carry rounding errors of all tokens of a chunk; small gates' gradients inherit them.
  b.accuracy(8192, 16);
  expect_tiled(b);
}

void layer(CaseBuilder& b,
           const std::vector<std::int64_t>& cu,
           std::int64_t hidden,
           bool bounded,
           bool full_rank_gate) {
  const std::int64_t tokens = cu.back();
  b.cfg(fmt::format(
      R"({{"kda_heads": {}, "kda_head_dim": {}, "conv": 4, "g_min": {}, "full_rank_gate": {}, "eps": 1e-5}})",
      kHeads,
      kDim,
      bounded ? "-5.0" : "null",
      full_rank_gate));
  b.ints("in.cu", {static_cast<std::int64_t>(cu.size())}, cu);
  b.normal("in.x", {tokens, hidden});
  b.normal("cot.y", {tokens, hidden});
  b.accuracy(1024, 16);
  expect_tiled(b);
}

}  // namespace

void add_kda_cases(LargeCases& cases) {
  const auto add_core = [&](const std::string& name,
                            std::vector<std::int64_t> cu,
                            const Gate& gate,
                            bool same_keys = false) {
    cases.push_back({"kda_core__" + name, [=](CaseBuilder& b) { core(b, cu, gate, same_keys); }});
  };
  for (const std::int64_t tokens : {1, 63, 64, 65, 127, 129, 193, 321})
    add_core(fmt::format("large_t{}", tokens), {0, tokens}, kUsual);
  add_core("large_packed", {0, 64, 64, 129, 130, 145, 208}, kUsual);
  add_core("large_same_keys", {0, 130}, kTiny, true);
  for (const Gate& gate : {kTiny, kSaturated, kWide, kSoftplus})
    add_core(std::string("large_gate_") + gate.name, {0, 70, 140}, gate);

  const auto add_layer = [&](const std::string& name,
                             std::vector<std::int64_t> cu,
                             std::int64_t hidden,
                             bool bounded,
                             bool full_rank_gate) {
    cases.push_back({"kda_layer__" + name,
                     [=](CaseBuilder& b) { layer(b, cu, hidden, bounded, full_rank_gate); }});
  };
  add_layer("large", {0, 130}, 256, true, true);
  add_layer("large_packed", {0, 1, 65, 65, 192, 209}, 256, true, true);
  add_layer("large_softplus", {0, 64, 191}, 192, false, false);
}

}  // namespace moesaic::verify
