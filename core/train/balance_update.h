#pragma once
#include <span>

#include "comm/communicator.h"
#include "core/model/model.h"
#include "core/nn/parameter_store.h"
#include "kernels/ops/op.h"

namespace moesaic {

/// Moves the selection bias and load statistics of `layers` on from the counts of the whole step (SPEC section 5), after
/// the optimizer's update. `scalars`: StepScalars (tokens of the step, skip flag). `world` may be null; the step's
/// counters must already be summed over it, margins of the exact rule are gathered here.
void update_balance(Backend& backend,
                    const ParameterStore& params,
                    std::span<const Model::NamedMoe> layers,
                    ConstTensorView scalars,
                    Communicator* world);

}  // namespace moesaic
