#include "kernels/ops/muon.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

// Five steps multiply a rounding error of a small singular value by up to 500. Halves of bf16 keep
// 17 bits where f32 has 24.
double tolerance(DType dtype, bool split) {
  return dtype == DType::f64 ? 1e-11 : split ? 1e-3 : 1e-4;
}

struct LastPath final : PathObserver {
  void ran(const char*, const char* path) override { last = path; }
  std::string last;
};

// Runs with the context's path set, and returns which path the op took.
template <class F>
std::string with_path(BothBackends& both, KernelPath path, F&& f) {
  auto& context = std::get<CudaContext>(both.cuda.backend());
  LastPath seen;
  context.path = path;
  context.paths = &seen;
  f();
  context.path = KernelPath::automatic;
  context.paths = nullptr;
  return seen.last;
}

struct Size {
  std::int64_t batch, rows, cols;
  bool splits = false;  // with f32
};
// Vectors, both orientations, odd sizes, borders of tiles, sizes whose f32 products are split.
const Size kSizes[] = {{1, 1, 1},
                       {2, 1, 9},
                       {1, 9, 1},
                       {3, 5, 8},
                       {1, 70, 65},
                       {2, 64, 130},
                       {2, 150, 131},
                       {3, 64, 72, true},
                       {1, 200, 136, true},
                       {2, 256, 640, true}};

void check_newton_schulz(BothBackends& both,
                         const Size& s,
                         DType dtype,
                         KernelPath path,
                         const std::vector<RowBlock>& blocks,
                         int iterations,
                         bool splits) {
  INFO(s.batch << " x " << s.rows << " x " << s.cols << " " << name(dtype) << ", path "
               << static_cast<int>(path) << ", " << blocks.size() << " blocks, " << iterations
               << " iterations");
  const Twin x({s.batch, s.rows, s.cols}, dtype);
  fill_normal(x.initial.view(), 81, 0.3);
  const std::string ran = with_path(both, path, [&] {
    require_cuda_matches_cpu(both, {&x}, {{&x, tolerance(dtype, splits)}}, [&](auto side) {
      return NewtonSchulz{.x = side(x), .blocks = blocks, .num_iterations = iterations};
    });
  });
  CHECK(ran == (splits ? "split" : "plain"));
}

void check_update(BothBackends& both,
                  const Size& s,
                  DType dtype,
                  DType gradient,
                  DType compute,
                  bool nesterov,
                  double skip,
                  const std::vector<RowBlock>& blocks = {}) {
  INFO(s.batch << " x " << s.rows << " x " << s.cols << " " << name(dtype) << ", gradient "
               << name(gradient) << ", compute " << name(compute) << ", nesterov " << nesterov
               << ", skip " << skip << ", " << blocks.size() << " blocks");
  const Shape shape{s.batch, s.rows, s.cols};
  const Twin w(shape, dtype), momentum(shape, dtype), dw(shape, gradient),
      w_compute(shape, compute), scalars({kNumStepScalars}, dtype);
  fill_normal(w.initial.view(), 82, 0.02);
  fill_normal(momentum.initial.view(), 83);
  fill_normal(dw.initial.view(), 84);
  fill_normal(w_compute.initial.view(), 85);
  StepScalars{.learning_rate = 0.02, .weight_decay_scale = 0.5, .clip_factor = 0.75, .skip = skip}
      .write(scalars.initial.view());
  // The step is of the size of the weights, so that its error shows in them.
  const double close = skip != 0 ? 0 : tolerance(dtype, s.splits && dtype == DType::f32);
  require_cuda_matches_cpu(both,
                           {&w, &momentum, &dw, &w_compute, &scalars},
                           {{&w, close},
                            {&momentum,
                             skip != 0             ? 0
                             : dtype == DType::f64 ? 1e-15
                                                   : 1e-6},
                            {&w_compute,
                             skip != 0                ? 0
                             : compute == DType::bf16 ? 2e-3
                                                      : close}},
                           [&](auto side) {
                             return MuonUpdate{.w = side(w),
                                               .momentum = side(momentum),
                                               .w_compute = side(w_compute),
                                               .dw = side(dw),
                                               .scalars = side(scalars),
                                               .blocks = blocks,
                                               .lr_scale = 2,
                                               .weight_decay = 0.1,
                                               .nesterov = nesterov};
                           });
}

}  // namespace

