// Finite differences for every op that has a gradient: simple ops here, the others in files of their own. A new op must
// enter one of the lists below.
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "kernels/ops/op_list.h"
#include "tests/ops/op_test.h"

namespace moesaic::test {
namespace {

// An op whose output is y as a function of `inputs`, and the gradients that the ops compute for a cotangent of y.
struct Problem {
  std::vector<TensorView> inputs;     // f64
  std::vector<TensorView> outputs;    // f64; written by forward()
  std::vector<TensorView> gradients;  // of the inputs, in their order
  std::function<void()> forward;
  std::function<void(const std::vector<TensorView>& cotangents)> backward;
};

// Random cotangents c: the gradients of <c, outputs> are compared with central differences in every input. Gradients start
// as random numbers where the op adds to them, which `adds` says, and as NaN where it does not.
void check(Rig& rig, const Problem& p, const std::vector<bool>& adds = {}) {
  REQUIRE(p.inputs.size() == p.gradients.size());
  std::vector<TensorView> cotangents, copies;
  for (std::size_t i = 0; i < p.outputs.size(); ++i) {
    cotangents.push_back(rig.random(p.outputs[i].shape(), DType::f64, 900 + i));
    copies.push_back(rig.values(read(cotangents[i]), p.outputs[i].shape(), DType::f64));
  }
  p.forward();
  std::vector<std::vector<double>> base;
  for (const TensorView& y : p.outputs)
    base.push_back(read(y));
  // Relative to the outputs now, so that what an input has no influence on adds no rounding error.
  const auto loss = [&] {
    p.forward();
    double sum = 0;
    for (std::size_t i = 0; i < p.outputs.size(); ++i) {
      const auto y = read(p.outputs[i]), c = read(cotangents[i]);
      for (std::size_t j = 0; j < y.size(); ++j)
        sum += (y[j] - base[i][j]) * c[j];
    }
    return sum;
  };
  std::vector<std::vector<double>> before;
  for (std::size_t i = 0; i < p.gradients.size(); ++i) {
    const TensorView& g = p.gradients[i];
    std::memset(g.data(), 0xff, g.bytes());
    if (i < adds.size() && adds[i]) {
      const TensorView start = rig.random(g.shape(), DType::f64, 950 + i);
      std::memcpy(g.data(), start.data(), g.bytes());
    }
    before.push_back(read(g));
  }
  p.backward(copies);
  for (std::size_t i = 0; i < p.gradients.size(); ++i) {
    std::vector<double> gradient = read(p.gradients[i]);
    if (i < adds.size() && adds[i]) {
      for (std::size_t j = 0; j < gradient.size(); ++j)
        gradient[j] -= before[i][j];
    }
    INFO("input " << i);
    check_gradient(p.inputs[i], rig.values(gradient, p.inputs[i].shape(), DType::f64), loss);
  }
}

TensorView normal(Rig& rig, Shape shape, std::uint64_t seed) {
  return rig.random(shape, DType::f64, seed);
}
TensorView blank(Rig& rig, Shape shape) {
  return rig.poisoned(shape, DType::f64);
}

void sums(Rig& rig) {
  const TensorView a = normal(rig, {5, 3}, 1), b = normal(rig, {5, 3}, 2), y = blank(rig, {5, 3}),
                   da = blank(rig, {5, 3}), db = blank(rig, {5, 3});
  // y = a + b, whose gradients are copies of dy
  check(rig,
        {{a, b},
         {y},
         {da, db},
         [&] {
           rig.run(Add{y, a, b});
         },
         [&](const auto& dy) {
           rig.run(Cast{da, dy[0]});
           rig.run(Cast{db, dy[0]});
         }});
  // y = b + 0.3 a
  check(rig,
        {{a, b},
         {y},
         {da, db},
         [&] {
           rig.run(Cast{y, b});
           rig.run(Accumulate{y, a, 0.3});
         },
         [&](const auto& dy) {
           rig.run(Accumulate{da, dy[0], 0.3});
           rig.run(Cast{db, dy[0]});
         }},
        {true, false});
  // y = -2 f a, linear in a for a given factor
  const TensorView f = rig.values({0.7}, {1}, DType::f64);
  check(rig,
        {{a},
         {y},
         {da},
         [&] {
           rig.run(Scale{y, a, f, -2.0});
         },
         [&](const auto& dy) {
           rig.run(Scale{da, dy[0], f, -2.0});
         }});
}

void columns(Rig& rig) {
  const TensorView a = normal(rig, {4, 3}, 3), b = normal(rig, {4, 5}, 4),
                   y = normal(rig, {4, 8}, 5), out = blank(rig, {4, 8}), da = blank(rig, {4, 3}),
                   db = blank(rig, {4, 5}), oa = blank(rig, {4, 3}), ob = blank(rig, {4, 5}),
                   dy = blank(rig, {4, 8});
  check(rig,
        {{a, b},
         {out},
         {da, db},
         [&] {
           rig.run(ConcatColumns{out, a, b});
         },
         [&](const auto& d) {
           rig.run(SplitColumns{da, db, d[0]});
         }});
  check(rig,
        {{y},
         {oa, ob},
         {dy},
         [&] {
           rig.run(SplitColumns{oa, ob, y});
         },
         [&](const auto& d) {
           rig.run(ConcatColumns{dy, d[0], d[1]});
         }});
}

// The products that the gradient of c = alpha op(a) op(b) consists of, for every form.
void gemm(Rig& rig) {
  for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{5, 7, 3}, {140, 130, 70}}) {
    for (int form = 0; form < 4; ++form) {
      const bool ta = (form & 1) != 0, tb = (form & 2) != 0;
      const Shape sa = ta ? Shape{k, m} : Shape{m, k}, sb = tb ? Shape{n, k} : Shape{k, n};
      const TensorView a = normal(rig, sa, 6), b = normal(rig, sb, 7), c = blank(rig, {m, n}),
                       da = blank(rig, sa), db = blank(rig, sb);
      const Gemm product{
          .c = c, .a = a, .b = b, .transpose_a = ta, .transpose_b = tb, .alpha = 0.5};
      INFO("form " << form);
      check(rig,
            {{a, b},
             {c},
             {da, db},
             [&] { rig.run(product); },
             [&](const auto& d) {
               // d op(a) = alpha dc op(b)^T, d op(b) = alpha op(a)^T dc
               Gemm left{.c = da, .a = d[0], .b = b, .transpose_b = !tb, .alpha = 0.5};
               if (ta)
                 left = {.c = da,
                         .a = b,
                         .b = d[0],
                         .transpose_a = tb,
                         .transpose_b = true,
                         .alpha = 0.5};
               Gemm right{.c = db, .a = a, .b = d[0], .transpose_a = !ta, .alpha = 0.5};
               if (tb)
                 right = {.c = db,
                          .a = d[0],
                          .b = a,
                          .transpose_a = true,
                          .transpose_b = ta,
                          .alpha = 0.5};
               right.accumulate = true;
               rig.run(left);
               rig.run(right);
             }},
            {false, true});
    }
  }
}

