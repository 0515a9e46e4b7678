#pragma once
// What checkpoints hold of experts whose state, or all of them, are offloaded (core/nn/expert_tiers.h).
#include <cstdint>
#include <string>
#include <vector>

#include "core/checkpoint/checkpoint.h"
#include "core/nn/parameter_store.h"
#include "kernels/ops/op.h"

namespace moesaic {

/// Members of an offloaded storage whose state this rank keeps, ascending; each has one owner.
std::vector<std::int64_t> own_members(const ParameterStore& params, StorageId id);

/// The master of a parameter in a member of this rank's own, as files hold it. `params` must outlive what is returned.
StateTensor master_of_member(const ParameterStore& params, ParamId id, std::int64_t member);
/// The optimizer's state of kind number `kind` of ExpertTierOptions::state_kinds, under `name`.
StateTensor state_of_member(const ParameterStore& params,
                            ParamId id,
                            std::int64_t member,
                            const std::string& name,
                            int kind);
/// After masters were loaded: rounds those of this rank's own members into the weights that kernels read.
void refresh_offloaded(const ParameterStore& params, StorageId id, Backend& backend);

}  // namespace moesaic
