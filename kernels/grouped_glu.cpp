#include "kernels/ops/grouped_glu.h"

#include "kernels/checks.h"
#include "kernels/grouped_glu_parts.h"

namespace moesaic {

void GroupedGluForward::check() const {
  MOESAIC_CHECK(x.rank() == 2 && w.rank() == 3 && h.rank() == 2,
                "x must be [rows, k], w [slots, 2 width, k] and h [rows, width]");
  // As if the middle had the place of gate_up, whether it is asked for or not.
  const TensorView middle =
      gate_up.empty() ? TensorView(h.data(), h.dtype(), {h.dim(0), 2 * h.dim(1)}, h.device())
                      : gate_up;
  check_dtype(h, x.dtype(), "h");
  product_of(*this, middle).check();
  activation_of(*this, middle).check();
}

OpCost GroupedGluForward::cost() const {
  const auto elements = static_cast<double>(h.numel());
  return {2.0 * 2.0 * elements * static_cast<double>(x.dim(1)) + 8.0 * elements,
          total_bytes({h, gate_up, x, w})};
}

void GroupedGluBackward::check() const {
  MOESAIC_CHECK(dy.rank() == 2 && w.rank() == 3 && h.rank() == 2,
                "dy must be [rows, n], w [slots, n, width] and h [rows, width]");
  check_dtype(h, dy.dtype(), "h");
  product_of(*this).check();
  activation_of(*this).check();
}

OpCost GroupedGluBackward::cost() const {
  const auto elements = static_cast<double>(h.numel());
  return {2.0 * elements * static_cast<double>(dy.dim(1)) + 20.0 * elements,
          total_bytes({dgate_up, h, dy, w, gate_up})};
}

}  // namespace moesaic