TEST_CASE("Newton-Schulz on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_newton_schulz(both, s, DType::f64, KernelPath::automatic, {}, 5, false);
    check_newton_schulz(both, s, DType::f32, KernelPath::automatic, {}, 5, s.splits);
    check_newton_schulz(both, s, DType::f32, KernelPath::plain, {}, 5, false);
    check_newton_schulz(both, s, DType::f32, KernelPath::automatic, {}, 0, s.splits);
  }
}

// Rounding everything to bf16 costs 1.1 to 1.4 % on such matrices (measured on the host with rounded
// products). Sizes that do not suit the tensor cores keep to f32.
TEST_CASE("Muon with bf16 products on CUDA stays near the CPU's f32", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    INFO(s.batch << " x " << s.rows << " x " << s.cols);
    const double close = s.splits ? 0.03 : tolerance(DType::f32, false);
    const Twin x({s.batch, s.rows, s.cols}, DType::f32);
    fill_normal(x.initial.view(), 87, 0.3);
    for (const int iterations : {0, 5}) {
      const std::string ran = with_path(both, KernelPath::automatic, [&] {
        require_cuda_matches_cpu(both, {&x}, {{&x, close}}, [&](auto side) {
          return NewtonSchulz{
              .x = side(x), .blocks = {}, .num_iterations = iterations, .bf16_products = true};
        });
      });
      CHECK(ran == (!s.splits                         ? "plain"
                    : std::min(s.rows, s.cols) >= 256 ? "bf16_halved"
                                                      : "bf16"));
    }
  }
  const Shape shape{3, 128, 72};
  const Twin w(shape, DType::f32), momentum(shape, DType::f32), dw(shape, DType::bf16),
      w_compute(shape, DType::bf16), scalars({kNumStepScalars}, DType::f32);
  fill_normal(momentum.initial.view(), 88);
  fill_normal(dw.initial.view(), 89);
  StepScalars{.learning_rate = 0.02}.write(scalars.initial.view());
  require_cuda_matches_cpu(both,
                           {&w, &momentum, &dw, &w_compute, &scalars},
                           {{&w, 0.03}, {&momentum, 1e-6}, {&w_compute, 0.03}},
                           [&](auto side) {
                             return MuonUpdate{.w = side(w),
                                               .momentum = side(momentum),
                                               .w_compute = side(w_compute),
                                               .dw = side(dw),
                                               .scalars = side(scalars),
                                               .bf16_products = true};
                           });
}

// The largest difference of two f32 tensors, over the root mean square of the second.
double largest_error(const ConstTensorView& a, const ConstTensorView& b) {
  double worst = 0, squares = 0;
  for (std::int64_t i = 0; i < b.numel(); ++i) {
    const double x = a.as<float>()[i], y = b.as<float>()[i];
    worst = std::isfinite(x) ? std::max(worst, std::abs(x - y)) : HUGE_VAL;
    squares += y * y;
  }
  return worst / std::sqrt(squares / static_cast<double>(b.numel()));
}

// Tails of the tiles (256 x 256 of a symmetric result, up to 256 columns of a wide one, 64 terms), each orientation, one and
// several matrices, against the same iteration in f32. One bad tile or mirror image would be an error of the size of the
// elements; rounding to bf16 stays far below.
TEST_CASE("Newton-Schulz on CUDA: symmetric products by half", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const Size& s : {Size{1, 256, 256},
                        Size{2, 264, 328},
                        Size{3, 512, 1408},
                        Size{2, 520, 264},
                        Size{1, 392, 904},
                        Size{1, 1408, 1024},
                        Size{5, 768, 768},
                        Size{1, 1096, 2312}}) {
    for (const int iterations : {1, 2, 5}) {
      const Twin exact({s.batch, s.rows, s.cols}, DType::f32),
          x(exact.initial.view().shape(), DType::f32);
      fill_normal(exact.initial.view(), 91, 0.3);
      std::memcpy(x.initial.view().data(), exact.initial.view().data(), x.initial.view().bytes());
      const auto iterate = [&](const Twin& t, KernelPath path, bool low) {
        t.reset(both.cuda.stream());
        const std::string ran = with_path(both, path, [&] {
          run(both.cuda.backend(),
              NewtonSchulz{.x = t.device.view(),
                           .blocks = {},
                           .num_iterations = iterations,
                           .bf16_products = low});
        });
        CHECK(ran == (low ? "bf16_halved" : "plain"));
        return download(t.device.view(), both.cuda.stream());
      };
      const auto want = iterate(exact, KernelPath::plain, false),
                 got = iterate(x, KernelPath::automatic, true),
                 again = iterate(x, KernelPath::automatic, true);
      const double worst = largest_error(got.view(), want.view());
      INFO(s.batch << " x " << s.rows << " x " << s.cols << ", " << iterations << " iterations");
      CHECK(worst < 0.5);
      CHECK(relative_error(got.view(), want.view()) < 0.03);
      CHECK(same_bits(got.view(), again.view()));
    }
  }
}

