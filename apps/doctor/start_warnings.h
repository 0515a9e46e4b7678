#pragma once
#include <string>

namespace moesaic::apps::doctor {

/// What a run says at its start when /dev/shm is too small for this machine's ranks, before NCCL or MPI fail with a text
/// that does not name it; empty when there is room.
std::string shared_memory_warning(int local_ranks, bool on_gpus);

}  // namespace moesaic::apps::doctor
