#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"

namespace moesaic::apps {

/// "NAME=value" of the variables that steer launchers and libraries (NCCL_*, OMPI_MCA_*, UCX_*, CUDA_VISIBLE_DEVICES, job
/// and layout of Slurm, threads of BLAS), sorted. Left out: what mpirun sets for itself, and names that sound like secrets.
/// `environment`: as ::environ.
std::vector<std::string> notable_variables(const char* const* environment);
std::vector<std::string> notable_variables();

/// "2 hosts: n001 x 8, n002 x 8"; `names` by rank. Of many hosts the first few are named.
std::string host_list(const std::vector<std::string>& names);
std::string host_name();

/// Processors that this process may run on.
int allowed_processors();
/// All ranks call it. A warning when ranks with `threads` threads are bound to one processor; else empty.
std::string binding_warning(Communicator& host, std::int64_t threads);

}  // namespace moesaic::apps