// Per head: 3 of 5 channels to 4 of 6 by rows 1 ... 3 of a block of 5, and back by the transpose.
void head_linear(Rig& rig) {
  const TensorView x = normal(rig, {7, 2, 5}, 60), w = normal(rig, {10, 4}, 61);
  for (const bool transpose : {false, true}) {
    const TensorView y = normal(rig, {7, 2, 6}, 62), dx = blank(rig, {7, 2, 5}),
                     dw = blank(rig, {10, 4});
    check(
        rig,
        {{x, w},
         {y},
         {dx, dw},
         [&] {
           rig.run(HeadLinear{
               .y = {y, 2}, .x = {x, 1}, .w = w, .row_begin = 1, .m = 3, .transpose_w = transpose});
         },
         [&](const auto& d) {
           rig.run(Fill{.y = dx, .value = 0.0});  // of the channels that are not read
           rig.run(HeadLinear{.y = {dx, 1},
                              .x = {d[0], 2},
                              .w = w,
                              .row_begin = 1,
                              .m = 3,
                              .transpose_w = !transpose});
           const HeadColumns<ConstTensorView> in{x, 1}, out{d[0], 2};
           rig.run(HeadLinearBackwardWeight{.dw = dw,
                                            .a = transpose ? out : in,
                                            .b = transpose ? in : out,
                                            .row_begin = 1,
                                            .m = 3});
         }},
        {false, true});
  }
}

