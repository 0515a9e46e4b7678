#pragma once
#include <vector>

#include "apps/report/read_run.h"
#include "apps/report/svg_plot.h"

namespace moesaic::apps::report {

/// What is plotted over steps (the loss also over tokens and hours), all runs in one picture. Plots without a value are
/// left out.
std::vector<Plot> training_plots(const std::vector<RunData>& runs);
std::vector<Plot> speed_plots(const std::vector<RunData>& runs);
std::vector<Plot> expert_plots(const std::vector<RunData>& runs);

}  // namespace moesaic::apps::report
