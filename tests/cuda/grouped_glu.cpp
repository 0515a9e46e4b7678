#include "kernels/ops/grouped_glu.h"

#include <map>

#include "kernels/ops/permute.h"
#include "tests/cuda/grouped_support.h"

namespace moesaic::test {
namespace {

const auto kOnDevice = [](const Twin& t) { return t.device.view(); };

/// Which path each op took last.
struct Paths : PathObserver {
  void ran(const char* op, const char* path) override { of[op] = path; }
  std::map<std::string, std::string> of;
};

/// Operands of both ops: x [rows, k] to h [rows, width], and dy [rows, n] back through it. Rows that no expert has are NaN;
/// results start as random numbers.
struct GluTensors {
  GluTensors(const Routing& routing, std::int64_t k, std::int64_t width, std::int64_t n, DType type)
      : x({routing.rows_bound(), k}, type),
        dy({routing.rows_bound(), n}, type),
        up({routing.num_slots, 2 * width, k}, type),
        down({routing.num_slots, n, width}, type),
        gate_up({routing.rows_bound(), 2 * width}, type),
        dgate_up({routing.rows_bound(), 2 * width}, type),
        h({routing.rows_bound(), width}, type),
        weight({routing.rows_bound()}, acc(type)),
        dweight({routing.rows_bound()}, acc(type)),
        offsets({static_cast<std::int64_t>(routing.rows.size()) + 1}, DType::i32),
        slots({static_cast<std::int64_t>(routing.rows.size())}, DType::i32) {
    const double unit = 1 / std::sqrt(static_cast<double>(k));
    fill_normal(x.initial.view(), 1);
    fill_normal(dy.initial.view(), 2);
    fill_normal(up.initial.view(), 3, 3 * unit);
    // Far gates and ups in places, so that both limits and the sigmoid saturate.
    for (std::int64_t i = 0; i < x.initial.view().numel() / k; i += 7)
      fill_normal(x.initial.view().rows(i, i + 1), 100 + static_cast<std::uint64_t>(i), 15.0);
    fill_normal(down.initial.view(), 4, 1 / std::sqrt(static_cast<double>(n)));
    fill_normal(gate_up.initial.view(), 5, 3.0);
    fill_normal(dgate_up.initial.view(), 6);
    fill_normal(h.initial.view(), 7);
    fill_normal(weight.initial.view(), 8, 0.3, 0.5);
    fill_normal(dweight.initial.view(), 9);
    fill_ints(offsets.initial.view(), routing.offsets());
    fill_ints(slots.initial.view(), routing.slots);
    for (const Twin* t : {&x, &dy, &weight})
      poison(t->initial.view().rows(routing.rows_in_use(), routing.rows_bound()));
  }
  static DType acc(DType type) { return type == DType::f64 ? DType::f64 : DType::f32; }
  std::vector<const Twin*> all() const {
    return {&x, &dy, &up, &down, &gate_up, &dgate_up, &h, &weight, &dweight, &offsets, &slots};
  }
  template <class Side>
  GroupedGluForward forward(const Side& side, const GluActivation& activation, bool keep) const {
    return {.h = side(h),
            .gate_up = keep ? side(gate_up) : TensorView(),
            .x = side(x),
            .w = side(up),
            .offsets = side(offsets),
            .slot_of_expert = side(slots),
            .activation = activation};
  }
  template <class Side>
  GroupedGluBackward backward(const Side& side,
                              const GluActivation& activation,
                              bool weighted) const {
    return {.dgate_up = side(dgate_up),
            .drow_weight = weighted ? side(dweight) : TensorView(),
            .h = side(h),
            .dy = side(dy),
            .w = side(down),
            .gate_up = side(gate_up),
            .row_weight = weighted ? side(weight) : TensorView(),
            .offsets = side(offsets),
            .slot_of_expert = side(slots),
            .activation = activation,
            .weight_h = weighted};
  }
  Twin x, dy, up, down, gate_up, dgate_up, h, weight, dweight, offsets, slots;
};

void run_parts(BackendOwner& owner, const GroupedGluForward& op, const TensorView& middle) {
  run(owner.backend(),
      GroupedLinearForward{.y = middle,
                           .x = op.x,
                           .w = op.w,
                           .offsets = op.offsets,
                           .slot_of_expert = op.slot_of_expert});
  run(owner.backend(),
      GluForward{.h = op.h,
                 .gate_up = middle,
                 .row_count = rows_in_use(op.offsets),
                 .activation = op.activation});
}

void run_parts(BackendOwner& owner, const GroupedGluBackward& op, const TensorView& middle) {
  run(owner.backend(),
      GroupedLinearBackwardInput{.dx = middle,
                                 .dy = op.dy,
                                 .w = op.w,
                                 .offsets = op.offsets,
                                 .slot_of_expert = op.slot_of_expert});
  run(owner.backend(),
      GluBackward{.dgate_up = op.dgate_up,
                  .drow_weight = op.drow_weight,
                  .h = op.h,
                  .dh = middle,
                  .gate_up = op.gate_up,
                  .row_weight = op.row_weight,
                  .row_count = rows_in_use(op.offsets),
                  .activation = op.activation,
                  .weight_h = op.weight_h});
}

struct Rig {
  Rig() { both.cuda.observe_paths(&paths); }
  ~Rig() { both.cuda.observe_paths(nullptr); }
  void reset(const GluTensors& t) {
    for (const auto* twin : t.all())
      twin->reset(both.cuda.stream());
    both.cuda.scratch().poison(both.cuda.stream());
  }
  OwnedTensor result(const Twin& t) { return download(t.device.view(), both.cuda.stream()); }
  BothBackends both;
  Paths paths;
};

std::int64_t first_difference(const ConstTensorView& a, const ConstTensorView& b) {
  const auto size = static_cast<std::int64_t>(byte_size(a.dtype()));
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    if (std::memcmp(a.data() + i * size, b.data() + i * size, byte_size(a.dtype())) != 0) return i;
  }
  return -1;
}

// From here on backward is fused for any activation: what follows the products has the time of a long sum.
constexpr std::int64_t kLongSum = 3080;

// The bits of one op after the other, everywhere: also where no expert has rows.
void check_bits(Rig& rig,
                const Routing& routing,
                std::int64_t k,
                std::int64_t width,
                const GluActivation& activation,
                std::int64_t n = kLongSum) {
  INFO("k " << k << ", width " << width << ", situ " << (activation.kind == GluKind::situ) << ", "
            << routing.rows.size() << " experts, " << routing.rows_in_use() << " rows");
  const GluTensors t(routing, k, width, n, DType::bf16);
  const OwnedTensor middle({routing.rows_bound(), 2 * width}, DType::bf16, kCuda);
  const auto same = [&](const char* what, const Twin& twin, const OwnedTensor& want) {
    INFO(what << " differs from element "
              << first_difference(rig.result(twin).view(), want.view()));
    CHECK(same_bits(rig.result(twin).view(), want.view()));
  };
  rig.reset(t);
  run_parts(rig.both.cuda, t.forward(kOnDevice, activation, true), t.gate_up.device.view());
  const OwnedTensor h = rig.result(t.h), gate_up = rig.result(t.gate_up);
  CHECK(rig.paths.of["grouped_linear_forward"] == "tiled");
  for (const bool keep : {true, false}) {
    rig.reset(t);
    run(rig.both.cuda.backend(), t.forward(kOnDevice, activation, keep));
    CHECK(rig.paths.of["grouped_glu_forward"] == "fused");
    same("h", t.h, h);
    same("gate_up", t.gate_up, keep ? gate_up : t.gate_up.initial);
  }
  for (const bool weighted : {true, false}) {
    INFO("with row weights " << weighted);
    rig.reset(t);
    run_parts(
        rig.both.cuda,
        t.backward(kOnDevice, activation, weighted),
        middle.view().reshaped({2 * routing.rows_bound(), width}).rows(0, routing.rows_bound()));
    const OwnedTensor dgate_up = rig.result(t.dgate_up), dh = rig.result(t.h),
                      dweight = rig.result(t.dweight);
    CHECK(rig.paths.of["grouped_linear_backward_input"] == "tiled");
    rig.reset(t);
    run(rig.both.cuda.backend(), t.backward(kOnDevice, activation, weighted));
    CHECK(rig.paths.of["grouped_glu_backward"] == (n >= kLongSum ? "fused" : "separate"));
    same("dgate_up", t.dgate_up, dgate_up);
    same("h of backward", t.h, dh);
    same("drow_weight", t.dweight, dweight);
    rig.reset(t);
    auto in_place = t.backward(kOnDevice, activation, weighted);
    in_place.dgate_up = t.gate_up.device.view();
    run(rig.both.cuda.backend(), in_place);
    CHECK(same_bits(rig.result(t.gate_up).view().rows(0, routing.rows_in_use()),
                    dgate_up.view().rows(0, routing.rows_in_use())));
    same("h of backward in place", t.h, dh);
    same("drow_weight in place", t.dweight, dweight);
  }
}

void check_cpu(Rig& rig,
               const Routing& routing,
               std::int64_t k,
               std::int64_t width,
               std::int64_t n,
               DType type,
               const GluActivation& activation,
               const std::string& path) {
  INFO(name(type) << ", k " << k << ", width " << width << ", n " << n);
  const GluTensors t(routing, k, width, n, type);
  // bf16: two roundings on both sides, of sums in other orders; far gates make errors of their exponents.
  const double limit = type == DType::f64 ? 1e-12 : type == DType::f32 ? 3e-5 : 6e-3;
  for (const bool keep : {true, false}) {
    std::vector<Output> outputs{{&t.h, limit}};
    if (keep) outputs.push_back({&t.gate_up, limit});
    require_cuda_matches_cpu(
        rig.both, t.all(), outputs, [&](auto side) { return t.forward(side, activation, keep); });
    CHECK(rig.paths.of["grouped_glu_forward"] == path);
  }
  for (const bool weighted : {true, false}) {
    std::vector<Output> outputs{{&t.dgate_up, limit}, {&t.h, limit}};
    if (weighted) outputs.push_back({&t.dweight, limit});
    require_cuda_matches_cpu(rig.both, t.all(), outputs, [&](auto side) {
      return t.backward(side, activation, weighted);
    });
    CHECK(rig.paths.of["grouped_glu_backward"] == path);
  }
}

const GluActivation kActivations[] = {{.kind = GluKind::swiglu},
                                      {.kind = GluKind::situ, .beta1 = 4.0, .beta2 = 25.0},
                                      {.kind = GluKind::situ, .beta1 = 1.5, .beta2 = 2.0}};
// Every count around the steps of 16 rows, stages of 64 and tiles of 192; experts without rows first, last and between.
const std::vector<std::int32_t> kOddCounts = {0,   1,   15,  16,  17,  0,   31,  33,  63,  64,
                                              65,  100, 127, 128, 129, 0,   0,   150, 175, 190,
                                              192, 193, 239, 241, 255, 256, 257, 300, 577, 0};

}  // namespace

