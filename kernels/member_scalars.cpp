#include "kernels/ops/member_scalars.h"

namespace moesaic {

void MemberScalars::check() const {
  check_step_scalars(scalars, scalars.dtype());
  MOESAIC_CHECK(counts.dtype() == DType::i64 || counts.dtype() == DType::i32,
                "counts must be i64 or i32");
  if (numbers.empty()) {
    check_shape(counts, {rows.dim(0)}, "counts");
  } else {
    MOESAIC_CHECK(counts.rank() == 1, "counts must be one row");
    check_shape(numbers, {rows.dim(0)}, "numbers");
    check_dtype(numbers, DType::i32, "numbers");
  }
  check_shape(rows, {rows.dim(0), kNumStepScalars}, "rows");
  check_dtype(rows, scalars.dtype(), "rows");
}

OpCost MemberScalars::cost() const {
  return {0, static_cast<double>(rows.bytes() + scalars.bytes() + counts.bytes())};
}

}  // namespace moesaic
