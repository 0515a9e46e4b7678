// Per-head linear maps on CUDA against the CPU.
#include "kernels/ops/head_linear.h"

#include "tests/ops/attention_support.h"
#include "tests/support/catch.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

using attention_test::distance;
using attention_test::Memory;
using attention_test::normal;
using attention_test::rounded;
using attention_test::Values;

struct Size {
  std::int64_t tokens, heads, channels_x, channels_y, begin_x, begin_y, block, row_begin, m, n;
};

Values random(std::int64_t n, std::uint64_t key) {
  return rounded(normal(static_cast<std::size_t>(n), key));
}

}  // namespace

TEST_CASE("Per-head linear maps on CUDA match the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BackendOwner owner({.device = kCuda, .scratch_bytes = std::size_t{64} << 20, .name = "cuda"});
  Stream& stream = owner.stream();
  std::vector<OwnedTensor> tensors;
  const auto upload = [&](ConstTensorView host) {
    tensors.emplace_back(host.shape(), host.dtype(), kCuda);
    copy_tensor(tensors.back().view(), host, stream);
    stream.synchronize();
    return tensors.back().view();
  };
  for (const Size& s : {Size{70, 3, 7, 9, 2, 1, 8, 3, 4, 6},
                        Size{1, 2, 192, 576, 0, 0, 256, 0, 128, 512},
                        Size{200, 4, 128, 512, 0, 0, 256, 128, 128, 512}}) {
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
      for (const bool transpose : {false, true}) {
        for (const bool wide : {false, true}) {
          INFO(s.m << " x " << s.n << ", " << name(dtype) << (transpose ? ", transposed" : "")
                   << (wide ? ", wide" : ""));
          const DType result = wide && dtype == DType::bf16 ? DType::f32 : dtype;
          Memory m;
          const auto xs = transpose ? s.channels_y : s.channels_x,
                     ys = transpose ? s.channels_x : s.channels_y;
          const TensorView x =
              m.floats(random(s.tokens * s.heads * xs, 1), {s.tokens, s.heads, xs}, dtype);
          const TensorView w =
              m.floats(random(s.heads * s.block * s.n, 2), {s.heads * s.block, s.n}, dtype);
          const TensorView y =
              m.floats(random(s.tokens * s.heads * ys, 3), {s.tokens, s.heads, ys}, result);
          HeadLinear op{.y = {y, transpose ? s.begin_x : s.begin_y},
                        .x = {x, transpose ? s.begin_y : s.begin_x},
                        .w = w,
                        .row_begin = s.row_begin,
                        .m = s.m,
                        .transpose_w = transpose};
          HeadLinear there = op;
          there.y.x = upload(y), there.x.x = upload(x), there.w = upload(w);
          attention_test::run_once(op);
          run(owner.backend(), there);
          const double limit = result == DType::f64 ? 1e-13 : result == DType::f32 ? 2e-6 : 4e-3;
          CHECK(distance(attention_test::read(download(there.y.x, stream).view()),
                         attention_test::read(y)) <= limit);

          if (transpose) continue;
          const TensorView b =
              m.floats(random(s.tokens * s.heads * ys, 4), {s.tokens, s.heads, ys}, dtype);
          const TensorView dw =
              m.floats(random(s.heads * s.block * s.n, 5), {s.heads * s.block, s.n}, result);
          HeadLinearBackwardWeight weight{.dw = dw,
                                          .a = {x, s.begin_x},
                                          .b = {b, s.begin_y},
                                          .row_begin = s.row_begin,
                                          .m = s.m};
          HeadLinearBackwardWeight weight_there = weight;
          weight_there.dw = upload(dw), weight_there.a.x = upload(x), weight_there.b.x = upload(b);
          attention_test::run_once(weight);
          run(owner.backend(), weight_there);
          CHECK(distance(attention_test::read(download(weight_there.dw, stream).view()),
                         attention_test::read(dw)) <= limit);
          stream.synchronize();
          tensors.clear();
        }
      }
    }
  }
}

}  // namespace moesaic::test