void head_columns(Rig& rig) {
  const TensorView x = normal(rig, {3, 2, 5}, 63), y = normal(rig, {3, 2, 4}, 64),
                   dx = blank(rig, {3, 2, 5});
  check(rig,
        {{x},
         {y},
         {dx},
         [&] {
           rig.run(CopyHeadColumns{.y = {y, 1}, .x = {x, 2}, .n = 3});
         },
         [&](const auto& d) {
           rig.run(Fill{.y = dx, .value = 0.0});  // of the channels that are not read
           rig.run(CopyHeadColumns{.y = {dx, 2}, .x = {d[0], 1}, .n = 3});
         }});
}

void grouped_linear(Rig& rig) {
  const TensorView offsets = rig.ints({0, 3, 3, 8}), slots = rig.ints({2, 0, 1});
  const TensorView x = normal(rig, {8, 4}, 8), w = normal(rig, {3, 5, 4}, 9),
                   y = blank(rig, {8, 5}), dx = blank(rig, {8, 4}), dw = blank(rig, {3, 5, 4});
  check(rig,
        {{x, w},
         {y},
         {dx, dw},
         [&] {
           rig.run(GroupedLinearForward{
               .y = y, .x = x, .w = w, .offsets = offsets, .slot_of_expert = slots});
         },
         [&](const auto& d) {
           rig.run(GroupedLinearBackwardInput{
               .dx = dx, .dy = d[0], .w = w, .offsets = offsets, .slot_of_expert = slots});
           rig.run(GroupedLinearBackwardWeight{
               .dw = dw, .dy = d[0], .x = x, .offsets = offsets, .slot_of_expert = slots});
         }},
        {false, true});
}

// y = W2 act(W1 x).
void grouped_glu(Rig& rig) {
  const TensorView offsets = rig.ints({0, 3, 3, 8}), slots = rig.ints({2, 0, 1});
  for (const GluKind kind : {GluKind::swiglu, GluKind::situ}) {
    const GluActivation act{.kind = kind, .beta1 = 1.5, .beta2 = 2.0};
    const TensorView x = normal(rig, {8, 4}, 80), up = normal(rig, {3, 10, 4}, 81),
                     down = normal(rig, {3, 4, 5}, 82), y = blank(rig, {8, 4}),
                     h = blank(rig, {8, 5}), gate_up = blank(rig, {8, 10}),
                     dgate_up = blank(rig, {8, 10}), dx = blank(rig, {8, 4}),
                     dup = blank(rig, {3, 10, 4}), ddown = blank(rig, {3, 4, 5});
    check(rig,
          {{x, up, down},
           {y},
           {dx, dup, ddown},
           [&] {
             rig.run(GroupedGluForward{.h = h,
                                       .gate_up = gate_up,
                                       .x = x,
                                       .w = up,
                                       .offsets = offsets,
                                       .slot_of_expert = slots,
                                       .activation = act});
             rig.run(GroupedLinearForward{
                 .y = y, .x = h, .w = down, .offsets = offsets, .slot_of_expert = slots});
           },
           [&](const auto& d) {
             rig.run(GroupedGluBackward{.dgate_up = dgate_up,
                                        .h = h,
                                        .dy = d[0],
                                        .w = down,
                                        .gate_up = gate_up,
                                        .offsets = offsets,
                                        .slot_of_expert = slots,
                                        .activation = act});
             rig.run(GroupedLinearBackwardWeight{
                 .dw = ddown, .dy = d[0], .x = h, .offsets = offsets, .slot_of_expert = slots});
             rig.run(GroupedLinearBackwardInput{
                 .dx = dx, .dy = dgate_up, .w = up, .offsets = offsets, .slot_of_expert = slots});
             rig.run(GroupedLinearBackwardWeight{
                 .dw = dup, .dy = dgate_up, .x = x, .offsets = offsets, .slot_of_expert = slots});
           }},
          {false, true, true});
  }
}

