#include "apps/bench/op_cases.h"

#include <fmt/format.h>

#include "core/base/random.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/attn_res.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/elementwise.h"
#include "kernels/ops/embedding.h"
#include "kernels/ops/gated_norm.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/glu.h"
#include "kernels/ops/initial_values.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/rope.h"
#include "kernels/ops/short_conv.h"
#include "kernels/ops/topk.h"
#include "kernels/ops/vocab_block.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic::bench {

TensorView OpCases::memory(Shape shape, DType dtype) {
  const auto bytes = byte_size(dtype) * static_cast<std::size_t>(shape.numel());
  return memory_.emplace_back(bytes, device(), "bench").view(shape, dtype);
}

TensorView OpCases::random(Shape shape, DType dtype, double scale, double offset) {
  const TensorView view = memory(shape, dtype);
  moesaic::run(backend_, InitialValues{.y = view, .a = scale, .b = offset, .key = ++seed_});
  return view;
}

TensorView OpCases::upload(const std::vector<std::int32_t>& values, Shape shape) {
  const TensorView view = memory(shape, DType::i32);
  copy_tensor(view,
              ConstTensorView(reinterpret_cast<const std::byte*>(values.data()), DType::i32, shape),
              stream_of(backend_));
  stream_of(backend_).synchronize();
  return view;
}

TensorView OpCases::integers(Shape shape, std::int64_t limit) {
  ++seed_;
  std::vector<std::int32_t> values(static_cast<std::size_t>(shape.numel()));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::int32_t>(uniform(seed_, i) * static_cast<double>(limit));
  return upload(values, shape);
}

TensorView OpCases::documents(std::int64_t tokens, std::int64_t count) {
  std::vector<std::int32_t> cu;
  for (std::int64_t i = 0; i <= count; ++i)
    cu.push_back(static_cast<std::int32_t>(tokens * i / count));
  return upload(cu, {count + 1});
}

void OpCases::products(std::int64_t m, std::int64_t n, std::int64_t k) {
  const TensorView x = activation({m, k}), w = activation({n, k}), y = activation({m, n});
  add(linear_forward(y, x, w), fmt::format("forward {}x{}x{}", m, n, k));
  add(linear_backward_input(activation({m, k}), y, w),
      fmt::format("backward input {}x{}x{}", m, k, n));
  add(linear_backward_weight(statistic({n, k}), y, x),
      fmt::format("backward weight {}x{}x{}", n, k, m));
}

void OpCases::add_products() {
  if (!wanted(Gemm::kName)) return;
  products(1024, 160, 160);
  products(1024, 448, 160);
  products(1024, 512, 512);
  products(1024, 1408, 512);
  products(1024, 1024, 1024);
}

void OpCases::add_elementwise() {
  elementwise({.tokens = 1024,
               .hidden = 512,
               .width = 1408,
               .heads = 8,
               .head = 64,
               .vocabulary = 4096,
               .loss_rows = 1024});
}

