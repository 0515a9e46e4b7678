#include <cstdlib>
#include <filesystem>
#include <string>

#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include "apps/doctor/read_facts.h"

namespace moesaic::apps::doctor {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Limit limit_of(__rlimit_resource resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

// By the affinity mask; machines beyond the fixed set's size need a larger one.
int allowed_cpus(int machine) {
  const int most = std::max(machine, CPU_SETSIZE) * 2;
  cpu_set_t* set = CPU_ALLOC(most);
  const std::size_t bytes = CPU_ALLOC_SIZE(most);
  CPU_ZERO_S(bytes, set);
  const int count = ::sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : machine;
  CPU_FREE(set);
  return count;
}

}  // namespace

ProcessFacts read_process(int threads) {
  ProcessFacts facts;
  facts.is_root = ::geteuid() == 0;
  facts.mpirun_may_be_root = variable("OMPI_ALLOW_RUN_AS_ROOT") == "1" &&
                             variable("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == "1";
  facts.machine_cpus = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  facts.cpus = allowed_cpus(facts.machine_cpus);
  facts.threads = threads;
  facts.openblas_threads = variable("OPENBLAS_NUM_THREADS");
  facts.locked_memory = limit_of(RLIMIT_MEMLOCK);
  facts.open_files = limit_of(RLIMIT_NOFILE);
  std::error_code error;
  facts.has_infiniband = std::filesystem::exists("/sys/class/infiniband", error) &&
                         !std::filesystem::is_empty("/sys/class/infiniband", error);
  return facts;
}

}  // namespace moesaic::apps::doctor
