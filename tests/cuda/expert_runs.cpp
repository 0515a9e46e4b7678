// The experts' kernels on some of the experts at a time: the bits of one call, whatever lies in the rows of others.
#include "kernels/ops/grouped_glu.h"
#include "tests/cuda/grouped_support.h"

namespace moesaic::test {
namespace {

const auto kOnDevice = [](const Twin& t) { return t.device.view(); };

struct Run {
  std::int64_t begin, end;
};

// Several ops on one routing, a run of experts at a time, from the first on and, as in backward, from the last.
class Runs {
 public:
  Runs(BackendOwner& owner, const Routing& routing) : owner_(owner), routing_(routing) {}

  /// `op` is the call with all experts; `rows` are its operands that are rows of tokens, `results` what it writes. All runs
  /// together leave what one call leaves.
  template <class Op>
  void check(const Op& op,
             const std::vector<const Twin*>& rows,
             const std::vector<const Twin*>& results) {
    const auto experts = static_cast<std::int64_t>(routing_.rows.size());
    std::vector<OwnedTensor> one;
    reset(rows, results);
    moesaic::run(owner_.backend(), op);
    for (const Twin* twin : results)
      one.push_back(download(twin->device.view(), owner_.stream()));
    for (const std::int64_t size : {1, 2, 3, 7}) {
      for (const bool descending : {false, true}) {
        INFO(Op::kName << ", runs of " << size << (descending ? ", descending" : ""));
        reset(rows, results);
        const std::int64_t runs = (experts + size - 1) / size;
        for (std::int64_t i = 0; i < runs; ++i) {
          const std::int64_t begin = (descending ? runs - 1 - i : i) * size;
          const Run run{begin, std::min(experts, begin + size)};
          for (const Twin* twin : rows)
            leave_rows(*twin, run);
          Op part = op;
          part.offsets = op.offsets.rows(run.begin, run.end + 1);
          part.slot_of_expert = op.slot_of_expert.rows(run.begin, run.end);
          moesaic::run(owner_.backend(), part);
        }
        for (std::size_t i = 0; i < results.size(); ++i) {
          INFO("result " << i);
          CHECK(same_bits(download(results[i]->device.view(), owner_.stream()).view(),
                          one[i].view()));
        }
      }
    }
  }

