// On the device, ops on masters that are split into weight and remainder leave the bits that they leave on f32 masters
// (which other tests compare with the CPU).
#include <cstdio>
#include <vector>

#include "core/base/split_float.h"
#include "kernels/ops/adamw.h"
#include "kernels/ops/clip.h"
#include "kernels/ops/initial_values.h"
#include "kernels/ops/muon.h"
#include "kernels/ops/qk_clip.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

// A tensor on the device with these values of the host.
OwnedTensor uploaded(ConstTensorView host, Stream& stream) {
  OwnedTensor device(host.shape(), host.dtype(), kCuda);
  copy_tensor(device.view(), host, stream);
  stream.synchronize();
  return device;
}
OwnedTensor normal(Shape shape,
                   DType dtype,
                   std::uint64_t key,
                   Stream& stream,
                   double spread = 1,
                   double mean = 0) {
  const OwnedTensor host(shape, dtype);
  fill_normal(host.view(), key, spread, mean);
  return uploaded(host.view(), stream);
}
OwnedTensor scalars_of(const StepScalars& values, Stream& stream) {
  const OwnedTensor host({kNumStepScalars}, DType::f32);
  values.write(host.view());
  return uploaded(host.view(), stream);
}

struct Split {
  Split(ConstTensorView master, Stream& stream) {
    const OwnedTensor host = download(master, stream);
    const OwnedTensor high(master.shape(), DType::bf16), low(master.shape(), DType::u16);
    for (std::int64_t i = 0; i < master.numel(); ++i)
      split_float(host.data<float>()[i], high.data<bf16>()[i], low.data<std::uint16_t>()[i]);
    weight = uploaded(high.view(), stream);
    remainder = uploaded(low.view(), stream);
  }
  OwnedTensor weight, remainder;
};

// The pair has the bits of the master that is split on the host.
void check_same(const Split& split, ConstTensorView master, Stream& stream) {
  const Split want(master, stream);
  CHECK(same_bits(download(split.weight.view(), stream).view(),
                  download(want.weight.view(), stream).view()));
  CHECK(same_bits(download(split.remainder.view(), stream).view(),
                  download(want.remainder.view(), stream).view()));
}
void check_same_tensors(const OwnedTensor& a, const OwnedTensor& b, Stream& stream) {
  CHECK(same_bits(download(a.view(), stream).view(), download(b.view(), stream).view()));
}

}  // namespace

TEST_CASE("split masters on CUDA: AdamW has the bits of f32 masters", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  Stream& stream = both.cuda.stream();
  for (const std::int64_t n : {1, 3, 4, 257, 1000003}) {
    for (const DType gradient : {DType::f32, DType::bf16}) {
      const OwnedTensor w = normal({n}, DType::f32, 1, stream, 0.05),
                        m = normal({n}, DType::f32, 2, stream, 0.1),
                        v = normal({n}, DType::f32, 3, stream, 0.001, 0.01);
      const OwnedTensor m2 = uploaded(download(m.view(), stream).view(), stream),
                        v2 = uploaded(download(v.view(), stream).view(), stream);
      const Split split(w.view(), stream);
      for (int t = 1; t <= 4; ++t) {
        INFO(n << " elements, gradient " << name(gradient) << ", step " << t);
        const OwnedTensor dw = normal({n}, gradient, 10 + static_cast<std::uint64_t>(t), stream);
        const OwnedTensor scalars = scalars_of({.learning_rate = 1e-2,
                                                .weight_decay_scale = 0.5,
                                                .bias_correction1 = bias_correction(0.9, t),
                                                .bias_correction2 = bias_correction(0.95, t),
                                                .clip_factor = 0.3,
                                                .skip = t == 3 ? 1.0 : 0.0},
                                               stream);
        run(both.cuda.backend(),
            AdamW{.w = w.view(),
                  .m = m.view(),
                  .v = v.view(),
                  .dw = dw.view(),
                  .scalars = scalars.view(),
                  .weight_decay = 0.1});
        run(both.cuda.backend(),
            AdamW{.m = m2.view(),
                  .v = v2.view(),
                  .w_compute = split.weight.view(),
                  .remainder = split.remainder.view(),
                  .dw = dw.view(),
                  .scalars = scalars.view(),
                  .weight_decay = 0.1});
        stream.synchronize();
        check_same(split, w.view(), stream);
        check_same_tensors(m, m2, stream);
        check_same_tensors(v, v2, stream);
      }
    }
  }
}

TEST_CASE("split masters on CUDA: AdamW by ranges that no vector access fits", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  Stream& stream = both.cuda.stream();
  constexpr std::int64_t kNumElements = 1001;
  const OwnedTensor w = normal({kNumElements}, DType::f32, 1, stream),
                    m = normal({kNumElements}, DType::f32, 2, stream, 0.1),
                    v = normal({kNumElements}, DType::f32, 3, stream, 0.001, 0.01),
                    dw = normal({kNumElements}, DType::f32, 4, stream),
                    scalars = scalars_of({.learning_rate = 1e-2}, stream);
  const OwnedTensor m2 = uploaded(download(m.view(), stream).view(), stream),
                    v2 = uploaded(download(v.view(), stream).view(), stream);
  const Split split(w.view(), stream);
  run(both.cuda.backend(),
      AdamW{
          .w = w.view(), .m = m.view(), .v = v.view(), .dw = dw.view(), .scalars = scalars.view()});
  const std::int64_t borders[] = {0, 1, 5, 333, 1000, kNumElements};
  for (int i = 0; i < 5; ++i) {
    const auto range = [&](const OwnedTensor& t) {
      return t.view().rows(borders[i], borders[i + 1]);
    };
    run(both.cuda.backend(),
        AdamW{.m = range(m2),
              .v = range(v2),
              .w_compute = range(split.weight),
              .remainder = range(split.remainder),
              .dw = range(dw),
              .scalars = scalars.view()});
  }
  stream.synchronize();
  check_same(split, w.view(), stream);
}

