#include "kernels/ops/grouped_gemm.h"

#include "tests/cuda/grouped_support.h"

namespace moesaic::test {
namespace {

const auto kOnHost = [](const Twin& t) { return t.host.view(); };
const auto kOnDevice = [](const Twin& t) { return t.device.view(); };

// Products of bf16 are exact in f32; what differs is the order of sums, and rounding to bf16 at its ends.
double tolerance(DType operand, DType result) {
  if (operand == DType::f64) return 1e-13;
  if (result == DType::bf16) return 3e-3;
  return 1e-5;
}

void check_plain(BothBackends& both,
                 const Routing& routing,
                 std::int64_t n,
                 std::int64_t k,
                 DType operand,
                 DType result,
                 bool accumulate) {
  INFO("n " << n << " k " << k << " " << name(operand) << " to " << name(result) << " accumulate "
            << accumulate);
  const GroupedTensors t(routing, n, k, operand, result);
  const PathChoice path(both.cuda, KernelPath::plain);
  const double limit = tolerance(operand, result);
  require_cuda_matches_cpu(
      both, t.all(), {{&t.y, limit}}, [&](auto side) { return t.forward(side, accumulate); });
  require_cuda_matches_cpu(both, t.all(), {{&t.dx, limit}}, [&](auto side) {
    return t.backward_input(side, accumulate);
  });
  require_cuda_matches_cpu(
      both, t.all(), {{&t.dw, limit}}, [&](auto side) { return t.backward_weight(side); });
  CHECK(path.ran() == "plain");
}

OwnedTensor widened(ConstTensorView from) {
  OwnedTensor to(from.shape(), DType::f64);
  dispatch_float(from.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < from.numel(); ++i)
      to.data<double>()[i] = static_cast<double>(from.as<T>()[i]);
  });
  return to;
}

double error_of(ConstTensorView got, ConstTensorView want) {
  return relative_error(widened(got).view(), want);
}

// The CPU's results in f64, from the initial values of `t`.
struct Reference {
  Reference(BothBackends& both, const GroupedTensors& t, bool accumulate)
      : y(widened(t.y.initial.view())),
        dx(widened(t.dx.initial.view())),
        dw(widened(t.dw.initial.view())) {
    const OwnedTensor x = widened(t.x.initial.view()), dy = widened(t.dy.initial.view()),
                      w = widened(t.w.initial.view());
    const TensorView offsets = t.offsets.initial.view(), slots = t.slots.initial.view();
    run(both.cpu.backend(),
        GroupedLinearForward{.y = y.view(),
                             .x = x.view(),
                             .w = w.view(),
                             .offsets = offsets,
                             .slot_of_expert = slots,
                             .accumulate = accumulate});
    run(both.cpu.backend(),
        GroupedLinearBackwardInput{.dx = dx.view(),
                                   .dy = dy.view(),
                                   .w = w.view(),
                                   .offsets = offsets,
                                   .slot_of_expert = slots,
                                   .accumulate = accumulate});
    run(both.cpu.backend(),
        GroupedLinearBackwardWeight{.dw = dw.view(),
                                    .dy = dy.view(),
                                    .x = x.view(),
                                    .offsets = offsets,
                                    .slot_of_expert = slots});
  }
  OwnedTensor y, dx, dw;
};

// Expert by expert: a wrong tail hides in the norm of a whole tensor.
void check_rows(const char* what,
                const Routing& routing,
                ConstTensorView got,
                ConstTensorView want,
                ConstTensorView initial,
                double limit) {
  const auto offsets = routing.offsets();
  for (std::size_t e = 0; e < routing.rows.size(); ++e) {
    if (routing.rows[e] == 0) continue;
    INFO(what << ", expert " << e << " with " << routing.rows[e] << " rows");
    CHECK(error_of(got.rows(offsets[e], offsets[e + 1]), want.rows(offsets[e], offsets[e + 1])) <=
          limit);
    INFO("its last row");
    CHECK(error_of(got.rows(offsets[e + 1] - 1, offsets[e + 1]),
                   want.rows(offsets[e + 1] - 1, offsets[e + 1])) <= 2 * limit);
  }
  INFO(what << ", rows that no expert has");
  CHECK(same_bits(got.rows(routing.rows_in_use(), routing.rows_bound()),
                  initial.rows(routing.rows_in_use(), routing.rows_bound())));
}

