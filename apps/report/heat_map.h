#pragma once
#include <string>

#include "apps/report/read_run.h"

namespace moesaic::apps::report {

constexpr int kHeatClasses = 13;  ///< h0 … h12, h6 is the mean; odd, so that the mean has a class
constexpr int kDead = -1;

/// The class of a load: steps of a third of a factor of two around 1, up to four times and down to a quarter of the
/// layer's mean; kDead for no token at all.
int heat_class(double ratio);

/// <figure>: layers from top to bottom, experts from left to right, a colour per class. One path per class, so that 93
/// layers of 896 experts take well below 1 MB.
std::string heat_map_figure(const ExpertTable& table, const std::string& title);

/// <figure>: for every layer the experts' loads from the busiest to the least busy, as multiples of the layer's mean.
std::string sorted_load_figure(const ExpertTable& table, const std::string& title, std::size_t run);

}  // namespace moesaic::apps::report