 private:
  void reset(const std::vector<const Twin*>& rows, const std::vector<const Twin*>& results) {
    for (const auto* twins : {&rows, &results}) {
      for (const Twin* twin : *twins)
        twin->reset(owner_.stream());
    }
    owner_.scratch().poison(owner_.stream());
  }
  // NaN in the rows of all other experts.
  void leave_rows(const Twin& twin, const Run& run) {
    const auto offsets = routing_.offsets();
    const std::int64_t begin = offsets[static_cast<std::size_t>(run.begin)],
                       end = offsets[static_cast<std::size_t>(run.end)];
    fill_bytes(twin.device.view(), 0xff, owner_.stream());
    if (begin < end)
      copy_tensor(twin.device.view().rows(begin, end),
                  twin.initial.view().rows(begin, end),
                  owner_.stream());
  }
  BackendOwner& owner_;
  const Routing& routing_;
};

void check_products(BothBackends& both,
                    const Routing& routing,
                    std::int64_t n,
                    std::int64_t k,
                    DType operand,
                    DType result,
                    KernelPath choice) {
  INFO("n " << n << " k " << k << " " << name(operand) << " to " << name(result));
  const PathChoice path(both.cuda, choice);
  const GroupedTensors t(routing, n, k, operand, result);
  for (const Twin* twin : t.all())
    twin->reset(both.cuda.stream());
  Runs runs(both.cuda, routing);
  for (const bool accumulate : {false, true}) {
    runs.check(t.forward(kOnDevice, accumulate), {&t.x}, {&t.y});
    runs.check(t.backward_input(kOnDevice, accumulate), {&t.dy}, {&t.dx});
  }
  runs.check(t.backward_weight(kOnDevice), {&t.x, &t.dy}, {&t.dw});
  CHECK(path.ran() == (choice == KernelPath::plain ? "plain" : "tiled"));
}

struct GluOperands {
  GluOperands(
      const Routing& routing, std::int64_t k, std::int64_t width, std::int64_t n, DType type)
      : x({routing.rows_bound(), k}, type),
        dy({routing.rows_bound(), n}, type),
        up({routing.num_slots, 2 * width, k}, type),
        down({routing.num_slots, n, width}, type),
        gate_up({routing.rows_bound(), 2 * width}, type),
        wide({routing.rows_bound(), 2 * width}, type),
        h({routing.rows_bound(), width}, type),
        weight({routing.rows_bound()}, type == DType::f64 ? DType::f64 : DType::f32),
        sums(weight.initial.view().shape(), weight.initial.view().dtype()),
        offsets({static_cast<std::int64_t>(routing.rows.size()) + 1}, DType::i32),
        slots({static_cast<std::int64_t>(routing.rows.size())}, DType::i32) {
    std::uint64_t key = 0;
    for (const Twin* twin : {&x, &dy, &up, &down, &gate_up, &wide, &h, &weight, &sums})
      fill_normal(twin->initial.view(), ++key, 0.5);
    fill_ints(offsets.initial.view(), routing.offsets());
    fill_ints(slots.initial.view(), routing.slots);
  }
  Twin x, dy, up, down, gate_up, wide, h, weight, sums, offsets, slots;
};

void check_glu(BothBackends& both,
               const Routing& routing,
               std::int64_t k,
               std::int64_t width,
               std::int64_t n,
               DType type,
               const GluActivation& activation,
               const std::string& expected) {
  INFO("k " << k << " width " << width << " n " << n << " " << name(type) << " " << expected);
  const PathChoice path(both.cuda, KernelPath::automatic);
  const GluOperands t(routing, k, width, n, type);
  for (const Twin* twin : {&t.up, &t.down, &t.offsets, &t.slots})
    twin->reset(both.cuda.stream());
  Runs runs(both.cuda, routing);
  for (const bool keep : {true, false}) {
    std::vector<const Twin*> results{&t.h};
    if (keep) results.push_back(&t.wide);
    runs.check(GroupedGluForward{.h = t.h.device.view(),
                                 .gate_up = keep ? t.wide.device.view() : TensorView(),
                                 .x = t.x.device.view(),
                                 .w = t.up.device.view(),
                                 .offsets = t.offsets.device.view(),
                                 .slot_of_expert = t.slots.device.view(),
                                 .activation = activation},
               {&t.x},
               results);
    if (expected == "fused") CHECK(path.ran() == expected);
  }
  runs.check(GroupedGluBackward{.dgate_up = t.wide.device.view(),
                                .drow_weight = t.sums.device.view(),
                                .h = t.h.device.view(),
                                .dy = t.dy.device.view(),
                                .w = t.down.device.view(),
                                .gate_up = t.gate_up.device.view(),
                                .row_weight = t.weight.device.view(),
                                .offsets = t.offsets.device.view(),
                                .slot_of_expert = t.slots.device.view(),
                                .activation = activation,
                                .weight_h = true},
             {&t.dy, &t.gate_up, &t.weight},
             {&t.wide, &t.h, &t.sums});
  if (expected == "fused") CHECK(path.ran() == expected);
}

// Empty experts first, last and between, one row, steps of 16 rows, stages of 64, several tiles.
const std::vector<std::int32_t> kCounts{0, 1, 16, 17, 0, 64, 65, 0, 1, 129, 257, 300, 3, 0};

}  // namespace

TEST_CASE("runs of experts on CUDA: products have the bits of one call", "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Routing odd = routing_of(kCounts, 40);
  for (const DType result : {DType::bf16, DType::f32}) {
    check_products(both, odd, 136, 328, DType::bf16, result, KernelPath::automatic);
    check_products(both, odd, 512, 256, DType::bf16, result, KernelPath::automatic);
    check_products(both, odd, 72, 136, DType::bf16, result, KernelPath::plain);
  }
  const Routing few = routing_of({0, 3, 64, 0, 1, 65, 130, 0}, 20);
  check_products(both, few, 33, 70, DType::f32, DType::f32, KernelPath::plain);
  check_products(both, few, 33, 70, DType::f64, DType::f64, KernelPath::plain);
}

TEST_CASE("runs of experts on CUDA: gated linear units have the bits of one call",
          "[cuda][grouped]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Routing odd = routing_of(kCounts, 40), few = routing_of({0, 3, 64, 0, 1, 65, 130, 0}, 20);
  constexpr std::int64_t kLongSum = 3080;  // from which on backward is fused for any activation
  for (const auto& activation :
       {GluActivation{.kind = GluKind::swiglu},
        GluActivation{.kind = GluKind::situ, .beta1 = 4.0, .beta2 = 25.0}}) {
    check_glu(both, odd, 136, 72, kLongSum, DType::bf16, activation, "fused");
    check_glu(both, few, 200, 1096, kLongSum, DType::bf16, activation, "fused");  // 16 classes
    check_glu(both, few, 36, 64, 36, DType::bf16, activation, "separate");
    check_glu(both, few, 40, 24, 40, DType::f32, activation, "separate");
    check_glu(both, few, 40, 24, 40, DType::f64, activation, "separate");
  }
}

}  // namespace moesaic::test
