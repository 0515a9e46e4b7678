#pragma once
#include <string>

#include "core/model/context_plan.h"

namespace moesaic::apps {

/// The part of `moesaic plan` about context parallelism: what each rank along cp computes, against the mean.
std::string context_text(const ContextPlan& plan);
/// The same in a line, for the head of a run: "4 pieces of 2048 tokens | busiest 1.2 x the mean in forward".
std::string context_summary(const ContextPlan::Phase& phase);

}  // namespace moesaic::apps
