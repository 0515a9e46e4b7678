#include "apps/run_environment.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

namespace moesaic::apps {
namespace {

constexpr std::size_t kNamedHosts = 8;

bool begins(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool is_notable(std::string_view name) {
  for (const std::string_view prefix :
       {"NCCL_", "OMPI_MCA_", "UCX_", "SLURM_JOB", "SLURM_N", "SLURM_GPUS", "SLURM_CPUS"}) {
    if (begins(name, prefix)) return true;
  }
  for (const std::string_view exact : {"CUDA_VISIBLE_DEVICES",
                                       "SLURM_RESTART_COUNT",
                                       "SLURM_ARRAY_TASK_ID",
                                       "OMP_NUM_THREADS",
                                       "OPENBLAS_NUM_THREADS"}) {
    if (name == exact) return true;
  }
  return false;
}

// mpirun hands its own state to the ranks in variables that look like settings; one of them is a key.
bool is_internal(std::string_view name) {
  for (const std::string_view prefix : {"OMPI_MCA_orte_",
                                        "OMPI_MCA_ess",
                                        "OMPI_MCA_pmix",
                                        "OMPI_MCA_prte",
                                        "OMPI_MCA_initial_wdir",
                                        "OMPI_MCA_shmem_RUNTIME",
                                        "OMPI_MCA_mpi_oversubscribe"}) {
    if (begins(name, prefix)) return true;
  }
  return false;
}

bool sounds_secret(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) {
    return static_cast<char>(std::toupper(c));
  });
  for (const char* word : {"KEY", "SECRET", "TOKEN", "PASS", "CRED", "AUTH", "TRANSPORTS"}) {
    if (name.find(word) != std::string::npos) return true;
  }
  return false;
}

}  // namespace

std::vector<std::string> notable_variables(const char* const* environment) {
  std::vector<std::string> found;
  for (; *environment != nullptr; ++environment) {
    const std::string_view entry(*environment);
    const auto name = entry.substr(0, entry.find('='));
    if (!is_notable(name) || is_internal(name) || sounds_secret(std::string(name))) continue;
    found.emplace_back(entry);
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<std::string> notable_variables() {
  return notable_variables(::environ);
}

std::string host_name() {
  char name[256] = "";
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown";
}

std::string host_list(const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, int>> hosts;  // in the order of the ranks
  for (const auto& name : names) {
    const auto at =
        std::find_if(hosts.begin(), hosts.end(), [&](const auto& h) { return h.first == name; });
    if (at == hosts.end()) {
      hosts.emplace_back(name, 1);
    } else {
      ++at->second;
    }
  }
  std::string text = fmt::format("{} host(s):", hosts.size());
  for (std::size_t i = 0; i < std::min(hosts.size(), kNamedHosts); ++i)
    text += fmt::format("{} {} x {}", i > 0 ? "," : "", hosts[i].first, hosts[i].second);
  if (hosts.size() > kNamedHosts)
    text += fmt::format(", and {} more, the last {} x {}",
                        hosts.size() - kNamedHosts,
                        hosts.back().first,
                        hosts.back().second);
  return text;
}

int allowed_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

std::string binding_warning(Communicator& host, std::int64_t threads) {
  const std::int64_t bound = threads > 1 && allowed_processors() == 1 ? 1 : 0;
  const std::int64_t ranks = host.all_reduce_host(bound, ReduceOp::sum);
  if (ranks == 0) return {};
  return fmt::format(
      "{} of {} rank(s) may use 1 processor, but run.threads is {}: start with mpirun --map-by "
      "slot:PE={} or --bind-to none",
      ranks,
      host.size(),
      threads,
      threads);
}

}  // namespace moesaic::apps
