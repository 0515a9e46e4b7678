#include "kernels/ops/member_scalars.h"

#include "core/base/error.h"
#include "kernels/backend.h"
#include "tests/support/catch.h"

namespace moesaic {
namespace {

template <class T, class N>
void check_rows(DType type, DType count_type) {
  constexpr std::int64_t kMembers = 5;
  const Buffer memory((kMembers + 1) * kNumStepScalars * 8 + kMembers * 8, kCpu, "test");
  const TensorView rows = memory.view({kMembers, kNumStepScalars}, type),
                   scalars = memory.view({kNumStepScalars}, type, kMembers * kNumStepScalars * 8),
                   counts =
                       memory.view({kMembers}, count_type, (kMembers + 1) * kNumStepScalars * 8);
  for (int i = 0; i < kNumStepScalars; ++i)
    scalars.as<T>()[i] = T(i + 1);
  const N n[kMembers] = {3, 0, 1, 0, N(1) << 30};
  for (const T skip : {T(0), T(1)}) {
    scalars.as<T>()[index_of(StepScalar::skip)] = skip;
    std::copy_n(n, kMembers, counts.as<N>());
    BackendOwner owner({.device = kCpu,
                        .mode = Stream::Mode::immediate,
                        .num_threads = 1,
                        .scratch_bytes = 4096,
                        .name = "test"});
    run(owner.backend(), MemberScalars{.rows = rows, .scalars = scalars, .counts = counts});
    for (std::int64_t e = 0; e < kMembers; ++e) {
      for (int i = 0; i < kNumStepScalars; ++i) {
        INFO("member " << e << ", slot " << i);
        const bool is_skip = i == index_of(StepScalar::skip);
        CHECK(rows.as<T>()[e * kNumStepScalars + i] ==
              (is_skip && n[e] == 0 ? T(1) : scalars.as<T>()[i]));
      }
    }
  }
}

}  // namespace

TEST_CASE("Step scalars of members: a copy each, with the skip flag set where the count is zero") {
  check_rows<double, std::int64_t>(DType::f64, DType::i64);
  check_rows<float, std::int64_t>(DType::f32, DType::i64);
  check_rows<float, std::int32_t>(DType::f32, DType::i32);
}

TEST_CASE("Step scalars of members: counts by number") {
  const Buffer memory(4096, kCpu, "test");
  const TensorView rows = memory.view({3, kNumStepScalars}, DType::f64),
                   scalars = memory.view({kNumStepScalars}, DType::f64, 1024),
                   counts = memory.view({6}, DType::i64, 2048),
                   numbers = memory.view({3}, DType::i32, 3072);
  std::fill_n(scalars.as<double>(), kNumStepScalars, 0.0);
  const std::int64_t n[] = {0, 5, 0, 7, 0, 9};
  std::copy_n(n, 6, counts.as<std::int64_t>());
  const std::int32_t which[] = {5, 2, 1};
  std::copy_n(which, 3, numbers.as<std::int32_t>());
  BackendOwner owner({.device = kCpu, .mode = Stream::Mode::immediate, .num_threads = 1});
  run(owner.backend(),
      MemberScalars{.rows = rows, .scalars = scalars, .counts = counts, .numbers = numbers});
  for (const int e : {0, 1, 2}) {
    INFO("member " << e);
    CHECK(rows.as<double>()[e * kNumStepScalars + index_of(StepScalar::skip)] == (e == 1 ? 1 : 0));
  }
}

TEST_CASE("Step scalars of members: wrong shapes and types are refused") {
  const Buffer memory(4096, kCpu, "test");
  MemberScalars op{.rows = memory.view({3, kNumStepScalars}, DType::f32),
                   .scalars = memory.view({kNumStepScalars}, DType::f32),
                   .counts = memory.view({3}, DType::i64)};
  CHECK_NOTHROW(op.check());
  op.counts = memory.view({4}, DType::i64);
  CHECK_THROWS_AS(op.check(), InternalError);
  op.counts = memory.view({3}, DType::f32);
  CHECK_THROWS_AS(op.check(), InternalError);
  op.counts = memory.view({3}, DType::i64);
  op.scalars = memory.view({kNumStepScalars}, DType::f64);
  CHECK_THROWS_AS(op.check(), InternalError);
}

}  // namespace moesaic