void check_slots(const Routing& routing,
                 ConstTensorView got,
                 ConstTensorView want,
                 ConstTensorView initial,
                 double limit) {
  std::vector<std::int32_t> rows_of_slot(static_cast<std::size_t>(routing.num_slots));
  for (std::size_t e = 0; e < routing.rows.size(); ++e)
    rows_of_slot[static_cast<std::size_t>(routing.slots[e])] = routing.rows[e];
  for (std::int64_t s = 0; s < routing.num_slots; ++s) {
    const auto rows = rows_of_slot[static_cast<std::size_t>(s)];
    INFO("dw, slot " << s << " with " << rows << " rows");
    if (rows == 0) {
      CHECK(same_bits(got.rows(s, s + 1), initial.rows(s, s + 1)));
    } else {
      CHECK(error_of(got.rows(s, s + 1), want.rows(s, s + 1)) <= limit);
    }
  }
}

void check_tiled(BothBackends& both,
                 const Routing& routing,
                 std::int64_t n,
                 std::int64_t k,
                 DType result,
                 bool accumulate) {
  INFO("n " << n << " k " << k << " bf16 to " << name(result) << " accumulate " << accumulate);
  const GroupedTensors t(routing, n, k, DType::bf16, result);
  const Reference want(both, t, accumulate);
  auto& stream = both.cuda.stream();
  const PathChoice path(both.cuda, KernelPath::automatic);
  const auto results = [&](const auto& op, const Twin& output) {
    for (const auto* twin : t.all())
      twin->reset(stream);
    run(both.cuda.backend(), op);
    CHECK(path.ran() == "tiled");
    return download(output.device.view(), stream);
  };
  const auto twice = [&](const auto& op, const Twin& output) {
    OwnedTensor first = results(op, output);
    CHECK(same_bits(first.view(), results(op, output).view()));
    return first;
  };
  const double limit = tolerance(DType::bf16, result);
  check_rows("y",
             routing,
             twice(t.forward(kOnDevice, accumulate), t.y).view(),
             want.y.view(),
             t.y.initial.view(),
             limit);
  check_rows("dx",
             routing,
             twice(t.backward_input(kOnDevice, accumulate), t.dx).view(),
             want.dx.view(),
             t.dx.initial.view(),
             limit);
  check_slots(routing,
              twice(t.backward_weight(kOnDevice), t.dw).view(),
              want.dw.view(),
              t.dw.initial.view(),
              limit);
}

// Every count around the steps of 16 rows, stages of 64 and tiles of 256; experts without rows first, last and between.
const std::vector<std::int32_t> kOddCounts = {0,   1,   15,  16,  17,  0,   31,  33,  63,  64,
                                              65,  100, 127, 128, 129, 0,   0,   150, 175, 190,
                                              200, 222, 239, 241, 255, 256, 257, 300, 513, 0};

}  // namespace

TEST_CASE("grouped products on CUDA, plain kernels, match the CPU", "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const DType types[][2] = {{DType::f64, DType::f64},
                            {DType::f32, DType::f32},
                            {DType::bf16, DType::bf16},
                            {DType::bf16, DType::f32}};
  const Routing few = routing_of({0, 3, 64, 0, 1, 65, 130, 0}, 20), one = routing_of({70}, 0),
                none = routing_of({0, 0, 0}, 5);
  for (const auto& type : types) {
    check_plain(both, few, 33, 70, type[0], type[1], false);
    check_plain(both, few, 128, 65, type[0], type[1], true);
    check_plain(both, one, 1, 1, type[0], type[1], true);
    check_plain(both, one, 64, 64, type[0], type[1], false);
    check_plain(both, none, 8, 24, type[0], type[1], false);
  }
}

TEST_CASE("grouped products on CUDA, tiled kernels, match the CPU in f64", "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Routing odd = routing_of(kOddCounts, 40);
  for (const DType result : {DType::bf16, DType::f32}) {
    for (const bool accumulate : {false, true}) {
      check_tiled(both, odd, 64, 64, result, accumulate);
      check_tiled(both, odd, 136, 328, result, accumulate);  // tails of every tile
    }
  }
  check_tiled(both, odd, 256, 512, DType::bf16, false);
  check_tiled(both, odd, 512, 256, DType::f32, false);
  check_tiled(both, odd, 392, 72, DType::bf16, false);
  check_tiled(both, odd, 72, 776, DType::f32, true);
}

