#include "kernels/ops/adamw.h"

#include "kernels/checks.h"

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
  const DType master = master_dtype();
  if (is_split()) check_split_master(w, w_compute, remainder);
  MOESAIC_CHECK(master == DType::f64 || master == DType::f32, "master weights are f64 or f32");
  check_shape(m, shaped().shape(), "m");
  check_dtype(m, master, "m");
  check_shape(v, m.shape(), "v");
  check_dtype(v, master, "v");
  check_next_to_master(dw, m, "dw");
  if (!w_compute.empty()) check_next_to_master(w_compute, m, "w_compute");
  check_step_scalars(scalars, master);
  MOESAIC_CHECK(0 <= beta1 && beta1 < 1 && 0 <= beta2 && beta2 < 1, "betas must be in [0, 1)");
}

OpCost AdamW::cost() const {
  // A split master is read and written too.
  const double state =
      total_bytes({m, v}) + (is_split() ? total_bytes({w_compute, remainder}) : total_bytes({w}));
  const double copy = is_split() ? 0.0 : total_bytes({w_compute});
  return {16.0 * static_cast<double>(m.numel()), 2 * state + total_bytes({dw}) + copy};
}

}  // namespace moesaic
