#include "apps/doctor/start_warnings.h"

#include "apps/doctor/judge.h"
#include "apps/doctor/read_facts.h"

namespace moesaic::apps::doctor {

std::string shared_memory_warning(int local_ranks, bool on_gpus) {
  const Findings findings =
      judge_shared_memory(read_shared_memory("/dev/shm"), local_ranks, on_gpus ? local_ranks : 0);
  for (const Finding& finding : findings) {
    if (finding.health != Health::ok) return finding.found + ": " + finding.advice;
  }
  return "";
}

}  // namespace moesaic::apps::doctor
