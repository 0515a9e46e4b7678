#pragma once
#include <string>

#include "core/config/load.h"
#include "core/model/pipeline_plan.h"

namespace moesaic::apps {

/// The part of `moesaic plan` about the pipeline: chunks, ranks, idle time, and the schedule as a grid that fits a line.
std::string pipeline_text(const config::Config& config, const PipelinePlan& plan);

enum class ScheduleForm { grid, csv, json };
/// `plan --schedule`: the whole schedule. Times of csv and json are in operations of one token, messages taking none.
std::string schedule_text(const PipelinePlan& plan, ScheduleForm form);

}  // namespace moesaic::apps
