#include "kernels/ops/guard.h"

namespace moesaic {

void GuardFinite::check() const {
  check_step_scalars(scalars, scalars.dtype());
  MOESAIC_CHECK(values.dtype() == DType::f64 || values.dtype() == DType::f32,
                "values must be f64 or f32");
}

OpCost GuardFinite::cost() const {
  return {0, static_cast<double>(values.bytes())};
}

}  // namespace moesaic
