#pragma once
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace moesaic::pipeline {

/// Forwards and backwards of each rank in order, without exchanges.
using Orders = std::vector<std::vector<Action>>;

/// gpipe, 1f1b, interleaved and vertical: orders that are written down without looking at time.
///
/// interleaved (Narayanan et al., arXiv 2104.04473): micro-batches go through a rank in groups of `stages`, a group
/// through one chunk after the other; a last group may be smaller.
///
/// vertical: layers in the outer loop (GreedySnake's order). The gradients of a weight are added up in the order of the
/// micro-batches, as when each of them passes all layers before the next.
Orders fixed_order(Kind kind, const Sizes& sizes);

/// ZB-H1 and ZB-V (Qi et al., arXiv 2401.10241 and 2405.15362), found by list scheduling at equal times for forward,
/// backward-input and backward-weight: a rank does what is ready, by one of four rules of precedence, and gradients of
/// weights when nothing else is; the shortest of the four results is taken. As with 1f1b, a rank never keeps the
/// activations of more than stages * chunks (chunk, micro-batch) pairs.
Orders zero_bubble_order(const Placement& placement, int micro_batches);

/// Start of every action of `orders` when forward, backward-input and backward-weight take one unit each, backward two,
/// and messages none. Throws InternalError when the orders of the ranks wait for each other in a circle.
std::vector<std::vector<int>> unit_times(const Orders& orders, const Placement& placement);

/// Adds the exchanges. All events of a step, messages included, are put into one sequence by their unit_times(): a
/// message stands where its bundle is ready, on both of its ranks. Each rank then does its part of that one sequence.
/// So the first event that is not done yet can always take place, even when every send waits for its receive: no
/// deadlock. Neighbouring messages of a rank are posted together, which only lets them start earlier.
std::vector<std::vector<Action>> with_exchanges(const Orders& orders, const Placement& placement);

}  // namespace moesaic::pipeline
