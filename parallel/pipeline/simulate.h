#pragma once
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace moesaic::pipeline {

/// What actions take, in any one unit of time.
struct Costs {
  std::vector<double> forward, backward_input,
      backward_weight;  ///< per chunk; a whole backward takes both
  double message = 0;   ///< a bundle from rank to rank, counted from when both have posted it
  /// One unit for each part of each chunk, none for messages.
  static Costs unit(int num_chunks);
};

enum class Communication : std::uint8_t {
  overlapped,  ///< a rank's exchanges run beside its computing, in order; an action waits for what it needs
  blocking,  ///< a rank does one thing at a time
};

struct Span {
  double start = 0, end = 0;
};

struct Simulation {
  std::vector<std::vector<Span>> spans;  ///< of every action, as in the schedule
  double makespan = 0;
  std::vector<double> busy;  ///< time that each rank computes
  /// Share of the ranks' time in which they do not compute: 1 - sum of busy / (ranks * makespan).
  double bubble_fraction() const;
};

/// When every action of a schedule that passes validate() takes place. Overlapped: an exchange starts when the one before
/// it has ended and what it sends is there.
Simulation simulate(const Schedule& schedule,
                    const Costs& costs,
                    Communication communication = Communication::overlapped);

/// How much is kept at once, in the order of the lists.
struct Slots {
  std::vector<int> per_chunk;  ///< micro-batches between forward and the end of backward
  std::vector<int> per_rank;   ///< pairs (chunk, micro-batch) in between
  std::vector<int> deferred;   ///< per rank: pairs between backward-input and backward-weight
};
Slots count_slots(const Schedule& schedule);

}  // namespace moesaic::pipeline
