#pragma once
#include <span>
#include <string>
#include <vector>

namespace moesaic::apps {

/// What the processes of a job see: for each rank the UUIDs of its GPUs, in the order of its own numbers 0, 1, …. A UUID is
/// one device whoever sees it, so that the ranks of all machines can be in one list.
using VisibleGpus = std::vector<std::vector<std::string>>;

struct GpuChoice {
  /// The number, among those that it sees, of the GPU that each rank takes; -1: it sees none, or all are taken.
  std::vector<int> numbers;
  /// The first rank for which no GPU is left, whoever takes which; -1: there is one for each.
  int first_without = -1;
};

/// Each rank takes a GPU of its own if there is any way to do so. Ranks that see the same GPUs take them in order; where a
/// launcher shows each rank its own (--gpus-per-task, --gpu-bind), that is the one. A function of the list alone, so that all
/// ranks come to the same result. `share`: a rank without takes the one that fewest use, the first of them.
GpuChoice choose_gpus(const VisibleGpus& visible, bool share);

/// What a user writes to ask for GPUs, for the CPU instead, and for ranks in turns on a GPU.
struct GpuWords {
  std::string gpu = "run.device: cuda", cpu = "run.device=cpu", share = "comm.share_gpu=true";
};

/// How many different GPUs there are.
int num_different(const VisibleGpus& visible);
/// Whether all ranks of a machine (`hosts`: its name, per rank) see the same, in the same order.
bool is_alike_on_machines(const VisibleGpus& visible, std::span<const std::string> hosts);
/// Why the ranks of this list cannot start, and what to do; empty when they can.
std::string gpu_choice_problem(const VisibleGpus& visible,
                               const GpuChoice& choice,
                               const GpuWords& words = {});

}  // namespace moesaic::apps
