#pragma once
#include <span>
#include <string>

#include "core/train/step_record.h"

namespace moesaic {

struct Image {
  int width = 0, height = 0;
  std::string png;
};

/// The load of every expert (columns) of every layer (rows, first layer on top) against its layer's mean: dark blue is a
/// quarter of the mean or less, grey the mean, yellow four times the mean or more, each on a logarithmic scale; experts
/// without a token are magenta. Layers without counts are left out; an empty image when there are none.
Image expert_heat_map(std::span<const ExpertLoad> layers);

}  // namespace moesaic