TEST_CASE("grouped products on CUDA: all rows to one expert, one row, none", "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType result : {DType::bf16, DType::f32}) {
    check_tiled(both, routing_of({0, 0, 5000, 0}, 3), 128, 192, result, false);
    check_tiled(both, routing_of({0, 1, 0}, 0), 128, 192, result, true);
    check_tiled(both, routing_of({0, 0}, 9), 128, 192, result, false);
    check_tiled(both, routing_of({}, 9), 128, 192, result, false);
    check_tiled(both, routing_of({777}, 0), 320, 64, result, false);
  }
  // Tiles of 64, 96, 128 and 192 rows, each with its own number of stages, and experts that need several.
  const std::vector<std::int32_t> fewer[] = {{0, 17, 64, 90, 1, 33, 200, 0, 48},
                                             {40, 0, 75, 97, 80},
                                             {70, 80, 0, 100, 300, 16},
                                             {130, 120, 150, 0, 200}};
  for (const auto& rows : fewer) {
    check_tiled(both, routing_of(rows, 0), 136, 840, DType::bf16, false);
    check_tiled(both, routing_of(rows, 0), 264, 200, DType::f32, true);
  }
  // More experts than the list's kernel has threads.
  std::vector<std::int32_t> many(2500);
  for (std::size_t e = 0; e < many.size(); ++e)
    many[e] = static_cast<std::int32_t>(e * 7 % 5);
  check_tiled(both, routing_of(many, 1), 64, 64, DType::bf16, false);
}

TEST_CASE("grouped products on CUDA: sizes without a tensor map take the plain kernels",
          "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Routing few = routing_of({40, 0, 7}, 4);
  const std::int64_t sizes[][2] = {{100, 128}, {128, 100}, {56, 128}, {128, 56}};
  for (const auto& size : sizes) {
    const GroupedTensors t(few, size[0], size[1], DType::bf16, DType::f32);
    const PathChoice path(both.cuda, KernelPath::automatic);
    require_cuda_matches_cpu(
        both, t.all(), {{&t.y, 1e-5}}, [&](auto side) { return t.forward(side, false); });
    CHECK(path.ran() == "plain");
    require_cuda_matches_cpu(
        both, t.all(), {{&t.dx, 1e-5}}, [&](auto side) { return t.backward_input(side, false); });
    CHECK(path.ran() == "plain");
    require_cuda_matches_cpu(
        both, t.all(), {{&t.dw, 1e-5}}, [&](auto side) { return t.backward_weight(side); });
    CHECK(path.ran() == "plain");
  }
}

TEST_CASE("grouped products on CUDA: a row's bits do not depend on its expert's rows",
          "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  auto& stream = both.cuda.stream();
  constexpr std::int64_t kN = 200, kK = 1032;
  for (const KernelPath choice : {KernelPath::automatic, KernelPath::plain}) {
    const PathChoice path(both.cuda, choice);
    const Routing whole = routing_of({0, 700, 0}, 0);
    const GroupedTensors t(whole, kN, kK, DType::bf16, DType::f32);
    for (const auto* twin : t.all())
      twin->reset(stream);
    run(both.cuda.backend(), t.forward(kOnDevice, false));
    run(both.cuda.backend(), t.backward_input(kOnDevice, false));
    const OwnedTensor y = download(t.y.device.view(), stream),
                      dx = download(t.dx.device.view(), stream);
    const Twin offsets({4}, DType::i32);
    for (const std::int32_t rows : {1,   16,  20,  40,  55,  70,  90,  100, 120, 130,
                                    150, 170, 190, 200, 220, 230, 250, 257, 400, 600}) {
      INFO(rows << " rows of 700, " << (choice == KernelPath::plain ? "plain" : "tiled"));
      fill_ints(offsets.initial.view(), {0, 0, rows, rows});
      offsets.reset(stream);
      auto forward = t.forward(kOnDevice, false);
      auto backward = t.backward_input(kOnDevice, false);
      forward.offsets = backward.offsets = offsets.device.view();
      fill_bytes(t.y.device.view(), 0xff, stream);
      fill_bytes(t.dx.device.view(), 0xff, stream);
      run(both.cuda.backend(), forward);
      run(both.cuda.backend(), backward);
      CHECK(same_bits(download(t.y.device.view().rows(0, rows), stream).view(),
                      y.view().rows(0, rows)));
      CHECK(same_bits(download(t.dx.device.view().rows(0, rows), stream).view(),
                      dx.view().rows(0, rows)));
    }
  }
}