TEST_CASE("grouped GLU on CUDA, fused, has the bits of product and activation", "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  Rig rig;
  const Routing odd = routing_of(kOddCounts, 40);
  for (const auto& activation : kActivations) {
    check_bits(rig, odd, 64, 64, activation);
    check_bits(rig, odd, 136, 72, activation);  // tails of everything
    check_bits(rig, odd, 328, 200, activation);
    // Wide rows: drow_weight in 16 classes.
    check_bits(rig, routing_of({0, 33, 200, 17}, 5), 200, 1096, activation);
  }
  check_bits(rig, odd, 1032, 64, kActivations[0]);  // a long sum
  check_bits(rig, routing_of({0, 0, 5000, 0}, 3), 128, 192, kActivations[1]);
  check_bits(rig, routing_of({0, 1, 0}, 0), 128, 192, kActivations[0]);
  check_bits(rig, routing_of({0, 0}, 9), 128, 192, kActivations[1]);
  check_bits(rig, routing_of({777}, 0), 320, 64, kActivations[1]);
  // Tiles of 32, 64, 96, 128 and 192 rows, each with its own number of stages, and experts that need several.
  const std::vector<std::int32_t> fewer[] = {{0, 17, 24, 9, 1, 33, 20, 0, 8},
                                             {0, 17, 64, 90, 1, 33, 200, 0, 48},
                                             {40, 0, 75, 97, 80},
                                             {70, 80, 0, 100, 300, 16},
                                             {130, 120, 150, 0, 200}};
  for (const auto& rows : fewer)
    check_bits(rig, routing_of(rows, 0), 840, 136, kActivations[1]);
  // More experts than the list's kernel has threads.
  std::vector<std::int32_t> many(2500);
  for (std::size_t e = 0; e < many.size(); ++e)
    many[e] = static_cast<std::int32_t>(e * 7 % 5);
  check_bits(rig, routing_of(many, 1), 64, 64, kActivations[1], 64);
}

