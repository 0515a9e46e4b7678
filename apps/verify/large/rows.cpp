// Ops on rows at the widths of large models: norms, gated units, the mix over depth, the short convolution.
#include <fmt/format.h>

#include "apps/verify/case_run.h"
#include "apps/verify/large/case_builder.h"
#include "kernels/ops/glu.h"
#include "kernels/ops/layer_norm.h"

namespace moesaic::verify {
namespace {

void run_layer_norm(CaseRun& run) {
  const TensorView x = run.load("in.x"), w = run.load("w.weight"), bias = run.load("w.bias");
  const std::int64_t rows = x.dim(0), width = x.dim(1);
  const DType stats = run.precision().stats;
  const TensorView y = run.poisoned(x.shape(), x.dtype()), dx = run.poisoned(x.shape(), x.dtype()),
                   mean = run.poisoned({rows}, stats), inv_std = run.poisoned({rows}, stats),
                   dw = run.zeros({width}, stats), dbias = run.zeros({width}, stats);
  moesaic::run(run.backend(),
               LayerNormForward{
                   .y = y, .mean = mean, .inv_std = inv_std, .x = x, .weight = w, .bias = bias});
  run.expect("out.y", y);
  moesaic::run(run.backend(),
               LayerNormBackward{.dx = dx,
                                 .dweight = dw,
                                 .dbias = dbias,
                                 .dy = run.load("cot.y"),
                                 .x = x,
                                 .weight = w,
                                 .mean = mean,
                                 .inv_std = inv_std});
  run.expect("grad.in.x", dx);
  run.expect("grad.w.weight", dw);
  run.expect("grad.w.bias", dbias);
}

void run_glu(CaseRun& run) {
  const TensorView gate_up = run.load("in.gate_up"), dh = run.load("cot.h");
  const DType compute = run.precision().compute, stats = run.precision().stats;
  const std::int64_t used = run.cfg_int("rows");
  const TensorView count = run.upload_i32({used}, {1});
  GluActivation activation;
  if (run.cfg_bool("situ")) activation = {GluKind::situ, 4.0, 25.0};
  const TensorView h = run.poisoned(dh.shape(), compute),
                   weighted = run.poisoned(dh.shape(), compute),
                   d = run.poisoned(gate_up.shape(), compute),
                   dweight = run.poisoned({dh.dim(0)}, stats);
  moesaic::run(
      run.backend(),
      GluForward{.h = h, .gate_up = gate_up, .row_count = count, .activation = activation});
  run.expect("out.h", h.rows(0, used));
  moesaic::run(run.backend(),
               GluBackward{.dgate_up = d,
                           .drow_weight = dweight,
                           .h = weighted,
                           .dh = dh,
                           .gate_up = gate_up,
                           .row_weight = run.load("in.row_weight", stats),
                           .row_count = count,
                           .activation = activation,
                           .weight_h = true});
  run.expect("grad.in.gate_up", d.rows(0, used));
  run.expect("grad.in.row_weight", dweight.rows(0, used));
  run.expect("aux.weighted_h", weighted.rows(0, used));
}

const RegisterFamily layer_norms{{"layer_norm__", run_layer_norm}}, glus{{"glu__", run_glu}};

void norms(CaseBuilder& b, std::int64_t rows, std::int64_t width) {
  b.cfg(R"({"eps_rms": 1e-5, "eps_l2": 1e-6})");
  // Rows of very different sizes, as in the depth of a model.
  for (const char* name : {"in.x", "in.gate", "cot.rms", "cot.l2", "cot.gated"})
    b.fill(name, {rows, width}, [=](std::int64_t i, double x) {
      return x * (1.0 + static_cast<double>(i / width % 7));
    });
  b.normal("w.w", {width}, 0.2, 1.0);
  b.accuracy(width, 6);
}

void layer_norm(CaseBuilder& b, std::int64_t rows, std::int64_t width) {
  b.normal("in.x", {rows, width}, 1.0, 0.5);
  b.normal("w.weight", {width}, 0.2, 1.0);
  b.normal("w.bias", {width}, 0.2);
  b.normal("cot.y", {rows, width});
  b.accuracy(width, 4);
}

void glu(CaseBuilder& b, std::int64_t rows, std::int64_t width, bool situ) {
  b.cfg(fmt::format(R"({{"rows": {}, "situ": {}}})", rows, situ));
  const std::int64_t bound = rows + 5;
  b.normal("in.gate_up", {bound, 2 * width}, 3.0);
  b.uniform("in.row_weight", {bound}, 0.0, 0.5);
  b.normal("cot.h", {bound, width});
  b.accuracy(width, 4);
}

void mix(CaseBuilder& b, std::int64_t tokens, std::int64_t width, std::int64_t sources) {
  b.cfg(fmt::format(R"({{"N": {}, "eps": 1e-5}})", sources));
  for (std::int64_t i = 0; i < sources; ++i)
    b.normal(fmt::format("in.source.{}", i), {tokens, width}, 0.5 + static_cast<double>(i));
  b.normal("w.query", {width}, 0.03);
  b.normal("w.norm", {width}, 0.2, 1.0);
  b.normal("cot.h", {tokens, width});
  b.accuracy(width, 4);
  b.expect_path("attn_res_forward", "one_pass");
  b.expect_path("attn_res_backward", "one_pass");
}

void conv(CaseBuilder& b, std::int64_t channels) {
  const std::vector<std::int64_t> cu{0, 1, 3, 3, 67, 131, 200};
  const auto documents = static_cast<std::int64_t>(cu.size()) - 1;
  b.ints("in.cu", {documents + 1}, cu);
  b.normal("in.x", {cu.back(), channels});
  b.normal("in.history", {documents, 3, channels});
  b.normal("w.w", {channels, 4}, 0.5);
  b.normal("cot.y", {cu.back(), channels});
  b.accuracy(cu.back(), 4);
}

}  // namespace

void add_row_cases(LargeCases& cases) {
  for (const std::int64_t width : {2048, 7168}) {
    cases.push_back(
        {fmt::format("norms__rows_large_{}", width), [=](CaseBuilder& b) { norms(b, 67, width); }});
    cases.push_back({fmt::format("attnres__mix_large_{}", width),
                     [=](CaseBuilder& b) { mix(b, 65, width, width == 2048 ? 9 : 4); }});
  }
  cases.push_back({"layer_norm__large_128", [](CaseBuilder& b) { layer_norm(b, 257, 128); }});
  cases.push_back({"layer_norm__large_2048", [](CaseBuilder& b) { layer_norm(b, 67, 2048); }});
  cases.push_back({"glu__large_situ", [](CaseBuilder& b) { glu(b, 129, 2048, true); }});
  cases.push_back({"glu__large_swiglu", [](CaseBuilder& b) { glu(b, 131, 1408, false); }});
  cases.push_back({"short_conv__large_2048", [](CaseBuilder& b) { conv(b, 2048); }});
}

}  // namespace moesaic::verify