void OpCases::elementwise(const ModelSizes& s) {
  const std::int64_t tokens = s.tokens, hidden_size = s.hidden, width = s.width,
                     num_heads = s.heads, head_width = s.head, vocabulary = s.vocabulary;
  const auto text = [](std::int64_t a, std::int64_t b) { return fmt::format("{}x{}", a, b); };
  const std::string heads_text = fmt::format("{}x{}x{}", tokens, num_heads, head_width);
  const Shape hidden{tokens, hidden_size}, heads{tokens, num_heads, head_width};
  if (wanted("rms_norm")) {
    const TensorView x = activation(hidden), weight = statistic({hidden_size}),
                     inv = random({tokens}, stats_, 0.01, 1);
    add(RmsNormForward{.y = activation(hidden), .inv_rms = inv, .x = x, .weight = weight},
        text(tokens, hidden_size));
    add(RmsNormBackward{.dx = activation(hidden),
                        .dweight = statistic({hidden_size}),
                        .dy = activation(hidden),
                        .x = x,
                        .weight = weight,
                        .inv_rms = inv},
        text(tokens, hidden_size));
    const TensorView xh = activation(heads), gate = activation(heads), wh = statistic({head_width}),
                     invh = random({tokens, num_heads}, stats_, 0.01, 1);
    add(
        GatedRmsNormForward{
            .y = activation(heads), .inv_rms = invh, .x = xh, .gate = gate, .weight = wh},
        heads_text);
    add(GatedRmsNormBackward{.dx = activation(heads),
                             .dgate = activation(heads),
                             .dweight = statistic({head_width}),
                             .dy = activation(heads),
                             .x = xh,
                             .gate = gate,
                             .weight = wh,
                             .inv_rms = invh},
        heads_text);
  }
  for (const auto& [kind, kind_name] :
       {std::pair{GluKind::swiglu, "swiglu"}, {GluKind::situ, "situ"}}) {
    if (!wanted("glu")) continue;
    const TensorView gate_up = activation({tokens, 2 * width});
    const std::string shape = fmt::format("{} {}", kind_name, text(tokens, width));
    add(
        GluForward{
            .h = activation({tokens, width}), .gate_up = gate_up, .activation = {.kind = kind}},
        shape);
    add(GluBackward{.dgate_up = activation({tokens, 2 * width}),
                    .dh = activation({tokens, width}),
                    .gate_up = gate_up,
                    .activation = {.kind = kind}},
        shape);
  }
  if (wanted("short_conv")) {
    const TensorView x = activation(hidden), w = statistic({hidden_size, 4}),
                     cu = documents(tokens, 2);
    add(ShortConvForward{.y = activation(hidden), .x = x, .w = w, .cu_seqlens = cu},
        text(tokens, hidden_size));
    add(ShortConvBackward{.dx = activation(hidden),
                          .dw = statistic({hidden_size, 4}),
                          .dy = activation(hidden),
                          .x = x,
                          .w = w,
                          .cu_seqlens = cu},
        text(tokens, hidden_size));
  }
  if (wanted("attn_res")) {
    constexpr std::int64_t kSources = 4;
    std::vector<ConstTensorView> sources;
    std::vector<TensorView> dsources;
    for (std::int64_t i = 0; i < kSources; ++i) {
      sources.emplace_back(activation(hidden));
      dsources.emplace_back(activation(hidden));
    }
    const TensorView query = statistic({hidden_size}), norm = statistic({hidden_size}),
                     p = random({tokens, kSources}, stats_, 0.01, 0.25);
    add(
        AttnResForward{
            .h = activation(hidden), .p = p, .sources = sources, .query = query, .norm = norm},
        "4 sources " + text(tokens, hidden_size));
    add(AttnResBackward{.dsources = dsources,
                        .dquery = statistic({hidden_size}),
                        .dnorm = statistic({hidden_size}),
                        .dh = activation(hidden),
                        .p = p,
                        .sources = sources,
                        .query = query,
                        .norm = norm},
        "4 sources " + text(tokens, hidden_size));
  }
  if (wanted(Rope::kName))
    add(Rope{.x = activation(heads), .positions = integers({tokens}, tokens), .rotary_width = 32},
        heads_text + ", 32 rotated");
  if (wanted("embedding")) {
    const TensorView ids = integers({tokens}, vocabulary);
    add(
        EmbeddingForward{
            .y = activation(hidden), .ids = ids, .table = activation({vocabulary, hidden_size})},
        text(tokens, hidden_size));
    add(
        EmbeddingBackward{
            .dtable = statistic({vocabulary, hidden_size}), .ids = ids, .dy = activation(hidden)},
        text(tokens, hidden_size));
  }
  if (wanted(CrossEntropy::kName)) {
    add(CrossEntropy{.loss_sum = statistic({1}),
                     .dlogits = activation({s.loss_rows, vocabulary}),
                     .logits = activation({s.loss_rows, vocabulary}),
                     .targets = integers({s.loss_rows}, vocabulary),
                     .divisor = random({1}, stats_, 0, static_cast<double>(s.loss_rows))},
        text(s.loss_rows, vocabulary));
  }
  // A quarter of the words, as a rank of four has them.
  if (wanted(VocabBlockSums::kName)) {
    add(VocabBlockSums{.sums = statistic({s.loss_rows, 2}),
                       .logits = activation({s.loss_rows, vocabulary / 4})},
        text(s.loss_rows, vocabulary / 4));
  }
  if (wanted(VocabBlockCrossEntropy::kName)) {
    add(VocabBlockCrossEntropy{.loss_sum = statistic({1}),
                               .dlogits = activation({s.loss_rows, vocabulary / 4}),
                               .logits = activation({s.loss_rows, vocabulary / 4}),
                               .sums = random({4, s.loss_rows, 2}, stats_, 0.1, 8),
                               .targets = integers({s.loss_rows}, vocabulary),
                               .divisor = random({1}, stats_, 0, static_cast<double>(s.loss_rows))},
        text(s.loss_rows, vocabulary / 4));
  }
  if (wanted(Add::kName))
    add(Add{.y = activation(hidden), .a = activation(hidden), .b = activation(hidden)},
        text(tokens, hidden_size));
  if (wanted(TopK::kName) && stats_ == DType::f32)
    add(TopK{.indices = memory({256, 256}, DType::i32), .scores = statistic({256, 8192})},
        "256 of 8192, 256 rows");
}

TensorView OpCases::step_scalars() {
  StepScalars values;
  values.learning_rate = 1e-9;  // the weights stay as they are, however often the op runs
  values.bias_correction1 = 0.1;
  values.bias_correction2 = 0.05;
  const Buffer host(kNumStepScalars * byte_size(stats_), kCpu, "bench");
  values.write(host.view({kNumStepScalars}, stats_));
  const TensorView scalars = memory({kNumStepScalars}, stats_);
  copy_tensor(scalars, host.view({kNumStepScalars}, stats_), stream_of(backend_));
  stream_of(backend_).synchronize();
  return scalars;
}

void OpCases::updates(std::int64_t elements) {
  const Shape shape{elements};
  if (wanted(AdamW::kName))
    add(AdamW{.w = statistic(shape),
              .m = statistic(shape),
              .v = random(shape, stats_, 0.1, 1),
              .dw = statistic(shape),
              .scalars = step_scalars()},
        fmt::format("{}", elements));
  if (wanted(SumOfSquares::kName))
    add(SumOfSquares{.partials = random({1}, DType::f64), .x = statistic(shape)},
        fmt::format("{}", elements));
}

void OpCases::muon(std::int64_t batch, std::int64_t rows, std::int64_t cols) {
  if (!wanted(MuonUpdate::kName)) return;
  const Shape shape{batch, rows, cols};
  add(MuonUpdate{.w = statistic(shape),
                 .momentum = statistic(shape),
                 .dw = statistic(shape),
                 .scalars = step_scalars(),
                 .bf16_products = dtype_ == DType::bf16},
      fmt::format("{} of {}x{}", batch, rows, cols));
}

void OpCases::add_optimizer() {
  updates(1 << 20);
  muon(5, 32, 160);
  muon(16, 128, 96);
  muon(1, 512, 512);
  muon(1, 1408, 512);
}

}  // namespace moesaic::bench
