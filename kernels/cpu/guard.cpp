#include "kernels/ops/guard.h"

#include <cmath>

namespace moesaic {
namespace {

template <class T>
bool all_finite(ConstTensorView view) {
  const T* x = view.as<T>();
  for (std::int64_t i = 0; i < view.numel(); ++i) {
    if (!std::isfinite(x[i])) return false;
  }
  return true;
}

template <class T>
void skip_step(TensorView scalars) {
  T* s = scalars.as<T>();
  s[index_of(StepScalar::skip)] = T(1);
  s[index_of(StepScalar::clip_factor)] = T(0);
}

}  // namespace

void launch(CpuContext& context, const GuardFinite& op) {
  context.stream.enqueue([op] {
    const bool finite = op.values.dtype() == DType::f64 ? all_finite<double>(op.values)
                                                        : all_finite<float>(op.values);
    if (finite) return;
    if (op.scalars.dtype() == DType::f64) {
      skip_step<double>(op.scalars);
    } else {
      skip_step<float>(op.scalars);
    }
  });
}

}  // namespace moesaic
