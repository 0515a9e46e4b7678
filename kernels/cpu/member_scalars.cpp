#include "kernels/ops/member_scalars.h"

#include <algorithm>

namespace moesaic {
namespace {

template <class T, class N>
void fill_rows(const MemberScalars& op) {
  const T* scalars = op.scalars.as<T>();
  const N* counts = op.counts.as<N>();
  const auto* numbers = op.numbers.empty() ? nullptr : op.numbers.as<std::int32_t>();
  for (std::int64_t e = 0; e < op.rows.dim(0); ++e) {
    T* row = op.rows.as<T>() + e * kNumStepScalars;
    std::copy_n(scalars, kNumStepScalars, row);
    if (counts[numbers == nullptr ? e : numbers[e]] == 0) row[index_of(StepScalar::skip)] = T(1);
  }
}

template <class T>
void fill_rows_of(const MemberScalars& op) {
  if (op.counts.dtype() == DType::i64) {
    fill_rows<T, std::int64_t>(op);
  } else {
    fill_rows<T, std::int32_t>(op);
  }
}

}  // namespace

void launch(CpuContext& context, const MemberScalars& op) {
  context.stream.enqueue([op] {
    if (op.rows.dtype() == DType::f64) {
      fill_rows_of<double>(op);
    } else {
      fill_rows_of<float>(op);
    }
  });
}

}  // namespace moesaic
