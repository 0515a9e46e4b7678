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
#include "kernels/ops/muon.h"
#include "kernels/ops/rms_norm.h"
#include "kernels/ops/rope.h"
#include "kernels/ops/short_conv.h"
#include "kernels/ops/topk.h"
#include "kernels/ops/vocab_loss.h"

namespace moesaic::bench {

TensorView OpCases::memory(Shape shape, DType dtype) {
  const auto bytes = byte_size(dtype) * static_cast<std::size_t>(shape.numel());
  return memory_.emplace_back(bytes, kCpu, "bench").view(shape, dtype);
}

TensorView OpCases::random(Shape shape, DType dtype, double scale, double offset) {
  const TensorView view = memory(shape, dtype);
  ++seed_;
  dispatch_float(dtype, [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < view.numel(); ++i) {
      view.as<T>()[i] = T(static_cast<acc_t<T>>(
          offset + scale * standard_normal(seed_, static_cast<std::uint64_t>(i))));
    }
  });
  return view;
}

TensorView OpCases::integers(Shape shape, std::int64_t limit) {
  const TensorView view = memory(shape, DType::i32);
  ++seed_;
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    view.as<std::int32_t>()[i] = static_cast<std::int32_t>(
        uniform(seed_, static_cast<std::uint64_t>(i)) * static_cast<double>(limit));
  }
  return view;
}

TensorView OpCases::documents(std::int64_t tokens, std::int64_t count) {
  const TensorView cu = memory({count + 1}, DType::i32);
  for (std::int64_t i = 0; i <= count; ++i)
    cu.as<std::int32_t>()[i] = static_cast<std::int32_t>(tokens * i / count);
  return cu;
}

void OpCases::add_products() {
  struct Sizes {
    std::int64_t m, n, k;
  };
  if (!wanted(Gemm::kName)) return;
  for (const Sizes s : {Sizes{1024, 160, 160},
                        {1024, 448, 160},
                        {1024, 512, 512},
                        {1024, 1408, 512},
                        {1024, 1024, 1024}}) {
    const TensorView x = activation({s.m, s.k}), w = activation({s.n, s.k}),
                     y = activation({s.m, s.n});
    add(linear_forward(y, x, w), fmt::format("forward {}x{}x{}", s.m, s.n, s.k));
    add(linear_backward_input(activation({s.m, s.k}), y, w),
        fmt::format("backward input {}x{}x{}", s.m, s.k, s.n));
    add(linear_backward_weight(statistic({s.n, s.k}), y, x),
        fmt::format("backward weight {}x{}x{}", s.n, s.k, s.m));
  }
}

