#include "apps/verify/verify.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "apps/assembly.h"
#include "apps/verify/report.h"

namespace moesaic::verify {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kScratchBytes = std::size_t{256} << 20;

/// Cases of parts that this version does not have; any other case without a runner fails.
const std::map<std::string, std::string>& skip_reasons() {
  static const std::map<std::string, std::string> reasons{
      {"vision__tower", "the vision tower is not implemented"},
      {"loss__policy", "policy-gradient objectives are not implemented"},
  };
  return reasons;
}

std::vector<fs::path> case_files(const fs::path& cases) {
  std::error_code error;
  if (fs::is_regular_file(cases, error)) return {cases};
  std::vector<fs::path> files;
  fs::directory_iterator entry(cases, error);
  if (error) throw UsageError(fmt::format("--cases {}: {}", cases.string(), error.message()));
  for (; entry != fs::directory_iterator(); entry.increment(error)) {
    if (error) throw UsageError(fmt::format("--cases {}: {}", cases.string(), error.message()));
    if (entry->path().extension() == ".safetensors") files.push_back(entry->path());
  }
  if (files.empty())
    throw UsageError(fmt::format("--cases {}: no .safetensors file there", cases.string()));
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

KernelPath path_from_name(const std::string& name) {
  if (name == "auto") return KernelPath::automatic;
  if (name == "plain") return KernelPath::plain;
  throw UsageError(fmt::format("--path {}: allowed are auto, plain", name));
}

CaseResult run_case(const fs::path& path, Backend& backend, const Precision& precision) {
  const std::string name = path.stem().string();
  using Status = CaseResult::Status;
  try {
    const SafetensorsFile file(path);
    const CaseFamily* family = find_family(name);
    if (family == nullptr) {
      const auto reason = skip_reasons().find(name);
      if (reason != skip_reasons().end()) return without_run(name, Status::skipped, reason->second);
      return without_run(name, Status::failed, "no runner for this family of cases");
    }
    const CaseData data = load_case(file);
    CaseRun run(data, backend, precision);
    try {
      family->run(run);
      return run.finish();
    } catch (...) {
      // Queued work may still use memory that the run owns.
      try {
        stream_of(backend).synchronize();
      } catch (...) {  // the first error is the one to report
      }
      throw;
    }
  } catch (const std::exception& e) {
    return without_run(name, Status::failed, e.what());
  }
}

int run_verify(const VerifyOptions& options, std::ostream& out) {
  if (options.large) return run_large(options, out);
  const Precision precision = precision_from_name(options.dtype);
  BackendOwner::Options backend_options;
  backend_options.device = apps::device_from_name(options.device);
  backend_options.num_threads = options.num_threads;
  backend_options.scratch_bytes = kScratchBytes;
  backend_options.path = path_from_name(options.path);
  const std::vector<fs::path> files = case_files(options.cases);
  BackendOwner owner(backend_options);
  apps::PathLog paths;
  owner.observe_paths(&paths);
  Report report(options, out);
  for (const fs::path& file : files) {
    // What one case leaves in the scratch memory must not help or hurt the next.
    owner.scratch().poison(owner.stream());
    paths.clear();
    report.add(run_case(file, owner.backend(), precision), paths);
  }
  return report.close();
}

}  // namespace moesaic::verify