TEST_CASE("grouped GLU on CUDA matches the CPU, on either path", "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  Rig rig;
  const Routing few = routing_of({0, 3, 64, 0, 1, 65, 130, 0}, 20);
  for (const auto& activation : kActivations) {
    check_cpu(rig, few, 72, 136, kLongSum, DType::bf16, activation, "fused");
    check_cpu(rig, few, 72, 132, kLongSum, DType::bf16, activation, "separate");  // no pieces of 8
    check_cpu(rig, few, 36, 64, 36, DType::bf16, activation, "separate");         // too short a sum
    check_cpu(rig, few, 40, 24, 40, DType::f32, activation, "separate");
    check_cpu(rig, few, 40, 24, 40, DType::f64, activation, "separate");
  }
}

TEST_CASE("grouped GLU on CUDA: a thousand runs have the same bits", "[cuda][repeat]") {
  MOESAIC_NEEDS_CUDA();
  const char* text = std::getenv("MOESAIC_REPEATS");
  const int repeats = text == nullptr ? 1000 : std::max(1, std::atoi(text));
  Rig rig;
  for (const auto& rows : {std::vector<std::int32_t>{0, 17, 64, 90, 1, 33, 0, 48},
                           std::vector<std::int32_t>{190, 0, 300, 75}}) {
    const GluTensors t(routing_of(rows, 0), 456, 264, kLongSum, DType::bf16);
    std::vector<OwnedTensor> first;
    int other = 0;
    for (int i = 0; i < repeats; ++i) {
      if (i == 0) rig.reset(t);
      fill_bytes(t.h.device.view(), 0xff, rig.both.cuda.stream());
      fill_bytes(t.gate_up.device.view(), 0xff, rig.both.cuda.stream());
      fill_bytes(t.dgate_up.device.view(), 0xff, rig.both.cuda.stream());
      fill_bytes(t.dweight.device.view(), 0xff, rig.both.cuda.stream());
      run(rig.both.cuda.backend(), t.forward(kOnDevice, kActivations[1], true));
      run(rig.both.cuda.backend(), t.backward(kOnDevice, kActivations[1], true));
      if (i % 10 != 0) continue;
      std::size_t at = 0;
      for (const Twin* twin : {&t.h, &t.gate_up, &t.dgate_up, &t.dweight}) {
        auto got = rig.result(*twin);
        if (i == 0) {
          first.push_back(std::move(got));
        } else {
          other += same_bits(got.view(), first[at++].view()) ? 0 : 1;
        }
      }
    }
    CHECK(other == 0);
  }
}

