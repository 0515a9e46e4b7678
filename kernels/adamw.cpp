#include "kernels/ops/adamw.h"

namespace moesaic {
namespace {

void check_next_to_master(const ConstTensorView& view,
                          const ConstTensorView& master,
                          const char* what) {
  check_shape(view, master.shape(), what);
  const bool narrower = master.dtype() == DType::f32 && view.dtype() == DType::bf16;
  if (!narrower) check_dtype(view, master.dtype(), what);
}

}  // namespace

void AdamW::check() const {
  MOESAIC_CHECK(w.dtype() == DType::f64 || w.dtype() == DType::f32,
                "master weights are f64 or f32");
  check_shape(m, w.shape(), "m");
  check_dtype(m, w.dtype(), "m");
  check_shape(v, w.shape(), "v");
  check_dtype(v, w.dtype(), "v");
  check_next_to_master(dw, w, "dw");
  if (!w_compute.empty()) check_next_to_master(w_compute, w, "w_compute");
  check_step_scalars(scalars, w.dtype());
  MOESAIC_CHECK(0 <= beta1 && beta1 < 1 && 0 <= beta2 && beta2 < 1, "betas must be in [0, 1)");
}

OpCost AdamW::cost() const {
  const std::size_t copy_bytes = w_compute.empty() ? 0 : w_compute.bytes();
  return {16.0 * static_cast<double>(w.numel()),
          static_cast<double>(2 * (w.bytes() + m.bytes() + v.bytes()) + dw.bytes() + copy_bytes)};
}

}  // namespace moesaic
