#pragma once
// What checkpoints give to a store that keeps weights alone (ParameterStore::keep_weights_alone()).
#include <cstdint>

#include "core/checkpoint/checkpoint.h"
#include "core/nn/parameter_store.h"

namespace moesaic {

/// A weight, as files hold it: its master. That is rounded on its way in, as training rounds it, so that kernels read the same
/// bits; on the device or where the member of an offloaded storage lives. To be filled only: reading it is an InternalError,
/// unless it lies on the device and is its own master. `params` must outlive what is returned.
StateTensor weight_to_load(const ParameterStore& params, ParamId id, std::int64_t member);

}  // namespace moesaic