void embedding(Rig& rig) {
  const TensorView ids = rig.ints({3, 0, 3, 5}), table = normal(rig, {6, 4}, 10),
                   y = blank(rig, {4, 4}), dtable = blank(rig, {6, 4});
  check(rig,
        {{table},
         {y},
         {dtable},
         [&] {
           rig.run(EmbeddingForward{y, ids, table});
         },
         [&](const auto& d) {
           rig.run(EmbeddingBackward{dtable, ids, d[0]});
         }},
        {true});
}

void rope(Rig& rig) {
  const TensorView positions = rig.ints({0, 1, 7, 1000}), x = normal(rig, {4, 2, 7}, 11),
                   y = blank(rig, {4, 2, 7}), dx = blank(rig, {4, 2, 7});
  for (const bool interleaved : {true, false}) {
    const auto rotate = [&](const TensorView& to, const TensorView& from, bool inverse) {
      rig.run(Cast{to, from});
      rig.run(Rope{.x = to,
                   .positions = positions,
                   .begin = 1,
                   .rotary_width = 4,
                   .theta = 50.0,
                   .interleaved = interleaved,
                   .inverse = inverse});
    };
    check(rig,
          {{x},
           {y},
           {dx},
           [&] { rotate(y, x, false); },
           [&](const auto& d) { rotate(dx, d[0], true); }});
  }
}

// Tokens to the rows of their experts and back, with one dropped assignment.
void permutation(Rig& rig) {
  const TensorView topk = rig.ints({1, 0, 2, 1, 0, 2, 1, 2}).reshaped({4, 2});
  const TensorView kept = rig.zeros({4, 2}, DType::u8);
  std::memset(kept.data(), 1, kept.bytes());
  kept.as<std::uint8_t>()[3] = 0;
  const TensorView offsets = rig.ints({0, 0, 0, 0}), token = rig.ints(std::vector<std::int32_t>(8)),
                   row = rig.ints(std::vector<std::int32_t>(8)).reshaped({4, 2});
  rig.run(DispatchPlan{.offsets = offsets,
                       .row_of_assignment = row,
                       .token_of_row = token,
                       .topk = topk,
                       .kept = kept});
  const TensorView x = normal(rig, {4, 3}, 12), y = normal(rig, {8, 3}, 13),
                   weights = normal(rig, {4, 2}, 14);
  const TensorView xs = rig.zeros({8, 3}, DType::f64), dx = blank(rig, {4, 3});
  check(rig,
        {{x},
         {xs},
         {dx},
         [&] { rig.run(dispatch_rows(xs, x, token, offsets)); },
         [&](const auto& d) { rig.run(dispatch_rows_backward(dx, d[0], row)); }});
  // u = sum of weight y: its gradient in y is the weight of the row times what combine_rows_backward gathers
  const TensorView u = blank(rig, {4, 3}), du = rig.zeros({8, 3}, DType::f64);
  const TensorView row_weight = rig.zeros({8}, DType::f64), dy = blank(rig, {8, 3});
  check(rig,
        {{y},
         {u},
         {dy},
         [&] { rig.run(combine_rows(u, y, weights, row)); },
         [&](const auto& d) {
           rig.run(combine_rows_backward(du, d[0], token, offsets));
           rig.run(RowWeightForward{
               .row_weight = row_weight, .weights = weights, .row_of_assignment = row});
           for (std::int64_t i = 0; i < 8 * 3; ++i)
             dy.as<double>()[i] = row_weight.as<double>()[i / 3] * du.as<double>()[i];
         }});
  const TensorView of_rows = rig.zeros({8}, DType::f64), dweights = blank(rig, {4, 2});
  check(rig,
        {{weights},
         {of_rows},
         {dweights},
         [&] {
           rig.run(RowWeightForward{
               .row_weight = of_rows, .weights = weights, .row_of_assignment = row});
         },
         [&](const auto& d) {
           rig.run(RowWeightBackward{
               .dweights = dweights, .drow_weight = d[0], .row_of_assignment = row});
         }});
}

