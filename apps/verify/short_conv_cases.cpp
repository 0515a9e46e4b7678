// short_conv__*: the depthwise causal convolution with SiLU inside documents, with and without
// carried rows.
#include "apps/verify/case_run.h"
#include "kernels/ops/short_conv.h"

namespace moesaic::verify {
namespace {

void run_short_conv(CaseRun& run) {
  const auto x = run.load("in.x"), w = run.load("w.w"), cu = run.load_i32("in.cu");
  TensorView history, dhistory;
  if (run.has("in.history")) {
    history = run.load("in.history");
    dhistory = run.poisoned(history.shape(), history.dtype());
  }
  const auto y = run.poisoned(x.shape(), x.dtype()), dx = run.poisoned(x.shape(), x.dtype());
  moesaic::run(run.backend(),
               ShortConvForward{.y = y, .x = x, .w = w, .history = history, .cu_seqlens = cu});
  run.expect("out.y", y);
  const auto dw = run.zeros(w.shape(), run.precision().grad);
  moesaic::run(run.backend(),
               ShortConvBackward{.dx = dx,
                                 .dw = dw,
                                 .dhistory = dhistory,
                                 .dy = run.load("cot.y"),
                                 .x = x,
                                 .w = w,
                                 .history = history,
                                 .cu_seqlens = cu});
  run.expect("grad.in.x", dx);
  run.expect("grad.w.w", dw);
  if (!dhistory.empty()) run.expect("grad.in.history", dhistory);
}

const RegisterFamily kFamily{{"short_conv__", run_short_conv}};

}  // namespace
}  // namespace moesaic::verify
