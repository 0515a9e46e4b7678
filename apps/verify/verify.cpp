#include "apps/verify/verify.h"

#include <algorithm>
#include <ostream>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/assembly.h"
#include "apps/path_log.h"

namespace moesaic::verify {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kScratchBytes = std::size_t{256} << 20;

/// Cases of parts that this version does not have; any other case without a runner fails.
const std::map<std::string, std::string>& skip_reasons() {
  static const std::map<std::string, std::string> reasons{
      {"vision__tower", "the vision tower is not implemented"},
      {"loss__policy", "policy-gradient objectives are not implemented"},
      {"kda_cp__ranks", "KDA across context-parallel ranks is not implemented"},
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

KernelPath path_from_name(const std::string& name) {
  if (name == "auto") return KernelPath::automatic;
  if (name == "plain") return KernelPath::plain;
  throw UsageError(fmt::format("--path {}: allowed are auto, plain", name));
}

const char* text(CaseResult::Status status) {
  switch (status) {
    case CaseResult::Status::passed:
      return "passed";
    case CaseResult::Status::failed:
      return "failed";
    case CaseResult::Status::skipped:
      return "skipped";
  }
  return "";
}

CaseResult without_run(const std::string& name,
                       CaseResult::Status status,
                       const std::string& note) {
  CaseResult result;
  result.name = name;
  result.status = status;
  result.note = note;
  return result;
}

void write_row(std::ostream& out, const CaseResult& r) {
  if (r.compared > 0) {
    out << fmt::format("{:<7} {:<38} {:9.2e} (limit {:.1e}) {:3} results, worst {}",
                       text(r.status),
                       r.name,
                       r.worst_error,
                       r.limit,
                       r.compared,
                       r.worst_tensor.empty() ? "-" : r.worst_tensor);
  } else {
    out << fmt::format("{:<7} {:<38}", text(r.status), r.name);
  }
  if (!r.note.empty()) out << "  " << r.note;
  out << '\n' << std::flush;
}

nlohmann::ordered_json to_json(const CaseResult& r) {
  nlohmann::ordered_json j{{"case", r.name}, {"status", text(r.status)}, {"compared", r.compared}};
  if (r.compared > 0) {
    // JSON has no infinity: a result that is not finite is null.
    j["worst_error"] = r.worst_error;
    j["limit"] = r.limit;
    j["worst_tensor"] = r.worst_tensor;
  }
  if (!r.note.empty()) j["note"] = r.note;
  if (!r.paths.empty()) j["paths"] = r.paths;
  return j;
}

}  // namespace

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
  const Precision precision = precision_from_name(options.dtype);
  BackendOwner::Options backend_options;
  backend_options.device = apps::device_from_name(options.device);
  backend_options.num_threads = options.num_threads;
  backend_options.scratch_bytes = kScratchBytes;
  backend_options.path = path_from_name(options.path);
  const std::vector<fs::path> files = case_files(options.cases);
  BackendOwner owner(backend_options);
  apps::PathLog case_paths, all_paths;
  owner.observe_paths(&case_paths);
  std::map<CaseResult::Status, int> count;
  auto rows = nlohmann::ordered_json::array();
  for (const fs::path& file : files) {
    // What one case leaves in the scratch memory must not help or hurt the next.
    owner.scratch().poison(owner.stream());
    case_paths.clear();
    CaseResult result = run_case(file, owner.backend(), precision);
    result.paths = case_paths.text();
    all_paths.add(case_paths);
    ++count[result.status];
    if (options.json) {
      rows.push_back(to_json(result));
    } else {
      write_row(out, result);
    }
  }
  const int passed = count[CaseResult::Status::passed], failed = count[CaseResult::Status::failed];
  const int skipped = count[CaseResult::Status::skipped];
  if (options.json) {
    const nlohmann::ordered_json all{{"device", options.device},
                                     {"dtype", options.dtype},
                                     {"path", options.path},
                                     {"cases", rows},
                                     {"passed", passed},
                                     {"failed", failed},
                                     {"skipped", skipped}};
    out << all.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << '\n';
  } else {
    for (const auto& [what, times] : all_paths.counts())
      out << fmt::format("path    {:<38} {:<10} {} time(s)\n", what.first, what.second, times);
    out << fmt::format("{} passed, {} failed, {} skipped\n", passed, failed, skipped);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace moesaic::verify
