#pragma once
#include <string>

#include "parallel/pipeline/simulate.h"

namespace moesaic::pipeline {

/// The schedule in unit times, a line per rank and a column per unit: "F3" forward of micro-batch 3, "B3" backward (two
/// columns), or "B3" backward-input and "W3" backward-weight, "." idle. With several chunks per rank a letter tells which:
/// "F3a", "F3b", ….
///
/// A grid wider than `max_width` characters is cut in the middle and says how many columns are left out; 0 = never.
std::string grid_text(const Schedule& schedule, int max_width = 0);

/// A line per action and per message, with a heading:
/// `rank,action,start,end,work,chunk,micro_batch,direction,payload,boundary,peer`; what does not apply is empty. Messages of one
/// exchange share `action`, the place in the rank's list.
std::string schedule_csv(const Schedule& schedule, const Simulation& times);

/// What the columns `work`, `direction` and `payload` hold: "forward", "backward", "backward_input", "backward_weight",
/// "exchange"; "send", "receive"; "activation", "gradient".
const char* name(Work work) noexcept;
const char* direction(const Message& message) noexcept;
const char* name(Payload payload) noexcept;

}  // namespace moesaic::pipeline