TEST_CASE("split masters on CUDA: Muon has the bits of f32 masters", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  Stream& stream = both.cuda.stream();
  struct Case {
    Shape shape;
    std::vector<RowBlock> blocks;
  };
  // Plain and tensor-core products, both orientations, blocks.
  for (const Case& c : {Case{{1, 70, 65}, {}},
                        Case{{3, 9, 5}, {}},
                        Case{{2, 256, 640}, {}},
                        Case{{1, 200, 136}, {}},
                        Case{{2, 96, 40}, head_row_blocks(3, {8, 24})}}) {
    for (const DType gradient : {DType::f32, DType::bf16}) {
      const OwnedTensor w = normal(c.shape, DType::f32, 21, stream, 0.05),
                        m = normal(c.shape, DType::f32, 22, stream);
      const OwnedTensor m2 = uploaded(download(m.view(), stream).view(), stream);
      const Split split(w.view(), stream);
      for (int t = 0; t < 3; ++t) {
        INFO(to_string(c.shape) << ", gradient " << name(gradient) << ", step " << t);
        const OwnedTensor dw =
            normal(c.shape, gradient, 30 + static_cast<std::uint64_t>(t), stream);
        const OwnedTensor scalars = scalars_of({.learning_rate = 0.02,
                                                .weight_decay_scale = 0.5,
                                                .clip_factor = 0.75,
                                                .skip = t == 1 ? 1.0 : 0.0},
                                               stream);
        run(both.cuda.backend(),
            MuonUpdate{.w = w.view(),
                       .momentum = m.view(),
                       .dw = dw.view(),
                       .scalars = scalars.view(),
                       .blocks = c.blocks,
                       .weight_decay = 0.1});
        run(both.cuda.backend(),
            MuonUpdate{.momentum = m2.view(),
                       .w_compute = split.weight.view(),
                       .remainder = split.remainder.view(),
                       .dw = dw.view(),
                       .scalars = scalars.view(),
                       .blocks = c.blocks,
                       .weight_decay = 0.1});
        stream.synchronize();
        check_same(split, w.view(), stream);
        check_same_tensors(m, m2, stream);
      }
    }
  }
}

TEST_CASE("split masters on CUDA: the moving average has the bits of f32 masters", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  Stream& stream = both.cuda.stream();
  for (const std::int64_t n : {1, 1003, 100000}) {
    INFO(n << " elements");
    const OwnedTensor w = normal({n}, DType::f32, 43, stream),
                      a = normal({n}, DType::f32, 44, stream);
    const OwnedTensor b = uploaded(download(a.view(), stream).view(), stream);
    const Split split(w.view(), stream);
    run(both.cuda.backend(), MovingAverage{.average = a.view(), .w = w.view(), .decay = 0.99});
    run(both.cuda.backend(),
        MovingAverage{.average = b.view(),
                      .w = split.weight.view(),
                      .remainder = split.remainder.view(),
                      .decay = 0.99});
    stream.synchronize();
    check_same_tensors(a, b, stream);
  }
}

TEST_CASE("split masters on CUDA: QK-clip and initial values have the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t columns : {64, 33}) {
    constexpr std::int64_t kHeads = 7, kDn = 16, kDr = 8, kDv = 12;
    const Shape q_shape{kHeads * (kDn + kDr), columns}, kv_shape{kHeads * (kDn + kDv), columns};
    const Twin q(q_shape, DType::bf16), q_low(q_shape, DType::u16), kv(kv_shape, DType::bf16),
        kv_low(kv_shape, DType::u16), largest({kHeads}, DType::f32);
    std::uint64_t key = 1;
    for (const auto& [high, low] : {std::pair{&q, &q_low}, {&kv, &kv_low}}) {
      const OwnedTensor master(high->initial.view().shape(), DType::f32);
      fill_normal(master.view(), key++);
      for (std::int64_t i = 0; i < master.view().numel(); ++i)
        split_float(master.data<float>()[i],
                    high->initial.data<bf16>()[i],
                    low->initial.data<std::uint16_t>()[i]);
    }
    fill_normal(largest.initial.view(), 3, 60.0, 100.0);
    largest.initial.data<float>()[2] = NAN;
    require_cuda_matches_cpu(both,
                             {&q, &q_low, &kv, &kv_low, &largest},
                             {{&q, 0}, {&q_low, 0}, {&kv, 0}, {&kv_low, 0}},
                             [&](auto side) {
                               return QkClip{.q_weight = side(q),
                                             .kv_b_weight = side(kv),
                                             .q_remainder = side(q_low),
                                             .kv_b_remainder = side(kv_low),
                                             .max_logit = side(largest),
                                             .dn = kDn,
                                             .dr = kDr,
                                             .dv = kDv,
                                             .tau = 100.0};
                             });
  }
  for (const std::int64_t n : {1, 300001}) {
    const Twin y({n}, DType::bf16), low({n}, DType::u16);
    require_cuda_matches_cpu(both, {&y, &low}, {{&y, 0}, {&low, 0}}, [&](const auto& side) {
      return InitialValues{.y = side(y), .remainder = side(low), .a = 0.02, .key = 99};
    });
  }
}

}  // namespace moesaic::test
