#pragma once
#include <string>
#include <vector>

#include "core/config/config.h"
#include "core/data/blend.h"
#include "core/model/plan.h"
#include "core/train/run_sink.h"
#include "core/train/trainer.h"

namespace moesaic::apps {

/// What a run says about its data at the start: where tokens come from, how they are cut into steps, what repeats within
/// a step, the phases. `valid` may be null.
std::vector<std::string> data_lines(const config::Config& config,
                                    const data::Blend& train,
                                    const data::TokenSource* valid,
                                    const ModelPlan& plan,
                                    int ranks);

/// How much of every data set the run has seen, of a blend beside what its weights ask for: one event per data set.
std::vector<RunEvent> data_use_events(const std::vector<DataUse>& all, std::int64_t step);

}  // namespace moesaic::apps
