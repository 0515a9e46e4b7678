#include "kernels/ops/short_conv.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

DType wide(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// Both sides round at the same places; the order of sums, the exponential and rounding to bf16 of almost equal numbers
// differ.
double elementwise_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : dtype == DType::f32 ? 5e-6 : 1e-3;
}
// dw is a sum over tokens in f32 on both sides; for bf16 the fast exponential adds its own error.
double sum_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-13 : 1e-5;
}

struct Case {
  std::vector<std::int32_t> cu;
  std::int64_t channels, taps;
  DType dtype, weight_dtype;
  bool carried = true, silu = true, in_place = false, frozen = false;
  bool of_first = false;  ///< the first document alone has a history
  std::int64_t tokens() const { return cu.back(); }
  Shape rows() const { return {tokens(), channels}; }
  std::int64_t documents() const { return static_cast<std::int64_t>(cu.size()) - 1; }
  Shape histories() const { return {of_first ? 1 : documents(), taps - 1, channels}; }
  Shape tails() const { return {documents(), taps - 1, channels}; }
};

struct ConvTwins {
  explicit ConvTwins(const Case& c)
      : x(c.rows(), c.dtype),
        y(c.rows(), c.dtype),
        dy(c.rows(), c.dtype),
        dx(c.rows(), c.dtype),
        w({c.channels, c.taps}, c.weight_dtype),
        dw({c.channels, c.taps}, wide(c.dtype)),
        history(c.histories(), c.dtype),
        dhistory(c.histories(), c.dtype),
        next(c.tails(), c.dtype),
        cu({static_cast<std::int64_t>(c.cu.size())}, DType::i32) {
    fill_normal(x.initial.view(), 1);
    fill_normal(y.initial.view(), 2);
    fill_normal(dy.initial.view(), 3);
    fill_normal(dx.initial.view(), 4);
    fill_normal(w.initial.view(), 5, 0.5);
    fill_normal(dw.initial.view(), 6);
    fill_normal(history.initial.view(), 7);
    fill_normal(dhistory.initial.view(), 8);
    fill_normal(next.initial.view(), 9);
    std::copy(c.cu.begin(), c.cu.end(), cu.initial.data<std::int32_t>());
  }
  Twin x, y, dy, dx, w, dw, history, dhistory, next, cu;
};

void check(BothBackends& both, const Case& c) {
  INFO(c.tokens() << " tokens in " << c.cu.size() - 1 << " documents, " << c.channels
                  << " channels, " << c.taps << " taps, " << name(c.dtype) << ", weight "
                  << name(c.weight_dtype) << ", carried " << c.carried << " silu " << c.silu
                  << " in place " << c.in_place << " frozen " << c.frozen);
  const ConvTwins t(c);
  const bool carried = c.carried && c.taps > 1;
  const auto history = [&](auto side) { return carried ? side(t.history) : TensorView(); };
  require_cuda_matches_cpu(both,
                           {&t.x, &t.y, &t.w, &t.history, &t.cu},
                           {{&t.y, elementwise_tolerance(c.dtype)}},
                           [&](auto side) {
                             return ShortConvForward{.y = side(t.y),
                                                     .x = side(t.x),
                                                     .w = side(t.w),
                                                     .history = history(side),
                                                     .cu_seqlens = side(t.cu),
                                                     .silu = c.silu};
                           });
  const Twin& dx = c.in_place ? t.dy : t.dx;
  require_cuda_matches_cpu(both,
                           {&t.x, &t.dy, &t.dx, &t.w, &t.dw, &t.history, &t.dhistory, &t.cu},
                           {{&dx, elementwise_tolerance(c.dtype)},
                            {&t.dw, c.frozen ? 0 : sum_tolerance(c.dtype)},
                            {&t.dhistory, carried ? elementwise_tolerance(c.dtype) : 0}},
                           [&](auto side) {
                             return ShortConvBackward{
                                 .dx = side(dx),
                                 .dw = c.frozen ? TensorView() : side(t.dw),
                                 .dhistory = carried ? side(t.dhistory) : TensorView(),
                                 .dy = side(t.dy),
                                 .x = side(t.x),
                                 .w = side(t.w),
                                 .history = history(side),
                                 .cu_seqlens = side(t.cu),
                                 .silu = c.silu};
                           });
  if (c.taps == 1 || c.of_first) return;
  const Twin& next = c.in_place && carried ? t.history : t.next;
  require_cuda_matches_cpu(both, {&t.x, &t.history, &t.next, &t.cu}, {{&next, 0}}, [&](auto side) {
    return ShortConvTail{
        .next = side(next), .x = side(t.x), .history = history(side), .cu_seqlens = side(t.cu)};
  });
}

const DType kTypes[][2] = {{DType::f64, DType::f64},
                           {DType::f32, DType::f32},
                           {DType::bf16, DType::bf16},
                           {DType::bf16, DType::f32}};

}  // namespace

