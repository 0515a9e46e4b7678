// GuardFinite, MemberScalars and AccumulateCounts: the CPU's bits.
#include "kernels/ops/balance.h"
#include "kernels/ops/guard.h"
#include "kernels/ops/member_scalars.h"
#include "tests/support/device_tensors.h"

namespace moesaic::test {
namespace {

// Every third is zero.
void fill_counts(TensorView counts) {
  for (std::int64_t i = 0; i < counts.numel(); ++i) {
    const std::int64_t count = i % 3 == 0 ? 0 : i * 7919;
    if (counts.dtype() == DType::i64) {
      counts.as<std::int64_t>()[i] = count << 20;
    } else {
      counts.as<std::int32_t>()[i] = static_cast<std::int32_t>(count);
    }
  }
}

}  // namespace

TEST_CASE("GuardFinite on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType master : {DType::f64, DType::f32}) {
    for (const DType dtype : {DType::f64, DType::f32}) {
      for (const std::int64_t n : {0, 1, 1025, 5000}) {
        for (const double last : {1.0, static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
          INFO(n << " values " << name(dtype) << ", the last " << last << ", master "
                 << name(master));
          const Twin scalars({kNumStepScalars}, master), values({n}, dtype);
          fill_normal(scalars.initial.view(), 1);
          fill_normal(values.initial.view(), 2);
          if (n > 0) {
            dispatch_float(dtype,
                           [&]<class T>(TypeTag<T>) { values.initial.data<T>()[n - 1] = T(last); });
          }
          require_cuda_matches_cpu(both, {&scalars, &values}, {{&scalars, 0}}, [&](auto side) {
            return GuardFinite{.scalars = side(scalars), .values = side(values)};
          });
        }
      }
    }
  }
}

TEST_CASE("MemberScalars on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType master : {DType::f64, DType::f32}) {
    for (const DType integer : {DType::i64, DType::i32}) {
      for (const std::int64_t members : {1, 64, 896}) {
        INFO(members << " members, " << name(master) << ", counts " << name(integer));
        const Twin rows({members, kNumStepScalars}, master), scalars({kNumStepScalars}, master),
            counts({members}, integer);
        fill_normal(rows.initial.view(), 1);
        fill_normal(scalars.initial.view(), 2);
        fill_counts(counts.initial.view());
        require_cuda_matches_cpu(both, {&rows, &scalars, &counts}, {{&rows, 0}}, [&](auto side) {
          return MemberScalars{
              .rows = side(rows), .scalars = side(scalars), .counts = side(counts)};
        });
      }
    }
  }
}

TEST_CASE("MemberScalars on CUDA by number matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  constexpr std::int64_t kHere = 112, kAll = 896;
  const Twin rows({kHere, kNumStepScalars}, DType::f32), scalars({kNumStepScalars}, DType::f32),
      counts({kAll}, DType::i64), numbers({kHere}, DType::i32);
  fill_normal(rows.initial.view(), 1);
  fill_normal(scalars.initial.view(), 2);
  fill_counts(counts.initial.view());
  for (std::int64_t i = 0; i < kHere; ++i)
    numbers.initial.data<std::int32_t>()[i] = static_cast<std::int32_t>((i * 37 + 5) % kAll);
  require_cuda_matches_cpu(
      both, {&rows, &scalars, &counts, &numbers}, {{&rows, 0}}, [&](auto side) {
        return MemberScalars{.rows = side(rows),
                             .scalars = side(scalars),
                             .counts = side(counts),
                             .numbers = side(numbers)};
      });
}

TEST_CASE("AccumulateCounts on CUDA matches the CPU", "[cuda]") {
  MOESAIC_NEEDS_CUDA();
  BothBackends both;
  for (const DType integer : {DType::i64, DType::i32}) {
    for (const std::int64_t n : {1, 64, 896, 3000}) {
      INFO(n << " counts " << name(integer));
      const Twin total({n}, DType::i64), counts({n}, integer);
      fill_counts(total.initial.view());
      fill_counts(counts.initial.view());
      require_cuda_matches_cpu(both, {&total, &counts}, {{&total, 0}}, [&](auto side) {
        return AccumulateCounts{.total = side(total), .counts = side(counts)};
      });
    }
  }
}

}  // namespace moesaic::test