void norms(Rig& rig) {
  const Shape shape{3, 6};
  const TensorView x = normal(rig, shape, 15), w = normal(rig, {6}, 16), y = blank(rig, shape),
                   inv = blank(rig, {3}), dx = blank(rig, shape), dw = blank(rig, {6});
  for (const bool add : {false, true}) {
    check(rig,
          {{x, w},
           {y},
           {dx, dw},
           [&] {
             rig.run(RmsNormForward{y, inv, x, w, 1e-2});
           },
           [&](const auto& d) {
             rig.run(RmsNormBackward{dx, dw, d[0], x, w, inv, add});
           }},
          {add, true});
  }
  check(rig,
        {{x},
         {y},
         {dx},
         [&] {
           rig.run(L2NormForward{y, inv, x, 1e-2, 1.5});
         },
         [&](const auto& d) {
           rig.run(L2NormBackward{dx, d[0], x, inv, 1.5});
         }});
}

void sigmoid_gate(Rig& rig) {
  const Shape shape{3, 4};
  const TensorView x = normal(rig, shape, 17), gate = normal(rig, shape, 18), y = blank(rig, shape),
                   dx = blank(rig, shape), dgate = blank(rig, shape);
  check(rig,
        {{x, gate},
         {y},
         {dx, dgate},
         [&] {
           rig.run(SigmoidGateForward{y, x, gate});
         },
         [&](const auto& d) {
           rig.run(SigmoidGateBackward{dx, dgate, d[0], x, gate});
         }});
}

using Names = std::set<std::string>;

struct Entry {
  Names ops;
  void (*run)(Rig&);
};
const std::map<std::string, Entry> kHere{
    {"sums", {{"add", "accumulate", "cast", "scale"}, sums}},
    {"columns", {{"concat_columns", "split_columns"}, columns}},
    {"gemm", {{"gemm"}, gemm}},
    {"head_linear", {{"head_linear", "head_linear_backward_weight"}, head_linear}},
    {"head_columns", {{"copy_head_columns"}, head_columns}},
    {"grouped_linear",
     {{"grouped_linear_forward", "grouped_linear_backward_input", "grouped_linear_backward_weight"},
      grouped_linear}},
    {"grouped_glu", {{"grouped_glu_forward", "grouped_glu_backward"}, grouped_glu}},
    {"embedding", {{"embedding_forward", "embedding_backward"}, embedding}},
    {"rope", {{"rope"}, rope}},
    {"permutation",
     {{"gather_rows", "combine_rows", "row_weight_forward", "row_weight_backward"}, permutation}},
    {"norms",
     {{"rms_norm_forward", "rms_norm_backward", "l2_norm_forward", "l2_norm_backward"}, norms}},
    {"sigmoid_gate", {{"sigmoid_gate_forward", "sigmoid_gate_backward"}, sigmoid_gate}},
};

