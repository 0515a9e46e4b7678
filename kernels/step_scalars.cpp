#include "kernels/ops/step_scalars.h"

#include <cmath>

namespace moesaic {
namespace {

template <class T>
void write_as(T* out, const StepScalars& s) {
  const auto set = [out](StepScalar slot, double value) {
    out[index_of(slot)] = static_cast<T>(value);
  };
  set(StepScalar::learning_rate, s.learning_rate);
  set(StepScalar::weight_decay_scale, s.weight_decay_scale);
  set(StepScalar::bias_correction1, s.bias_correction1);
  set(StepScalar::bias_correction2, s.bias_correction2);
  set(StepScalar::clip_factor, s.clip_factor);
  set(StepScalar::skip, s.skip);
  set(StepScalar::loss_divisor, s.loss_divisor);
  set(StepScalar::mtp_divisor, s.mtp_divisor);
  set(StepScalar::tokens, s.tokens);
  set(StepScalar::documents, s.documents);
  set(StepScalar::step, s.step);
}

}  // namespace

void StepScalars::write(TensorView host) const {
  MOESAIC_CHECK(host.device() == kCpu, "step scalars are written on the host and then copied");
  check_shape(host, {kNumStepScalars}, "step scalars");
  if (host.dtype() == DType::f64) {
    write_as(host.as<double>(), *this);
  } else {
    write_as(host.as<float>(), *this);
  }
}

double bias_correction(double beta, double t) {
  return beta == 0.0 ? 1.0 : -std::expm1(t * std::log(beta));
}

void check_step_scalars(const ConstTensorView& scalars, DType dtype) {
  check_shape(scalars, {kNumStepScalars}, "step scalars");
  check_dtype(scalars, dtype, "step scalars");
}

}  // namespace moesaic
