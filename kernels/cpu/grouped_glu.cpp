#include "kernels/ops/grouped_glu.h"

#include "kernels/grouped_glu_parts.h"

namespace moesaic {

void launch(CpuContext& context, const GroupedGluForward& op) {
  launch_parts(context, op);
}
void launch(CpuContext& context, const GroupedGluBackward& op) {
  launch_parts(context, op);
}

}  // namespace moesaic