// Test case of another file of this folder, and the ops that it differentiates.
const std::map<std::string, Names> kElsewhere{
    {"attention: backward equals central differences", {"attention_forward", "attention_backward"}},
    {"depth mix: gradients by central differences; accumulators add; empty ones are skipped",
     {"attn_res_forward", "attn_res_backward"}},
    {"cross-entropy: gradient with weights, ignored rows and z term by central differences",
     {"cross_entropy"}},
    {"cross-entropy in blocks of words: gradient by central differences",
     {"vocab_block_sums", "vocab_block_cross_entropy"}},
    {"divergences: gradients by central differences, zero between equals, masks",
     {"vocab_divergence"}},
    {"gated RMS norm: gradients by central differences, in place too",
     {"gated_rms_norm_forward", "gated_rms_norm_backward"}},
    {"GLU: gradients by central differences, with and without row weights",
     {"glu_forward", "glu_backward"}},
    {"indexer loss: value and gradients equal the definition and its central differences",
     {"indexer_loss"}},
    {"KdaChunk: gradients are those of finite differences",
     {"kda_chunk_forward", "kda_chunk_backward"}},
    {"KdaPrepare: gradients are those of finite differences, for both gates",
     {"kda_prepare_forward", "kda_prepare_backward"}},
    {"KdaSegment: chains of maps, both ways", {"kda_segment_chain"}},
    {"KdaSegment: F and M are the derivatives of the recurrence",
     {"kda_segment_map", "kda_segment_gradient"}},
    {"layer norm: gradients by central differences", {"layer_norm_forward", "layer_norm_backward"}},
    {"Router backward: finite differences, all losses, both scores",
     {"router_forward", "router_loss_forward", "router_backward"}},
    {"sparse mla: backward equals central differences",
     {"sparse_mla_forward", "sparse_mla_backward"}},
    {"ShortConv: gradients are those of finite differences, across blocks of 64 tokens",
     {"short_conv_forward", "short_conv_backward"}},
};

// No gradient passes through these: choices and counts, balancing, optimizer and its scalars, storage formats, inference.
const Names kWithoutGradient{"accumulate_counts",
                             "adamw",
                             "balance_bias_exact",
                             "balance_bias_from_histogram",
                             "balance_bias_sign",
                             "balance_frequency",
                             "balance_histogram",
                             "balance_margins",
                             "byte_checksum",
                             "clip_factor",
                             "dequantize_fp8_block",
                             "dequantize_mx",
                             "dispatch_plan",
                             "exchange_choices",
                             "exchange_counts",
                             "exchange_groups",
                             "expert_capacity",
                             "expert_places",
                             "fill",
                             "guard_finite",
                             "indexer_select",
                             "initial_values",
                             "kda_step",
                             "member_scalars",
                             "moving_average",
                             "muon_update",
                             "newton_schulz",
                             "qk_clip",
                             "quantize_fp8_block",
                             "quantize_mx",
                             "short_conv_tail",
                             "sum_of_squares",
                             "top_k"};

struct Recorder : OpObserver {
  void begin(const char* op) override { seen.insert(op); }
  void end(const char*, const OpCost&) override {}
  Names seen;
};

}  // namespace

TEST_CASE("finite differences: the ops whose gradients are simple") {
  for (const auto& [name, entry] : kHere) {
    INFO(name);
    Recorder recorder;
    Rig rig;
    rig.observe(&recorder);
    entry.run(rig);
    rig.observe(nullptr);
    for (const std::string& op : entry.ops) {
      INFO(op);
      CHECK(recorder.seen.count(op) == 1);
    }
  }
}

TEST_CASE("finite differences: every op is tested, or has no gradient") {
  std::multiset<std::string> listed(kWithoutGradient.begin(), kWithoutGradient.end());
  for (const auto& [name, entry] : kHere)
    listed.insert(entry.ops.begin(), entry.ops.end());
  for (const auto& [name, ops] : kElsewhere)
    listed.insert(ops.begin(), ops.end());
  auto names = op_names();
  std::sort(names.begin(), names.end());
  CHECK(std::vector<std::string>(listed.begin(), listed.end()) == names);

  std::string sources;
  for (const auto& file :
       std::filesystem::directory_iterator(std::string(MOESAIC_SOURCE_DIR) + "/tests/ops")) {
    if (file.path().filename() == "finite_differences.cpp") continue;
    std::stringstream text;
    text << std::ifstream(file.path()).rdbuf();
    sources += text.str();
  }
  for (const auto& [test, ops] : kElsewhere) {
    INFO(test);
    CHECK(sources.find("\"" + test + "\"") != std::string::npos);
  }
}

}  // namespace moesaic::test
