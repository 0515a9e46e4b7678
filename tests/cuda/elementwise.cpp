#include "kernels/ops/elementwise.h"

#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

constexpr DType kTypes[] = {DType::f64, DType::f32, DType::bf16};
// Less than an access, accesses with a tail, and more than the grid takes in one round of 16 x 256 threads a multiprocessor.
constexpr std::int64_t kLengths[] = {0, 1, 7, 8, 1001, 300007};

DType acc_type(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}
// One multiplication and one addition: with or without contraction, then rounded to the type.
double contraction_tolerance(DType dtype) {
  return dtype == DType::f64 ? 1e-15 : dtype == DType::f32 ? 1e-7 : 1e-3;
}

// Normal numbers with infinities, zeros of both signs, subnormal numbers and halfway cases of bf16 among them.
void fill_wild(TensorView view, std::uint64_t key) {
  fill_normal(view, key, 3.0);
  const double wild[] = {
      INFINITY, -INFINITY, 0.0, -0.0, 1e-40, -3e-42, 1.00390625, 1.01171875, 3.4e38, 1e-300};
  dispatch_float(view.dtype(), [&]<class T>(TypeTag<T>) {
    for (std::int64_t i = 0; i < view.numel(); i += 5)
      view.as<T>()[i] = T(wild[i / 5 % std::ssize(wild)]);
  });
}

}  // namespace

TEST_CASE("Add on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : kTypes) {
    for (const std::int64_t n : kLengths) {
      INFO(n << " " << name(dtype));
      const Twin a({n}, dtype), b({n}, dtype), y({n}, dtype);
      fill_normal(a.initial.view(), 1);
      fill_normal(b.initial.view(), 2);
      fill_normal(y.initial.view(), 3);
      require_cuda_matches_cpu(both, {&a, &b, &y}, {{&y, 0}}, [&](auto side) {
        return Add{.y = side(y), .a = side(a), .b = side(b)};
      });
      require_cuda_matches_cpu(both, {&a, &b, &y}, {{&b, 0}}, [&](auto side) {
        return Add{.y = side(b), .a = side(a), .b = side(b)};
      });
    }
  }
}

TEST_CASE("Accumulate on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType to : kTypes) {
    for (const DType from : kTypes) {
      for (const std::int64_t n : kLengths) {
        INFO(n << " " << name(from) << " to " << name(to));
        const Twin x({n}, from), y({n}, to);
        fill_normal(x.initial.view(), 1);
        fill_normal(y.initial.view(), 2);
        require_cuda_matches_cpu(both, {&x, &y}, {{&y, contraction_tolerance(to)}}, [&](auto side) {
          return Accumulate{.y = side(y), .x = side(x), .alpha = -0.3};
        });
      }
    }
  }
}

TEST_CASE("Cast on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType to : kTypes) {
    for (const DType from : kTypes) {
      for (const std::int64_t n : kLengths) {
        INFO(n << " " << name(from) << " to " << name(to));
        const Twin x({n}, from), y({n}, to);
        fill_wild(x.initial.view(), 1);
        fill_normal(y.initial.view(), 2);
        require_cuda_matches_cpu(
            both, {&x, &y}, {{&y, 0}}, [&](auto side) { return Cast{.y = side(y), .x = side(x)}; });
      }
    }
  }
}

TEST_CASE("Fill on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::i32}) {
    for (const std::int64_t n : kLengths) {
      for (const double value : {0.0, -7.0, 1.01171875}) {
        INFO(n << " " << name(dtype) << " = " << value);
        const Twin y({n}, dtype);
        std::memset(y.initial.view().data(), 0x55, y.initial.view().bytes());
        require_cuda_matches_cpu(
            both, {&y}, {{&y, 0}}, [&](auto side) { return Fill{.y = side(y), .value = value}; });
      }
    }
  }
}

TEST_CASE("Scale on CUDA has the bits of the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType dtype : kTypes) {
    for (const std::int64_t n : kLengths) {
      for (const bool with_factor : {false, true}) {
        INFO(n << " " << name(dtype) << ", factor " << with_factor);
        const Twin x({n}, dtype), y({n}, dtype), factor({1}, acc_type(dtype));
        fill_wild(x.initial.view(), 1);
        fill_normal(factor.initial.view(), 2);
        for (const Twin* to : {&x, &y}) {
          require_cuda_matches_cpu(both, {&x, &y, &factor}, {{to, 0}}, [&](auto side) {
            return Scale{.y = side(*to),
                         .x = side(x),
                         .factor = with_factor ? side(factor) : TensorView(),
                         .alpha = 0.7};
          });
        }
      }
    }
  }
}

TEST_CASE("Elementwise ops on CUDA handle views that are not 16-byte aligned", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  const Twin x({1003}, DType::bf16), y({1003}, DType::f32);
  fill_normal(x.initial.view(), 1);
  fill_normal(y.initial.view(), 2);
  const auto shifted = [](TensorView v) { return v.rows(1, 1002); };  // first and last element stay
  require_cuda_matches_cpu(both, {&x, &y}, {{&y, 0}}, [&](auto side) {
    return Cast{.y = shifted(side(y)), .x = shifted(side(x))};
  });
  require_cuda_matches_cpu(both, {&x, &y}, {{&x, 0}}, [&](auto side) {
    return Scale{.y = shifted(side(x)), .x = shifted(side(x)), .alpha = 3.0};
  });
}

TEST_CASE("Elementwise ops on CUDA reach elements beyond 2^31", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  auto& stream = both.cuda.stream();
  constexpr std::int64_t kTail = 24, kLength = (std::int64_t{1} << 31) + kTail;
  const OwnedTensor x({kLength}, DType::bf16, kCuda), y({kLength}, DType::bf16, kCuda);
  run(both.cuda.backend(), Fill{.y = x.view(), .value = 1.5});
  run(both.cuda.backend(), Fill{.y = y.view(), .value = 0.0});
  run(both.cuda.backend(), Accumulate{.y = y.view(), .x = x.view(), .alpha = 2.0});
  for (const std::int64_t begin : {std::int64_t{0}, kLength / 2, kLength - kTail}) {
    const OwnedTensor part = download(y.view().rows(begin, begin + kTail), stream);
    for (std::int64_t i = 0; i < kTail; ++i)
      CHECK(static_cast<float>(part.data<bf16>()[i]) == 3.0F);
  }
}

}  // namespace moesaic::test