TEST_CASE("grouped GLU on CUDA: tensors beyond 2^31 elements", "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  Rig rig;
  auto& stream = rig.both.cuda.stream();
  constexpr std::int64_t kSide = 64, kWidth = 1032, kLong = 2056, kRows = 100,
                         kFar = (std::int64_t{1} << 20) + 77;
  // Expert 0's rows, zeros, fill more than 2^31 elements of gate_up; expert 1, behind them, is what is looked at.
  const Routing near = routing_of({0, kRows}, 0);
  const GluTensors t(near, kSide, kWidth, kLong, DType::bf16);
  rig.reset(t);
  run(rig.both.cuda.backend(), t.forward(kOnDevice, kActivations[0], true));
  const OwnedTensor h = rig.result(t.h), gate_up = rig.result(t.gate_up);
  run(rig.both.cuda.backend(), t.backward(kOnDevice, kActivations[0], true));
  const OwnedTensor dgate_up = rig.result(t.dgate_up), dh = rig.result(t.h),
                    dweight = rig.result(t.dweight);
  const OwnedTensor x({kFar + kRows, kSide}, DType::bf16, kCuda),
      dy({kFar + kRows, kLong}, DType::bf16, kCuda),
      wide({kFar + kRows, 2 * kWidth}, DType::bf16, kCuda),
      dwide({kFar + kRows, 2 * kWidth}, DType::bf16, kCuda),
      narrow({kFar + kRows, kWidth}, DType::bf16, kCuda), weight({kFar + kRows}, DType::f32, kCuda),
      sums({kFar + kRows}, DType::f32, kCuda);
  const auto last = [](const OwnedTensor& of) { return of.view().rows(kFar, kFar + kRows); };
  const Twin offsets({3}, DType::i32);
  fill_ints(offsets.initial.view(), {0, kFar, kFar + kRows});
  offsets.reset(stream);
  for (const OwnedTensor* of : {&x, &dy, &wide, &dwide, &narrow, &weight, &sums})
    zero_tensor(of->view(), stream);
  copy_tensor(last(x), t.x.initial.view(), stream);
  copy_tensor(last(weight), t.weight.initial.view(), stream);
  auto forward = t.forward(kOnDevice, kActivations[0], true);
  forward.h = narrow.view();
  forward.gate_up = wide.view();
  forward.x = x.view();
  forward.offsets = offsets.device.view();
  run(rig.both.cuda.backend(), forward);
  CHECK(same_bits(download(last(narrow), stream).view(), h.view()));
  CHECK(same_bits(download(last(wide), stream).view(), gate_up.view()));
  copy_tensor(last(dy), t.dy.initial.view(), stream);
  auto backward = t.backward(kOnDevice, kActivations[0], true);
  backward.dgate_up = dwide.view();
  backward.h = narrow.view();
  backward.dy = dy.view();
  backward.gate_up = wide.view();
  backward.row_weight = weight.view();
  backward.drow_weight = sums.view();
  backward.offsets = offsets.device.view();
  run(rig.both.cuda.backend(), backward);
  CHECK(rig.paths.of["grouped_glu_backward"] == "fused");
  CHECK(same_bits(download(last(dwide), stream).view(), dgate_up.view()));
  CHECK(same_bits(download(last(narrow), stream).view(), dh.view()));
  CHECK(same_bits(download(last(sums), stream).view(), dweight.view()));
}

}  // namespace moesaic::test