TEST_CASE("Newton-Schulz on CUDA: row blocks", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Size s{2, 96, 40};
  for (const DType dtype : {DType::f64, DType::f32}) {
    const auto check = [&](const std::vector<RowBlock>& blocks) {
      check_newton_schulz(both, s, dtype, KernelPath::automatic, blocks, 5, false);
    };
    check(head_row_blocks(6, {16}));
    check(head_row_blocks(3, {8, 24}));                        // two evenly spaced runs
    check({{0, 10}, {10, 20}, {20, 45}, {45, 55}, {55, 96}});  // uneven: 10 rows at 0, 10, 45
  }
  check_newton_schulz(both,
                      {1, 512, 200},
                      DType::f32,
                      KernelPath::automatic,
                      head_row_blocks(2, {128, 128}),
                      5,
                      true);
}

namespace {

struct BatchCase {
  KernelPath path;
  std::int64_t rows, cols;
  bool low;
};

void check_alone_and_in_a_batch(const std::vector<BatchCase>& cases) {
  BothBackends both;
  for (const auto& [path, rows, cols, low] : cases) {
    const Twin all({5, rows, cols}, DType::f32), one({rows, cols}, DType::f32);
    fill_normal(all.initial.view(), 86);
    std::memcpy(one.initial.view().data(),
                all.initial.view().rows(3, 4).data(),
                one.initial.view().bytes());
    with_path(both, path, [&, low = low] {
      for (const Twin* t : {&all, &one}) {
        t->reset(both.cuda.stream());
        // What no product wrote would be NaNs in the result.
        both.cuda.scratch().poison(both.cuda.stream());
        run(both.cuda.backend(),
            NewtonSchulz{.x = t->device.view(), .blocks = {}, .bf16_products = low});
      }
    });
    const auto batch = download(all.device.view(), both.cuda.stream()),
               alone = download(one.device.view(), both.cuda.stream());
    CHECK(same_bits(batch.view().rows(3, 4), alone.view().reshaped({1, rows, cols})));
    const auto* values = batch.view().as<float>();
    CHECK(std::all_of(
        values, values + batch.view().numel(), [](float v) { return std::isfinite(v); }));
  }
}

}  // namespace

TEST_CASE("Newton-Schulz on CUDA: a matrix has the same bits alone and in a batch", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  check_alone_and_in_a_batch({{KernelPath::automatic, 128, 256, false},
                              {KernelPath::plain, 128, 256, false},
                              {KernelPath::automatic, 128, 256, true},
                              {KernelPath::automatic, 520, 392, true}});
}

TEST_CASE("Newton-Schulz on CUDA by the library's products: the same bits alone and in a batch",
          "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  check_alone_and_in_a_batch({{KernelPath::automatic, 520, 392, false}});
}

TEST_CASE("Newton-Schulz on CUDA leaves zero at zero", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const std::int64_t rows : {3, 64}) {
    const Twin x({2, rows, 128}, DType::f32);
    require_cuda_matches_cpu(both, {&x}, {{&x, 1e-30}}, [&](auto side) {
      return NewtonSchulz{.x = side(x), .blocks = {}};
    });
  }
}

TEST_CASE("Muon update on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const auto& s : kSizes) {
    check_update(both, s, DType::f64, DType::f64, DType::f64, true, 0);
    check_update(both, s, DType::f32, DType::f32, DType::f32, false, 0);
    check_update(both, s, DType::f32, DType::bf16, DType::bf16, true, 0);
    check_update(both, s, DType::f32, DType::f32, DType::bf16, true, 1);
  }
  check_update(
      both, {2, 96, 40}, DType::f32, DType::bf16, DType::f32, true, 0, head_row_blocks(3, {8, 24}));
}

}  // namespace moesaic::test