TEST_CASE("Short convolution on CUDA: a history of the first document alone", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& type : kTypes) {
    for (const std::int64_t taps : {3, 4}) {
      check(both,
            {.cu = {0, 2, 30, 31, 97},
             .channels = 72,
             .taps = taps,
             .dtype = type[0],
             .weight_dtype = type[1],
             .of_first = true});
    }
  }
}

TEST_CASE("Short convolution on CUDA matches the CPU for all lengths of runs and documents",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  // A thread walks 16 tokens forward, 32 backward, a block of threads 128 and 256. Documents without tokens, shorter than
  // the taps, ending at and around the borders of runs.
  const std::vector<std::vector<std::int32_t>> documents = {{0, 0},
                                                            {0, 1},
                                                            {0, 3},
                                                            {0, 16},
                                                            {0, 33},
                                                            {0, 0, 1, 3, 3, 7, 16, 16, 17},
                                                            {0, 30, 31, 32, 33, 34, 64, 95, 97},
                                                            {0, 1, 2, 3, 4, 5, 5, 5, 6},
                                                            {0, 255, 257, 600, 600},
                                                            {0, 700}};
  int flags = 0;
  for (const auto& cu : documents) {
    for (const auto& type : kTypes) {
      for (const std::int64_t channels : {8, 72, 264}) {
        ++flags;
        check(both,
              {cu,
               channels,
               4,
               type[0],
               type[1],
               flags % 2 == 0,
               flags % 3 != 0,
               flags % 5 < 2,
               flags % 7 == 0});
      }
    }
  }
}

TEST_CASE("Short convolution on CUDA matches the CPU for all numbers of taps and channels",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const std::vector<std::int32_t> cu = {0, 2, 2, 37, 38, 81};
  int flags = 0;
  for (const std::int64_t taps : {1, 2, 3, 4, 5, 9, 32}) {
    for (const std::int64_t channels : {1, 5, 33, 64}) {
      for (const auto& type : kTypes) {
        ++flags;
        check(
            both,
            {cu, channels, taps, type[0], type[1], flags % 3 != 0, flags % 4 != 0, flags % 2 == 0});
      }
    }
  }
}

TEST_CASE("Short convolution on CUDA matches the CPU for a large shape", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  check(both, {{0, 100, 1500, 2048}, 1024, 4, DType::bf16, DType::f32, false, true, true});
}

TEST_CASE("Short convolution on CUDA handles views that are not 16-byte aligned", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Twin x({402, 2}, DType::bf16), y({402, 2}, DType::bf16), w({8, 4}, DType::bf16),
      cu({3}, DType::i32);
  fill_normal(x.initial.view(), 1);
  fill_normal(y.initial.view(), 2);
  fill_normal(w.initial.view(), 3);
  const std::int32_t borders[] = {0, 37, 100};
  std::copy_n(borders, 3, cu.initial.data<std::int32_t>());
  const auto shifted = [](TensorView v) {
    return v.rows(1, 401).reshaped({100, 8});
  };  // 4 bytes past the start
  require_cuda_matches_cpu(both, {&x, &y, &w, &cu}, {{&y, 1e-3}}, [&](auto side) {
    return ShortConvForward{
        .y = shifted(side(y)), .x = shifted(side(x)), .w = side(w), .cu_seqlens = side(cu)};
  });
}

TEST_CASE("A document's short convolution on CUDA has the same bits packed and alone", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Case c{{0, 45, 45, 46, 201}, 40, 4, DType::bf16, DType::f32};
  const ConvTwins t(c);
  for (const auto* twin : {&t.x, &t.w, &t.y, &t.cu, &t.history})
    twin->reset(both.cuda.stream());
  const auto forward = [&](TensorView y, TensorView x, TensorView history, TensorView cu) {
    run(both.cuda.backend(),
        ShortConvForward{
            .y = y, .x = x, .w = t.w.device.view(), .history = history, .cu_seqlens = cu});
    return download(y, both.cuda.stream());
  };
  const auto packed =
      forward(t.y.device.view(), t.x.device.view(), t.history.device.view(), t.cu.device.view());
  for (std::size_t n = 0; n + 1 < c.cu.size(); ++n) {
    const std::int64_t begin = c.cu[n], end = c.cu[n + 1];
    if (begin == end) continue;
    const Twin cu({2}, DType::i32);
    cu.initial.data<std::int32_t>()[0] = 0;
    cu.initial.data<std::int32_t>()[1] = static_cast<std::int32_t>(end - begin);
    cu.reset(both.cuda.stream());
    const auto row = static_cast<std::int64_t>(n);
    const auto alone = forward(t.y.device.view().rows(begin, end),
                               t.x.device.view().rows(begin, end),
                               t.history.device.view().rows(row, row + 1),
                               cu.device.view());
    CHECK(same_bits(alone.view(), packed.view().rows(begin, end)));
  }
}

}  // namespace moesaic::test
