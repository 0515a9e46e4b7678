#pragma once
#include <string>

#include "comm/communicator.h"

namespace moesaic::apps {

/// What all ranks of a run must have in common.
struct RankFacts {
  std::string config;   ///< the effective configuration, as effective_yaml() prints it
  std::string program;  ///< which program this is: version_text(), and build_id()
};

/// All ranks call it, first of all. Throws UsageError on every rank when they were not started alike: the error names the
/// ranks, and the first key that differs with both values, or the line of the version, or says that the programs differ though they call
/// themselves the same. Costs an exchange of a few bytes when all is well.
void require_agreement(Communicator& host, const RankFacts& own);

/// The linker's hash of the running program, in hexadecimal; empty when it was linked without one.
std::string build_id();

}  // namespace moesaic::apps