void OpCases::add_elementwise() {
  constexpr std::int64_t kTokens = 1024, kHidden = 512, kWidth = 1408, kHeads = 8, kHead = 64,
                         kVocabulary = 4096;
  const auto text = [](std::int64_t a, std::int64_t b) { return fmt::format("{}x{}", a, b); };
  const Shape hidden{kTokens, kHidden}, heads{kTokens, kHeads, kHead};
  if (wanted("rms_norm")) {
    const TensorView x = activation(hidden), weight = statistic({kHidden}),
                     inv = random({kTokens}, stats_, 0.01, 1);
    add(RmsNormForward{.y = activation(hidden), .inv_rms = inv, .x = x, .weight = weight},
        text(kTokens, kHidden));
    add(RmsNormBackward{.dx = activation(hidden),
                        .dweight = statistic({kHidden}),
                        .dy = activation(hidden),
                        .x = x,
                        .weight = weight,
                        .inv_rms = inv},
        text(kTokens, kHidden));
    const TensorView xh = activation(heads), gate = activation(heads), wh = statistic({kHead}),
                     invh = random({kTokens, kHeads}, stats_, 0.01, 1);
    add(
        GatedRmsNormForward{
            .y = activation(heads), .inv_rms = invh, .x = xh, .gate = gate, .weight = wh},
        "1024x8x64");
    add(GatedRmsNormBackward{.dx = activation(heads),
                             .dgate = activation(heads),
                             .dweight = statistic({kHead}),
                             .dy = activation(heads),
                             .x = xh,
                             .gate = gate,
                             .weight = wh,
                             .inv_rms = invh},
        "1024x8x64");
  }
  for (const auto& [kind, kind_name] :
       {std::pair{GluKind::swiglu, "swiglu"}, {GluKind::situ, "situ"}}) {
    if (!wanted("glu")) continue;
    const TensorView gate_up = activation({kTokens, 2 * kWidth});
    const std::string shape = fmt::format("{} {}", kind_name, text(kTokens, kWidth));
    add(
        GluForward{
            .h = activation({kTokens, kWidth}), .gate_up = gate_up, .activation = {.kind = kind}},
        shape);
    add(GluBackward{.dgate_up = activation({kTokens, 2 * kWidth}),
                    .dh = activation({kTokens, kWidth}),
                    .gate_up = gate_up,
                    .activation = {.kind = kind}},
        shape);
  }
  if (wanted("short_conv")) {
    const TensorView x = activation(hidden), w = statistic({kHidden, 4}),
                     cu = documents(kTokens, 2);
    add(ShortConvForward{.y = activation(hidden), .x = x, .w = w, .cu_seqlens = cu},
        text(kTokens, kHidden));
    add(ShortConvBackward{.dx = activation(hidden),
                          .dw = statistic({kHidden, 4}),
                          .dy = activation(hidden),
                          .x = x,
                          .w = w,
                          .cu_seqlens = cu},
        text(kTokens, kHidden));
  }
  if (wanted("attn_res")) {
    constexpr std::int64_t kSources = 4;
    std::vector<ConstTensorView> sources;
    std::vector<TensorView> dsources;
    for (std::int64_t i = 0; i < kSources; ++i) {
      sources.emplace_back(activation(hidden));
      dsources.emplace_back(activation(hidden));
    }
    const TensorView query = statistic({kHidden}), norm = statistic({kHidden}),
                     p = random({kTokens, kSources}, stats_, 0.01, 0.25);
    add(
        AttnResForward{
            .h = activation(hidden), .p = p, .sources = sources, .query = query, .norm = norm},
        "4 sources 1024x512");
    add(AttnResBackward{.dsources = dsources,
                        .dquery = statistic({kHidden}),
                        .dnorm = statistic({kHidden}),
                        .dh = activation(hidden),
                        .p = p,
                        .sources = sources,
                        .query = query,
                        .norm = norm},
        "4 sources 1024x512");
  }
  if (wanted(Rope::kName))
    add(Rope{.x = activation(heads), .positions = integers({kTokens}, kTokens), .rotary_width = 32},
        "1024x8x64, 32 rotated");
  if (wanted("embedding")) {
    const TensorView ids = integers({kTokens}, kVocabulary);
    add(
        EmbeddingForward{
            .y = activation(hidden), .ids = ids, .table = activation({kVocabulary, kHidden})},
        text(kTokens, kHidden));
    add(
        EmbeddingBackward{
            .dtable = statistic({kVocabulary, kHidden}), .ids = ids, .dy = activation(hidden)},
        text(kTokens, kHidden));
  }
  if (wanted(CrossEntropy::kName)) {
    add(CrossEntropy{.loss_sum = statistic({1}),
                     .dlogits = activation({kTokens, kVocabulary}),
                     .logits = activation({kTokens, kVocabulary}),
                     .targets = integers({kTokens}, kVocabulary),
                     .divisor = random({1}, stats_, 0, kTokens)},
        text(kTokens, kVocabulary));
  }
  if (wanted(Add::kName))
    add(Add{.y = activation(hidden), .a = activation(hidden), .b = activation(hidden)},
        text(kTokens, kHidden));
  if (wanted(TopK::kName) && stats_ == DType::f32)
    add(TopK{.indices = memory({256, 256}, DType::i32), .scores = statistic({256, 8192})},
        "256 of 8192, 256 rows");
}

void OpCases::add_optimizer() {
  TensorView scalars = memory({kNumStepScalars}, stats_);
  StepScalars values;
  values.learning_rate = 1e-9;  // the weights stay as they are, however often the op runs
  values.bias_correction1 = 0.1;
  values.bias_correction2 = 0.05;
  values.write(scalars);
  if (wanted(AdamW::kName)) {
    const Shape shape{1 << 20};
    add(AdamW{.w = statistic(shape),
              .m = statistic(shape),
              .v = random(shape, stats_, 0.1, 1),
              .dw = statistic(shape),
              .scalars = scalars},
        "1048576");
  }
  if (wanted(SumOfSquares::kName))
    add(SumOfSquares{.partials = random({1}, DType::f64), .x = statistic({1 << 20})}, "1048576");
  struct Sizes {
    std::int64_t batch, rows, cols;
  };
  if (!wanted(MuonUpdate::kName)) return;
  for (const Sizes s : {Sizes{5, 32, 160}, {16, 128, 96}, {1, 512, 512}, {1, 1408, 512}}) {
    const Shape shape{s.batch, s.rows, s.cols};
    add(MuonUpdate{.w = statistic(shape),
                   .momentum = statistic(shape),
                   .dw = statistic(shape),
                   .scalars = scalars},
        fmt::format("{} of {}x{}", s.batch, s.rows, s.cols));
  }
}

}  // namespace moesaic::bench