TEST_CASE("grouped products on CUDA: tensors beyond 2^31 elements", "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  auto& stream = both.cuda.stream();
  constexpr std::int64_t kSide = 128, kSlots = (std::int64_t{1} << 17) + 40,
                         kFar = (std::int64_t{1} << 24) + 77, kRows = 100;
  // Expert 0 fills 2^31 elements of rows; expert 1, far behind, is what is looked at. Its weights are in the last slot.
  const Routing near = routing_of({0, kRows}, 0);
  const GroupedTensors small(near, kSide, kSide, DType::bf16, DType::f32);
  const Reference want(both, small, false);
  const OwnedTensor x({kFar + kRows, kSide}, DType::bf16, kCuda),
      w({kSlots, kSide, kSide}, DType::bf16, kCuda);
  OwnedTensor y({kFar + kRows, kSide}, DType::bf16, kCuda);
  const Twin offsets({3}, DType::i32), slots({2}, DType::i32);
  fill_ints(offsets.initial.view(), {0, kFar, kFar + kRows});
  fill_ints(slots.initial.view(), {3, kSlots - 1});
  offsets.reset(stream);
  slots.reset(stream);
  const auto last_slot = [](TensorView view) { return view.rows(kSlots - 1, kSlots); };
  const auto last_rows = [](TensorView view) { return view.rows(kFar, kFar + kRows); };
  const auto small_slot = near.slots[1];
  for (const KernelPath choice : {KernelPath::automatic, KernelPath::plain}) {
    const PathChoice path(both.cuda, choice);
    zero_tensor(x.view(), stream);
    zero_tensor(w.view(), stream);
    copy_tensor(last_rows(x.view()), small.x.initial.view(), stream);
    copy_tensor(
        last_slot(w.view()), small.w.initial.view().rows(small_slot, small_slot + 1), stream);
    run(both.cuda.backend(),
        GroupedLinearForward{.y = y.view(),
                             .x = x.view(),
                             .w = w.view(),
                             .offsets = offsets.device.view(),
                             .slot_of_expert = slots.device.view()});
    CHECK(error_of(download(last_rows(y.view()), stream).view(), want.y.view()) <= 3e-3);
    copy_tensor(last_rows(x.view()), small.dy.initial.view(), stream);
    run(both.cuda.backend(),
        GroupedLinearBackwardInput{.dx = y.view(),
                                   .dy = x.view(),
                                   .w = w.view(),
                                   .offsets = offsets.device.view(),
                                   .slot_of_expert = slots.device.view()});
    CHECK(error_of(download(last_rows(y.view()), stream).view(), want.dx.view()) <= 3e-3);
  }
  {
    const OwnedTensor dw({kSlots, kSide, kSide}, DType::f32, kCuda);
    for (const KernelPath choice : {KernelPath::automatic, KernelPath::plain}) {
      const PathChoice path(both.cuda, choice);
      zero_tensor(x.view(), stream);
      zero_tensor(y.view(), stream);
      copy_tensor(last_rows(x.view()), small.x.initial.view(), stream);
      copy_tensor(last_rows(y.view()), small.dy.initial.view(), stream);
      copy_tensor(
          last_slot(dw.view()), small.dw.initial.view().rows(small_slot, small_slot + 1), stream);
      run(both.cuda.backend(),
          GroupedLinearBackwardWeight{.dw = dw.view(),
                                      .dy = y.view(),
                                      .x = x.view(),
                                      .offsets = offsets.device.view(),
                                      .slot_of_expert = slots.device.view()});
      CHECK(error_of(download(last_slot(dw.view()), stream).view(),
                     want.dw.view().rows(small_slot, small_slot + 1)) <= 1e-5);
    }
  }
}

}  // namespace moesaic::test
