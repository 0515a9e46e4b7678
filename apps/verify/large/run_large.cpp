// verify --large: cases that are made here, by the CPU backend in f64, at the sizes of the tiled kernels.
#include <fmt/format.h>

#include "apps/assembly.h"
#include "apps/verify/large/case_builder.h"
#include "apps/verify/report.h"
#include "apps/verify/verify.h"

namespace moesaic::verify {
namespace {

constexpr std::size_t kCpuScratchBytes = std::size_t{256} << 20;
constexpr std::size_t kCudaScratchBytes = std::size_t{1} << 30;

/// Runs the case's runner on one side; whatever it throws leaves no work behind that uses the run's memory.
CaseResult pass(CaseRun run, const CaseFamily& family) {
  try {
    family.run(run);
    return run.finish();
  } catch (...) {
    try {
      run.stream().synchronize();
    } catch (...) {  // the first error is the one to report
    }
    throw;
  }
}

/// A kernel that should run and did not is a failure: the case would prove nothing about it.
void check_paths(CaseResult& result, const CaseData& data, const apps::PathLog& paths) {
  for (const auto& [op, want] : data.expected_paths) {
    const std::string got = paths.of(op);
    if (got == want) continue;
    result.status = CaseResult::Status::failed;
    result.note += fmt::format("{}{} took {}, expected {}",
                               result.note.empty() ? "" : "; ",
                               op,
                               got.empty() ? "no kernel" : "the path '" + got + "'",
                               want);
  }
}

class LargeRun {
 public:
  LargeRun(const VerifyOptions& options)
      : precision_(precision_from_name(options.dtype)),
        oracle_(cpu_options(options)),
        tested_(tested_options(options)),
        judges_paths_(options.device == "cuda" && options.path == "auto" &&
                      precision_.compute == DType::bf16) {
    tested_.observe_paths(&paths_);
  }

  CaseResult run(const LargeCase& wanted) {
    for (BackendOwner* owner : {&oracle_, &tested_})
      owner->scratch().poison(owner->stream());
    paths_.clear();
    try {
      return compare(wanted);
    } catch (const std::exception& e) {
      return without_run(wanted.name, CaseResult::Status::failed, e.what());
    }
  }
  const apps::PathLog& paths() const { return paths_; }

 private:
  static BackendOwner::Options cpu_options(const VerifyOptions& options) {
    BackendOwner::Options o;
    o.num_threads = options.num_threads;
    o.scratch_bytes = kCpuScratchBytes;
    return o;
  }
  static BackendOwner::Options tested_options(const VerifyOptions& options) {
    BackendOwner::Options o = cpu_options(options);
    o.device = apps::device_from_name(options.device);
    if (o.device != kCpu) o.scratch_bytes = kCudaScratchBytes;
    o.path = path_from_name(options.path);
    return o;
  }

  CaseResult compare(const LargeCase& wanted) {
    const CaseFamily* family = find_family(wanted.name);
    if (family == nullptr) throw InternalError("no runner for this family of cases");
    CaseBuilder builder(wanted.name, precision_.compute);
    wanted.make(builder);
    CaseData data = builder.take();
    const CaseResult recorded = pass(CaseRun::recording(data, oracle_.backend(), kF64), *family);
    if (recorded.status != CaseResult::Status::passed)
      return without_run(
          wanted.name, CaseResult::Status::failed, "the f64 results: " + recorded.note);
    CaseResult result = pass(CaseRun(data, tested_.backend(), precision_), *family);
    if (judges_paths_) check_paths(result, data, paths_);
    return result;
  }

  Precision precision_;
  BackendOwner oracle_, tested_;
  apps::PathLog paths_;
  bool judges_paths_;
};

}  // namespace

int run_large(const VerifyOptions& options, std::ostream& out) {
  LargeRun run(options);
  Report report(options, out);
  for (const LargeCase& wanted : large_cases()) {
    const CaseResult result = run.run(wanted);
    report.add(result, run.paths());
  }
  return report.close();
}

}  // namespace moesaic::verify
